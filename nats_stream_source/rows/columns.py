"""The columns of both formats: one table for reading, writing and the documentation.

From it come the DDL that Spark requests, the Arrow schemas (``rows.arrow``), the columns that a
sink writes or ignores (``spark.datasource``), and the tables of the documentation
(``docs/generate.py``).

This module imports neither Spark nor Arrow: Spark starts a process only to request the DDL.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_MAP = "MAP<STRING, ARRAY<STRING>>"


@dataclass(frozen=True, slots=True)
class Written:
    """A column as a sink takes it.

    Attributes:
        type: the accepted types, in words.
    """

    type: str
    meaning: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a format.

    Attributes:
        type: the DDL type of the column that a read returns; None if only a sink has the column.
        written: the column of a sink. None if a sink ignores it, so that rows that were read can
            be written elsewhere.
        option: the option that adds the column; None for a column of every read.
    """

    name: str
    type: str | None = None
    meaning: str = ""
    written: Written | None = None
    option: str | None = None


_HEADERS = Column(
    "headers",
    _MAP,
    "with `includeHeaders`: all values of each name; null for a message without headers",
    Written(_MAP, "headers of the message"),
    option="includeHeaders",
)
_ORIGIN = (
    Column(
        "origin_stream",
        "STRING",
        "with `includeOrigin`: the stream from which a source copied the message, as the server "
        "names it; null for a message that was published to this stream",
        option="includeOrigin",
    ),
    Column(
        "origin_sequence",
        "BIGINT",
        "with `includeOrigin`: the sequence of the message in `origin_stream`",
        option="includeOrigin",
    ),
)

COLUMNS = {
    "nats_kv": (
        Column("bucket", "STRING", "name of the bucket"),
        Column(
            "key",
            "STRING",
            "the key",
            Written("STRING", "the rules of ADR-8: letters, digits and `-/_=.`", required=True),
        ),
        Column(
            "value",
            "BINARY",
            "the value; null for a marker and with `metaOnly`",
            Written(
                "BINARY or STRING",
                "a string is written as UTF-8; null is an error for a PUT, so write `''` for an "
                "empty value",
            ),
        ),
        Column("revision", "BIGINT", "stream sequence of the entry"),
        Column("created", "TIMESTAMP", "when the server stored the entry, floored to microseconds"),
        Column(
            "operation",
            "STRING",
            "`PUT`, or for a marker `DEL` or `PURGE`",
            Written("STRING", "`PUT` (also when null or absent), `DEL` or `PURGE`"),
        ),
        Column(
            "delta",
            "BIGINT",
            "number of entries that were pending behind this one; the one column that may differ "
            "when a range is read again",
        ),
        Column("initial", "BOOLEAN", "whether the bucket held the entry when the query started"),
        Column("stream_created", "TIMESTAMP", "when the bucket was created"),
        Column(
            "expected_revision",
            written=Written(
                "BIGINT",
                "null: write in any case; 0: the key must not exist; n: the key's last revision "
                "must be n",
            ),
        ),
        Column(
            "ttl",
            written=Written(
                "BIGINT",
                "seconds after which the entry expires; needs server 2.11 and a bucket with "
                "`limitMarkerTtl`",
            ),
        ),
        _HEADERS,
        *_ORIGIN,
        Column(
            "raw_key",
            "STRING",
            "with `includeRawKey`: the key as it is stored, before `keyCodec` decodes it",
            option="includeRawKey",
        ),
    ),
    "nats_stream": (
        Column("stream", "STRING", "name of the stream"),
        Column(
            "subject",
            "STRING",
            "subject of the message; bytes that are not UTF-8, which servers accept, become U+FFFD",
            Written(
                "STRING",
                "a subject of the stream, without wildcards; not needed with the option "
                "`subject`, which then applies to all rows",
            ),
        ),
        Column(
            "data",
            "BINARY",
            "the payload; null with `headersOnly`",
            Written("BINARY or STRING", "null is an error", required=True),
        ),
        Column("sequence", "BIGINT", "stream sequence"),
        Column(
            "timestamp", "TIMESTAMP", "when the server stored the message, floored to microseconds"
        ),
        Column("stream_created", "TIMESTAMP", "when the stream was created"),
        _HEADERS,
        *_ORIGIN,
        Column(
            "msg_id",
            written=Written(
                "STRING",
                "`Nats-Msg-Id`: within the duplicate window the stream stores one message with "
                "this id",
            ),
        ),
    ),
}
"""The columns by format, in the order of its rows."""


def read_columns(format_name: str, added: Collection[str] = ()) -> dict[str, str]:
    """The DDL types of the columns that a read returns, by name.

    Args:
        added: the options that add a column and are set.
    """
    return {
        column.name: column.type
        for column in COLUMNS[format_name]
        if column.type is not None and (column.option is None or column.option in added)
    }


def ddl(format_name: str, added: Collection[str] = ()) -> str:
    """The columns that a read returns, as DDL; ``added`` as in :func:`read_columns`.

    With ``spark.sql.timestampType=TIMESTAMP_NTZ``, Spark reads ``TIMESTAMP`` as a local time.
    """
    return declared(format_name, added).replace("TIMESTAMP", "TIMESTAMP_LTZ")


def declared(format_name: str, added: Collection[str] = ()) -> str:
    """The columns that a read returns, by Spark's names of their types."""
    columns = read_columns(format_name, added)
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())
