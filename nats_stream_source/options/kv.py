"""The options of ``nats_kv``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.settings import ConnectionSettings
from nats_stream_source.jetstream.subjects import check_bucket, check_filters
from nats_stream_source.options import kinds
from nats_stream_source.options.beginning import Beginning, DeliverPolicy
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.reading import READING, Reading, check_alone, check_mode
from nats_stream_source.options.table import Mode, Option, parse

KV: tuple[Option, ...] = (
    Option("bucket", "text", kinds.text, None, "the bucket's name; required"),
    Option(
        "keys",
        "list of key filters",
        kinds.names,
        (),
        "keys to read, with `*` for one token and `>` for the rest; all when not given",
    ),
    Option(
        "includeHistory",
        "boolean",
        kinds.boolean,
        False,
        "begin with all revisions that the bucket holds, not just the last of each key",
    ),
    Option(
        "updatesOnly", "boolean", kinds.boolean, False, "begin with what is written from now on"
    ),
    Option("ignoreDeletes", "boolean", kinds.boolean, False, "leave DEL and PURGE markers out"),
    Option("metaOnly", "boolean", kinds.boolean, False, "leave values out: `value` is null"),
    Option(
        "startSequence", "integer", kinds.integer, None, "begin with this revision, and all later"
    ),
    Option(
        "startTime",
        "time",
        kinds.moment,
        None,
        "begin with the first revision of this time or later (RFC 3339, with a zone)",
    ),
    Option(
        "minLastRevision",
        "integer",
        kinds.integer,
        None,
        "begin once the bucket has this revision (ADR-53), for example that of one's own last "
        "write; fails when it has not within `requestTimeout`",
    ),
    Option(
        "asOfSequence",
        "integer",
        kinds.integer,
        None,
        "the bucket as it was at this revision, as far as its history reaches",
        only=Mode.BATCH,
    ),
    Option(
        "asOfTime",
        "time",
        kinds.moment,
        None,
        "the bucket as it was at this time (RFC 3339, with a zone), likewise",
        only=Mode.BATCH,
    ),
    *READING,
)


@dataclass(frozen=True, slots=True)
class KvOptions:
    """The options of ``nats_kv``, parsed and checked against each other.

    Attributes:
        beginning: where it begins; ``last_per_subject`` stands for each key's last entry.
        as_of_sequence, as_of_time: the state that a batch reads, when not the present one;
            nanoseconds since 1970.
    """

    connection: ConnectionSettings
    bucket: str
    keys: tuple[str, ...]
    include_history: bool
    ignore_deletes: bool
    meta_only: bool
    beginning: Beginning
    min_last_revision: int | None
    as_of_sequence: int | None
    as_of_time: int | None
    reading: Reading


def kv_options(given: Mapping[str, str], mode: Mode | None = None) -> KvOptions:
    """Parse and check the options of ``nats_kv``.

    Args:
        mode: how they are read; None where that is not known yet.

    Raises:
        OptionError: unknown, missing, of the wrong type, or contradicting another.
        InvalidNameError: the bucket or a key filter breaks ADR-8's rules.
        ConfigurationError: two key filters overlap.
    """
    values = parse(given, CONNECTION + KV)
    if values["bucket"] is None:
        raise OptionError("option 'bucket' is missing: the name of the key-value bucket")
    check_mode(values, KV, mode)
    check_alone(values, "asOfSequence", "asOfTime", why="they name two states")
    for one in ("updatesOnly", "startSequence", "startTime", "includeHistory"):
        for state in ("asOfSequence", "asOfTime"):
            check_alone(values, one, state, why="a state of the bucket has no beginning")
    check_alone(values, "updatesOnly", "startSequence", "startTime", why="they name two beginnings")
    check_alone(values, "updatesOnly", "includeHistory", why="they name two beginnings")
    if mode is Mode.BATCH and values["updatesOnly"]:
        raise OptionError(
            "option 'updatesOnly' is for spark.readStream: to spark.read, which ends with what "
            "there is now, it would leave nothing"
        )
    return KvOptions(
        connection=connection_settings(values),
        bucket=check_bucket(values["bucket"]),
        keys=() if values["keys"] == (">",) else tuple(sorted(check_filters(values["keys"]))),
        include_history=values["includeHistory"],
        ignore_deletes=values["ignoreDeletes"],
        meta_only=values["metaOnly"],
        beginning=_beginning(values),
        min_last_revision=values["minLastRevision"],
        as_of_sequence=values["asOfSequence"],
        as_of_time=values["asOfTime"],
        reading=Reading.of(values),
    )


def _beginning(values: Mapping[str, Any]) -> Beginning:
    chosen = Beginning.at(values["startSequence"], values["startTime"])
    if chosen is not None:
        return chosen
    if values["updatesOnly"]:
        return Beginning(DeliverPolicy.NEW)
    return Beginning(
        DeliverPolicy.ALL if values["includeHistory"] else DeliverPolicy.LAST_PER_SUBJECT
    )
