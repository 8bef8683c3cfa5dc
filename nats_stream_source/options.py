"""The one table of options.

Each option has one row here: its name as Spark users write it, its type, its default, what it
means. Parsing, the error for an unknown name, and the table in the README come from it. Names are
case-insensitive, as Spark's are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import ConfigurationError, OptionError
from nats_stream_source.jetstream.settings import ConnectionSettings
from nats_stream_source.jetstream.subjects import api_prefix, check_bucket, check_filters

# What Spark's default ``spark.redaction.regex`` looks for, in an option's name and in its value.
_REDACTED = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("an empty text")
    return value.strip()


def _boolean(value: str) -> bool:
    lowered = value.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError("neither true nor false")
    return lowered == "true"


def _integer(value: str) -> int:
    number = int(value.strip())
    if number < 1:
        raise ValueError("smaller than 1")
    if number >= 2**63:
        raise ValueError("larger than a sequence can be")
    return number


def _partitions(value: str) -> int:
    number = _integer(value)
    if number > 10_000:
        raise ValueError("larger than 10000")
    return number


def _bytes(value: str) -> int:
    digits, unit = value.strip().lower(), 1
    for shift, suffix in ((10, "k"), (20, "m"), (30, "g")):
        if digits.endswith(suffix):
            digits, unit = digits[:-1], 1 << shift
    return _integer(str(int(digits) * unit))


def _seconds(value: str) -> float:
    number = float(value.strip())
    if not 0.05 <= number <= 3600:
        raise ValueError("not between 0.05 and 3600")
    return number


def _list(value: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in value.split(","))
    if not all(parts):
        raise ValueError("a list with an empty element")
    return parts


def _servers(value: str) -> tuple[str, ...]:
    if "@" in value:
        raise ValueError(
            "it holds credentials, which Spark would show in plans: use the options 'user' and "
            "'password', or 'token'"
        )
    return _list(value)


def _credentials(value: str) -> str:
    if not _REDACTED.search(value):
        raise ValueError(
            "Spark hides the value of an option with this name only where the value itself has a "
            "word like 'secret', and would show this one in plans: give the whole file as nsc "
            "writes it, comments included, or add a last line '# secret'"
        )
    return value


def _token(value: str) -> str:
    if not value or set(value) & set(" \t\r\n.*>"):
        raise ValueError("not one token: no dots, wildcards or spaces")
    return value


def _subject(value: str) -> str:
    if not all(_token(token) for token in value.split(".")):
        raise ValueError("not a subject")
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``kind`` is its type in words; ``parse`` raises ValueError with the reason."""

    name: str
    kind: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str
    secret: bool = False


CONNECTION: tuple[Option, ...] = (
    Option("servers", "list of URLs", _servers, None, "where the NATS servers are; required", True),
    Option("user", "text", _text, None, "user name"),
    Option("password", "text", _text, None, "password of `user`", secret=True),
    Option("token", "text", _text, None, "authentication token", secret=True),
    Option("credentials", "path", _text, None, "credentials file (user JWT and nkey seed)"),
    Option(
        "credentialsContent",
        "credentials file's text",
        _credentials,
        None,
        "the text of a credentials file, where none can be put on every machine",
        secret=True,
    ),
    Option("nkeySeedFile", "path", _text, None, "file with a user's nkey seed"),
    Option("tlsCaFile", "path", _text, None, "PEM certificates to trust, instead of the system's"),
    Option("tlsCertFile", "path", _text, None, "PEM certificate that proves the client"),
    Option("tlsKeyFile", "path", _text, None, "private key of `tlsCertFile`, not encrypted"),
    Option(
        "tlsHandshakeFirst",
        "boolean",
        _boolean,
        False,
        "begin with the TLS handshake; for servers that are set so",
    ),
    Option("domain", "token", _token, None, "JetStream domain to read from (ADR-19)"),
    Option("apiPrefix", "subject", _subject, None, "prefix of the JetStream API (ADR-19)"),
    Option("inboxPrefix", "subject", _subject, "_INBOX", "first tokens of reply subjects"),
    Option("consumerPrefix", "token", _token, "spark", "first part of the consumers' names"),
    Option("connectTimeout", "seconds", _seconds, 10.0, "limit for connecting"),
    Option("requestTimeout", "seconds", _seconds, 5.0, "limit for one answer of a server"),
)

KV: tuple[Option, ...] = (
    Option("bucket", "text", _text, None, "the bucket's name; required"),
    Option(
        "keys",
        "list of key filters",
        _list,
        (),
        "keys to read, with `*` for one token and `>` for the rest; all when not given",
    ),
    Option(
        "includeHistory",
        "boolean",
        _boolean,
        False,
        "begin with all revisions that the bucket holds, not just the last of each key",
    ),
    Option("updatesOnly", "boolean", _boolean, False, "begin with what is written from now on"),
    Option("ignoreDeletes", "boolean", _boolean, False, "leave DEL and PURGE markers out"),
    Option("metaOnly", "boolean", _boolean, False, "leave values out: `value` is null"),
    Option("startSequence", "integer", _integer, None, "begin with this revision, and all later"),
    Option(
        "maxRowsPerTrigger", "integer", _integer, None, "the most rows that one micro-batch reads"
    ),
    Option(
        "maxBytesPerTrigger",
        "bytes",
        _bytes,
        None,
        "about the most bytes that one micro-batch reads, by the stream's mean message size; a "
        "number, or one with `k`, `m` or `g` behind it (of 1024); holds beside "
        "`maxRowsPerTrigger`",
    ),
    Option(
        "minPartitions",
        "integer",
        _partitions,
        None,
        "into how many tasks a micro-batch is split at least, as far as it has revisions; without "
        "it, into one for every 500,000 rows or 128 MiB, but no more than the driver has cores",
    ),
    Option(
        "failOnDataLoss",
        "boolean",
        _boolean,
        True,
        "fail when entries that were not read yet are gone; `false` warns and goes on",
    ),
)


