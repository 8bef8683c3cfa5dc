"""Rows of a stream as messages, and the rows that are refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.errors import ConfigurationError, InvalidNameError, NatsSourceError
from nats_stream_source.spark.writing.rows import MessageIds, StreamRowEncoder
from nats_stream_source.wire.header_columns import HEADERS
from nats_stream_source.wire.publish.frames import MessageColumns

TYPES = {"subject": pa.string(), "data": pa.binary(), "headers": HEADERS, "msg_id": pa.string()}
FILTERS = ("orders.*.new", "audit.>", "plain")


def encode(
    *rows: dict[str, Any],
    subject: str | None = None,
    every: bool = False,
    filters: tuple[str, ...] = FILTERS,
) -> MessageColumns:
    names = [name for name in TYPES if any(name in row for row in rows)]
    arrays = [pa.array([row.get(name) for row in rows], TYPES[name]) for name in names]
    encoder = StreamRowEncoder("ORDERS", subject, filters, MessageIds("job", 0, every), None)
    return encoder.encode(pa.RecordBatch.from_arrays(arrays, names=names))


@pytest.mark.parametrize("subject", ["orders.eu.new", "audit.a", "audit.a.b.c", "plain"])
def test_subjects_of_stream(subject: str) -> None:
    assert encode({"subject": subject, "data": b""}).subject(0) == subject


@pytest.mark.parametrize("subject", ["orders.new", "orders.a.b.new", "audit", "plain.x", "xplain"])
def test_subjects_of_another_stream(subject: str) -> None:
    with pytest.raises(InvalidNameError, match=r"the stream does not have the subject, expected"):
        encode({"subject": subject, "data": b""})
    encode({"subject": subject, "data": b""}, filters=())


REFUSED: list[tuple[dict[str, Any], type[NatsSourceError], str]] = [
    ({"subject": None}, InvalidNameError, "subject None: expected tokens"),
    ({"subject": "audit.>"}, InvalidNameError, "without wildcards"),
    ({"subject": "audit.*"}, InvalidNameError, "without wildcards"),
    ({"subject": "audit.a b"}, InvalidNameError, "without wildcards"),
    ({"subject": "audit..a"}, InvalidNameError, "expected tokens"),
    ({"subject": "audit.a\r\nPUB x 0"}, InvalidNameError, "expected tokens"),
    ({"data": None}, ConfigurationError, "data is null; write empty data as ''"),
    ({"msg_id": ""}, ConfigurationError, "msg_id is empty"),
    ({"msg_id": "a\r\nb: c"}, ConfigurationError, "line break"),
]


@pytest.mark.parametrize(("row", "kind", "text"), REFUSED)
def test_refused_rows(row: dict[str, Any], kind: type[NatsSourceError], text: str) -> None:
    good = {"subject": "plain", "data": b"1"}
    with pytest.raises(kind) as caught:
        encode(good, {"subject": "plain", "data": b"1", **row})
    assert str(caught.value).startswith("could not write row 1 of partition 0 to stream 'ORDERS': ")
    assert text in str(caught.value)


def test_subject_option_applies_to_all_rows() -> None:
    columns = encode({"data": b"1"}, {"data": b"2"}, subject="plain")
    assert [columns.subject(i) for i in range(2)] == ["plain", "plain"]
    assert encode({"subject": "audit.x", "data": b"1"}, subject="plain").subject(0) == "plain"


def test_message_ids_of_column_come_first() -> None:
    columns = encode(
        {"subject": "plain", "data": b"1", "msg_id": "mine"},
        {"subject": "plain", "data": b"1"},
        every=True,
    )
    assert columns.headers is not None
    mine, automatic = columns.headers.to_pylist()
    assert mine == b"NATS/1.0\r\nNats-Msg-Id: mine\r\n\r\n"
    assert automatic.startswith(b"NATS/1.0\r\nNats-Msg-Id: job.0.1.")
    columns = encode({"subject": "plain", "data": b"1", "msg_id": None})
    assert columns.headers is None
