"""Fast ingest on the wire: the reply subjects of a batch, and the responses of servers."""

from __future__ import annotations

import pyarrow as pa
import pytest

from nats_stream_source.wire.publish.fast_ingest import (
    END,
    MAX_FLOW,
    PING,
    BatchResponse,
    ResponseKind,
    control,
    encode_batch,
    parse_reply,
    parse_response,
)
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns

INBOX = "_INBOX.abc."
BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
ERROR = {"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}
ERROR_JSON = b'{"code":503,"err_code":10077,"description":"maximum messages exceeded"}'


def columns(count: int, headers: bool = False) -> MessageColumns:
    return MessageColumns(
        pa.array([f"s.{i}" for i in range(count)]),
        pa.array([b"%d" % i for i in range(count)], pa.binary()),
        pa.array([BLOCK] * count, pa.binary()) if headers else None,
    )


def replies(frames: EncodedFrames, start: int = 0) -> list[str]:
    one_each = [bytes(frames.bytes_of(i, i + 1)) for i in range(start, len(frames))]
    return [frame.split(b" ")[2].decode() for frame in one_each]


# -- frames ----------------------------------------------------------------------------------------

OPERATIONS = [
    (1, 0, ["1.2"]),  # a single message commits the batch that it begins
    (2, 0, ["1.0", "2.2"]),
    (4, 0, ["1.0", "2.1", "3.1", "4.2"]),
    (4, 2, ["1.0", "2.2"]),  # sent again from the third message on
    (4, 3, ["1.2"]),
]


@pytest.mark.parametrize(("count", "start", "expected"), OPERATIONS)
def test_numbers_and_operations(count: int, start: int, expected: list[str]) -> None:
    frames = encode_batch(columns(count), INBOX, 70, start, 100)
    assert (frames.first_serial, len(frames)) == (70, count)
    prefix = f"{INBOX}abc-{70 + start}.100.fail."
    assert replies(frames, start) == [f"{prefix}{one}.$FI" for one in expected]


@pytest.mark.parametrize("headers", [False, True])
def test_frames_are_whole(headers: bool) -> None:
    frames = encode_batch(columns(2, headers), INBOX, 0, 0, MAX_FLOW)
    command, sizes, block = ("HPUB", "18 19", BLOCK) if headers else ("PUB", "1", b"")
    expected = [
        f"{command} s.{i} _INBOX.abc.abc-0.500.fail.{i + 1}.{2 * i}.$FI {sizes}\r\n".encode()
        + block
        + b"%d\r\n" % i
        for i in range(2)
    ]
    assert bytes(frames.buffer) == b"".join(expected)
    assert frames.nbytes(0, 2) == len(b"".join(expected))


def test_reply_leads_to_its_message() -> None:
    for reply in replies(encode_batch(columns(12), INBOX, 5, 3, 10), 3):
        parsed = parse_reply(reply.encode(), INBOX.encode())
        assert parsed is not None
        batch, number = parsed
        assert batch == 5 + 3
        assert reply.split(".")[5] == str(number)


def test_batch_id_is_short() -> None:
    """Servers accept 64 bytes; the largest serials have 18 digits."""
    inbox = f"_INBOX.{'x' * 22}."
    (reply,) = replies(encode_batch(columns(1), inbox, 999_999 * 10**12 + 10**11, 0, 1))
    assert len(reply.split(".")[2]) <= 64


@pytest.mark.parametrize("operation", [END, PING])
def test_frame_that_is_not_stored(operation: int) -> None:
    frame = control(operation, "s.7", INBOX, 70, 100, 8)
    assert frame == b"PUB s.7 _INBOX.abc.abc-70.100.fail.8.%d.$FI 0\r\n\r\n" % operation


FOREIGN = [
    b"_INBOX.abc.17",
    b"_INBOX.abc.abc-1.500.fail.1.0.$F",
    b"_INBOX.abc.abc-1.500.fail.1.0.0.$FI",
    b"_INBOX.abc.abc-.500.fail.1.0.$FI",
    b"_INBOX.abc.abc-1.500.fail.x.0.$FI",
    b"_INBOX.xyz.abc-1.500.fail.1.0.$FI",
]


@pytest.mark.parametrize("subject", FOREIGN)
def test_subjects_of_other_kinds(subject: bytes) -> None:
    assert parse_reply(subject, INBOX.encode()) is None


# -- responses, as nats-server 2.14.6 and 2.15.1 send them -----------------------------------------

ACK, ENDED, GAP, ERR = ResponseKind.ACK, ResponseKind.END, ResponseKind.GAP, ResponseKind.ERROR
RESPONSES = [
    (b'{"type":"ack","seq":0,"msgs":500}', BatchResponse(ACK, stored=0, flow=500)),
    (b'{"type":"ack","seq":1500,"msgs":2}', BatchResponse(ACK, stored=1500, flow=2)),
    (b'{"stream":"S","seq":17,"batch":"b","count":9}', BatchResponse(ENDED, stored=9, stream="S")),
    (b'{"stream":"S","seq":0,"batch":"b","count":0}', BatchResponse(ENDED, stream="S")),
    (
        b'{"stream":"S","domain":"d","seq":7,"batch":"b","count":2}',
        BatchResponse(ENDED, stored=2, stream="S"),
    ),
    (b'{"type":"gap","last_seq":4,"seq":5}', BatchResponse(GAP, missing=4)),
    (b'{"type":"err","seq":6,"error":%s}' % ERROR_JSON, BatchResponse(ERR, error=ERROR)),
    (
        b'{"error":%s,"stream":"S","seq":0}' % ERROR_JSON,
        BatchResponse(ERR, stream="S", error=ERROR),
    ),
]


@pytest.mark.parametrize(("payload", "expected"), RESPONSES)
def test_responses(payload: bytes, expected: BatchResponse) -> None:
    assert parse_response(payload) == expected


INVALID = [
    (b"", "Expecting value"),
    (b"[]", "expected a JSON object"),
    (b"{}", "expected a JSON object"),
    (b'{"type":"ack","seq":1}', "expected a JSON object"),
    (b'{"type":"ack","seq":-1,"msgs":1}', "'seq' is -1, expected a natural number"),
    (b'{"type":"gap","seq":5}', "expected a JSON object"),
    (b'{"type":"ack","seq":"1","msgs":1}', "'seq' is '1', expected a natural number"),
    (b'{"type":"err","seq":1,"error":"no"}', "expected a JSON object"),
    # A PubAck of one message, from a server that does not know fast ingest.
    (b'{"stream":"S", "seq":17}', "expected a JSON object with 'type', 'error' or 'count'"),
]


@pytest.mark.parametrize(("payload", "problem"), INVALID)
def test_response_invalid(payload: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_response(payload)