@dataclass(frozen=True, slots=True)
class KvOptions:
    """The options of ``nats_kv``, parsed and checked against each other."""

    connection: ConnectionSettings
    bucket: str
    keys: tuple[str, ...]
    include_history: bool
    updates_only: bool
    ignore_deletes: bool
    meta_only: bool
    start_sequence: int | None
    max_rows: int | None
    max_bytes: int | None
    min_partitions: int | None
    fail_on_data_loss: bool


def parse(given: Mapping[str, str], table: tuple[Option, ...]) -> dict[str, Any]:
    """Values by option name, defaults filled in.

    Raises:
        OptionError: a name that the table does not have (with the nearest one), or a value that is
            not of the option's type. The value itself is not repeated for a secret.
    """
    by_name = {option.name.lower(): option for option in table}
    values: dict[str, Any] = {option.name: option.default for option in table}
    for name, text in given.items():
        option = by_name.get(name.lower())
        if option is None:
            near = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.5)
            hint = f"; did you mean {by_name[near[0]].name!r}?" if near else ""
            raise OptionError(f"unknown option {name!r}{hint}")
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            shown = "" if option.secret else f" {text!r}"
            raise OptionError(
                f"option {option.name!r}: the value{shown} is not a {option.kind}: {error}"
            ) from None
    return values


def connection_settings(values: Mapping[str, Any]) -> ConnectionSettings:
    """The connection's part of parsed values; OptionError when it contradicts itself."""
    if not values["servers"]:
        raise OptionError("option 'servers' is missing: for example nats://127.0.0.1:4222")
    if values["domain"] and values["apiPrefix"]:
        raise OptionError("options 'domain' and 'apiPrefix' exclude each other")
    settings = ConnectionSettings(
        servers=values["servers"],
        user=values["user"],
        password=values["password"],
        token=values["token"],
        api_prefix=api_prefix(values["apiPrefix"], values["domain"]),
        inbox_prefix=values["inboxPrefix"],
        consumer_prefix=values["consumerPrefix"],
        connect_timeout=values["connectTimeout"],
        request_timeout=values["requestTimeout"],
        credentials=values["credentials"],
        credentials_content=values["credentialsContent"],
        nkey_seed_file=values["nkeySeedFile"],
        tls_ca_file=values["tlsCaFile"],
        tls_cert_file=values["tlsCertFile"],
        tls_key_file=values["tlsKeyFile"],
        tls_handshake_first=values["tlsHandshakeFirst"],
    )
    try:
        settings.check()
    except OptionError:
        raise
    except ConfigurationError as error:
        raise OptionError(str(error)) from None
    return settings


def kv_options(given: Mapping[str, str]) -> KvOptions:
    """Parse and check the options of ``nats_kv``.

    Raises:
        OptionError: unknown, missing, of the wrong type, or contradicting another.
        InvalidNameError: the bucket or a key filter breaks ADR-8's rules.
        ConfigurationError: two key filters overlap.
    """
    values = parse(given, CONNECTION + KV)
    if values["bucket"] is None:
        raise OptionError("option 'bucket' is missing: the name of the key-value bucket")
    for one, other in (("updatesOnly", "includeHistory"), ("updatesOnly", "startSequence")):
        if values[one] and values[other]:
            raise OptionError(
                f"options {one!r} and {other!r} contradict each other: they name two beginnings"
            )
    most, least = values["maxRowsPerTrigger"], values["minPartitions"]
    if most is not None and least is not None and least > most:
        raise OptionError(
            f"options 'minPartitions' and 'maxRowsPerTrigger' contradict each other: {most} rows "
            f"do not make {least} tasks"
        )
    return KvOptions(
        connection=connection_settings(values),
        bucket=check_bucket(values["bucket"]),
        keys=() if values["keys"] == (">",) else tuple(sorted(check_filters(values["keys"]))),
        include_history=values["includeHistory"],
        updates_only=values["updatesOnly"],
        ignore_deletes=values["ignoreDeletes"],
        meta_only=values["metaOnly"],
        start_sequence=values["startSequence"],
        max_rows=values["maxRowsPerTrigger"],
        max_bytes=values["maxBytesPerTrigger"],
        min_partitions=values["minPartitions"],
        fail_on_data_loss=values["failOnDataLoss"],
    )


def markdown_table(table: tuple[Option, ...]) -> str:
    """The table of options as the README shows it."""
    lines = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for option in table:
        default = {None: "", (): "", True: "`true`", False: "`false`"}.get(
            option.default, f"`{option.default}`"
        )
        if isinstance(option.default, float):
            default = f"`{option.default:g}`"
        lines.append(f"| `{option.name}` | {option.kind} | {default} | {option.meaning} |")
    return "\n".join(lines) + "\n"
