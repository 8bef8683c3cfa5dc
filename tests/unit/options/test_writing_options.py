"""Options of writing; errors name settings in asyncio programs, options in Spark, else flags."""

from __future__ import annotations

import ast
import dataclasses
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nats_stream_source.cli.options import error_text
from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import (
    ConfigurationError,
    ConnectError,
    DataLossError,
    KeyDeletedError,
    NatsSourceError,
    OptionError,
    PermissionDeniedError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.kv.codec import KvCodec
from nats_stream_source.jetstream.subjects import api_prefix, validate_filters
from nats_stream_source.options import CONNECTION, KV, STREAM
from nats_stream_source.options.table import add_option_hints, option_hints
from nats_stream_source.options.writing import (
    KvWriteOptions,
    StreamWriteOptions,
    kv_write_options,
    stream_write_options,
    without_query_options,
)
from nats_stream_source.spark.runner import Runner
from tests.support.paths import ROOT

SERVER = {"servers": "nats://127.0.0.1:4222"}


def kv(**given: str) -> KvWriteOptions:
    return kv_write_options({**SERVER, "bucket": "fleet", **given})


def stream(**given: str) -> StreamWriteOptions:
    return stream_write_options({**SERVER, "stream": "ORDERS", **given})


def test_defaults() -> None:
    options = kv()
    assert (options.skip_conflicts, options.message_ids) == (False, False)
    assert (options.create, options.max_in_flight) == (False, 4096)
    assert not options.codec
    assert stream().subject is None


def test_codecs() -> None:
    codec = kv(keycodec="path,base64", valueCodec="base64").codec
    assert codec == KvCodec(("path", "base64"), ("base64",))


def test_bucket_to_create() -> None:
    given = {
        "ifMissing": "CREATE",
        "history": "5",
        "replicas": "3",
        "storage": "memory",
        "ttl": "600",
        "duplicateWindow": "300",
        "limitMarkerTtl": "60",
        "maxBytes": "64m",
        "compression": "s2",
        "placementCluster": "east",
        "placementTags": "ssd, large",
    }
    config = kv(**given).config.stream_config()
    expected = {
        "max_msgs_per_subject": 5,
        "num_replicas": 3,
        "storage": "memory",
        "max_age": 600_000_000_000,
        "duplicate_window": 300_000_000_000,
        "subject_delete_marker_ttl": 60_000_000_000,
        "max_bytes": 64 << 20,
        "compression": "s2",
        "placement": {"cluster": "east", "tags": ["ssd", "large"]},
    }
    assert expected.items() <= config.items()


def test_stream_to_create() -> None:
    config = stream(ifMissing="create", subject="orders.new", ttl="600", fastIngest="true").config
    assert (config["subjects"], config["max_age"]) == (["orders.new"], 600_000_000_000)
    assert config["allow_batched"]
    assert not {"max_bytes", "compression", "placement", "metadata"} & config.keys()
    config = stream(ifMissing="create", subject="orders.new", subjects="orders.>, audit.*").config
    assert config["subjects"] == ["orders.>", "audit.*"]


CREATE = {"ifMissing": "create"}

BAD_KV = [
    ({"bucket": "a,b"}, "is a list, expected one name"),
    ({"bucket": "a.b"}, "is not a bucket name"),
    ({"stream": "S"}, "unknown option 'stream': write 'bucket'"),
    ({"onConflict": "ignore"}, "is not one of fail, skip"),
    ({"messageId": "key"}, "is not one of none, auto"),
    ({"ifMissing": "yes"}, "is not one of error, create"),
    ({"maxInFlight": "0"}, "is smaller than 1"),
    ({"maxInFlight": "10001"}, "is larger than 10000"),
    ({"history": "5"}, "'history' has no effect without ifMissing=create"),
    ({"replicas": "1"}, "'replicas' has no effect without"),
    ({"metadata": "{}"}, "'metadata' has no effect without ifMissing=create"),
    (CREATE | {"history": "65"}, "is larger than 64"),
    (CREATE | {"replicas": "6"}, "is larger than 5"),
    (CREATE | {"ttl": "0"}, "is not between 0.1 and 9,000,000,000"),
    (
        CREATE | {"ttl": "10", "duplicateWindow": "20"},
        "duplicate_window is 20.0, expected 0.1 seconds or more, at most the ttl",
    ),
    (CREATE | {"metadata": '{"a"'}, "is not a JSON object: Expecting"),
    *((CREATE | {"metadata": text}, "not a JSON object of str") for text in ('{"a": 1}', '["a"]')),
    (CREATE | {"metadata": '{"_nats.level": "9"}'}, "begins with '_nats"),
    ({"includeHeaders": "true"}, "the column 'headers' is written"),
    ({"topic": "t"}, "write 'bucket'"),
    ({"keyCodec": "rot13"}, "is not a codec, .* of base64, path; write 'base64', 'pa"),
    ({"onUndecodable": "skip"}, "it is an option of reading; remove it"),
    ({"includeRawKey": "true"}, "a column 'raw_key' of the DataFrame is ignored"),
    ({"checkpointlocation": "/tmp/x"}, r"an option of df\.writeStream"),
]

BAD_STREAM = [
    ({"stream": "a b"}, "is not a stream's name"),
    ({"bucket": "b"}, r"write format\('nats_kv'\)"),
    ({"subject": "orders.>"}, "is not one token"),
    (CREATE, "option 'subjects' is missing"),
    (CREATE | {"subjects": "a..b"}, "is not a subject filter"),
    (CREATE | {"subjects": "a.>,a.b"}, "overlap"),
    ({"subjects": "a"}, "'subjects' has no effect without ifMissing=create"),
    ({"onConflict": "skip"}, "does not have revisions per key"),
    ({"valueCodec": "base64"}, r"are not encoded; write format\('nats_kv'\)"),
]


@pytest.mark.parametrize(("given", "text"), BAD_KV, ids=str)
def test_options_of_bucket_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        kv(**given)


@pytest.mark.parametrize(("given", "text"), BAD_STREAM, ids=str)
def test_options_of_stream_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        stream(**given)


def test_names_are_required() -> None:
    with pytest.raises(OptionError, match="option 'bucket' is missing"):
        kv_write_options(SERVER)
    with pytest.raises(OptionError, match="option 'stream' is missing"):
        stream_write_options(SERVER)


def test_options_of_query_are_not_those_of_sink() -> None:
    assert without_query_options({**SERVER, "checkpointlocation": "/tmp/x"}) == SERVER


READING = CONNECTION + KV + STREAM


# -- the layers below the options ------------------------------------------------------------------

PACKAGE = ROOT / "nats_stream_source"

FOLDERS = [
    folder.relative_to(PACKAGE).as_posix()
    for layer in ("wire", "aio", "connection", "jetstream")
    for folder in sorted({path.parent for path in (PACKAGE / layer).rglob("*.py")})
]


# Names in camel case: the others are also words, and names of settings.
CAMEL_CASE = {
    option.name for option in CONNECTION + KV + STREAM if option.name.lower() != option.name
}


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """The string literals of a module, docstrings included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_layers_below_options_name_none(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((PACKAGE / folder).glob("*.py"))
        for line, text in literals(path)
        for name in [*CAMEL_CASE, "option '", "options '"]
        if name in text
    ]
    assert not found, "\n".join(found)


def in_python(servers: str = "nats://h:1", **settings: str) -> NatsSourceError:
    with pytest.raises(NatsSourceError) as caught:
        ConnectionSettings((servers,), **settings).validate()
    return caught.value


def test_asyncio_errors_name_settings() -> None:
    error = in_python(tls_cert_file="/c")
    assert "'tls_cert_file' and 'tls_key_file' belong together" in str(error)
    assert error.settings == ("tls_cert_file", "tls_key_file")
    with pytest.raises(ConfigurationError, match="'api_prefix' and 'domain'"):
        api_prefix("a", "b")
    with pytest.raises(ConfigurationError, match=r"in 'keys'$"):
        validate_filters(["a.*", "a.b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"inbox_prefix": "i" * 4090},
            "'inbox_prefix' has 4,090 bytes, .* together 4,097, expected at most 3,896",
        ),
        (
            {"inbox_prefix": "i" * 200, "api_prefix": "é" * 2000},
            "'api_prefix' has 4,000 bytes, .* together 4,200, expected at most 3,896",
        ),
        (
            {"inbox_prefix": "é" * 2030},
            "'inbox_prefix' is 'éééé.*', expected a subject: tokens",
        ),
        ({"consumer_prefix": "é" * 201}, "'consumer_prefix' has 402 bytes, expected at most 200"),
        ({"consumer_prefix": "a.b"}, "'consumer_prefix' is 'a.b', expected one token"),
    ],
)
def test_prefixes_that_servers_do_not_accept(settings: dict[str, str], message: str) -> None:
    error = in_python(**settings)
    assert re.match(message, str(error))
    assert len(str(error)) < 300
    assert error.settings[0] in message


# -- translation -----------------------------------------------------------------------------------

LOST = "; set option 'failOnDataLoss' to 'false' to continue without the lost messages"


@pytest.mark.parametrize(
    ("error", "in_spark", "in_cli"),
    [
        (
            ConnectError("not within 1 s ('connect_timeout')", settings=["connect_timeout"]),
            " (option 'connectTimeout')",
            " (--connect-timeout)",
        ),
        (RequestTimeoutError("of a class"), " (option 'requestTimeout')", " (--request-timeout)"),
        (
            PermissionDeniedError("change 'api_prefix'", settings=["inbox_prefix", "api_prefix"]),
            " (options 'inboxPrefix' or 'apiPrefix')",
            " (--inbox-prefix or --api-prefix)",
        ),
        (RequestTimeoutError("no setting", settings=()), "", ""),
        (NatsSourceError("no option", settings=["heartbeat"]), "", ""),
        (
            NatsSourceError("no flag", settings=["include_history"]),
            " (option 'includeHistory')",
            "",
        ),
        (DataLossError("3 messages were removed"), LOST, ""),
        (DataLossError("removed; failOnDataLoss=false continues"), "", ""),
    ],
    ids=str,
)
def test_names_of_settings_are_appended_once(
    error: NatsSourceError, in_spark: str, in_cli: str
) -> None:
    text = str(error)
    assert error_text(error, {}) == text + in_cli
    error = pickle.loads(pickle.dumps(error))
    for _ in range(2):
        add_option_hints(error, READING)
        assert str(error) == text + in_spark
    assert error_text(error, {}) == text + (in_cli or in_spark)


def test_options_in_text_become_flags() -> None:
    error = OptionError("options 'user' and 'password' belong together")
    assert error_text(error, {}) == "--user and --password belong together"
    add_option_hints(error, READING)
    assert str(error) == "options 'user' and 'password' belong together"
    error = OptionError("keys with connectTimeout=3 in 's3://lake/connectTimeout=3'")
    expected = "keys with --connect-timeout=3 in 's3://lake/connectTimeout=3'"
    assert error_text(error, {}) == expected


def test_error_keeps_all_but_its_text() -> None:
    error = KeyDeletedError("deleted", 7, "DEL", settings=["request_timeout"])
    with pytest.raises(KeyDeletedError) as caught, option_hints(READING):
        raise error
    assert caught.value is error
    assert (error.revision, error.operation) == (7, "DEL")
    assert (error.code, error.err_code) == (404, 10037)
    assert str(error) == "deleted (option 'requestTimeout')"


def test_spark_errors_name_options() -> None:
    runner = Runner(ConnectionSettings(("nats://127.0.0.1:1",), connect_timeout=0.2))
    try:
        with pytest.raises(ConnectError, match=r"within 0.2 s .*\(option 'connectTimeout'\)$"):
            runner.run(runner.connection.connection())

        async def fails() -> None:
            raise RequestTimeoutError("no response")

        with pytest.raises(RequestTimeoutError, match=r" \(option 'requestTimeout'\)$"):
            runner.plan(fails)
    finally:
        runner.close()


# -- the table -------------------------------------------------------------------------------------


def test_connection_options_are_settings() -> None:
    fields = {field.name for field in dataclasses.fields(ConnectionSettings)}
    options = {option.setting for option in CONNECTION}
    assert options - fields == {"domain"}  # sets api_prefix
    assert fields - options == set()
