"""Reply subjects of deliveries, one at a time, and status messages."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from nats_stream_source.errors import (
    ConflictStatusError,
    ConsumerDeletedError,
    LeadershipChangedError,
    NoRespondersStatusError,
    ProtocolError,
    StatusError,
    UnknownStatusError,
)
from nats_stream_source.wire.consumer.messages import (
    AckReply,
    ConsumerStatus,
    GapDetector,
    status_error,
)

names = st.text("abcXYZ019-_", min_size=1, max_size=12)
numbers = st.integers(0, 2**63 - 1)
five = st.tuples(numbers, numbers, numbers, numbers, numbers)


@given(names, names, five)
def test_nine_tokens(stream: str, consumer: str, numbers: tuple[int, ...]) -> None:
    subject = ".".join(["$JS.ACK", stream, consumer, *map(str, numbers)])
    assert AckReply.parse(subject) == AckReply(None, None, stream, consumer, *numbers)


@given(st.just("_") | names, names, names, names, five, st.lists(names, max_size=4))
def test_eleven_tokens_and_more(
    domain: str, account: str, stream: str, consumer: str, numbers: tuple[int, ...], more: list[str]
) -> None:
    subject = ".".join(["$JS.ACK", domain, account, stream, consumer, *map(str, numbers), *more])
    expected = None if domain == "_" else domain
    assert AckReply.parse(subject) == AckReply(expected, account, stream, consumer, *numbers)


GOOD = "$JS.ACK.S.C.1.2.3.4.5"


INVALID_REPLIES = [
    ("", "does not start"),
    ("$js.ack.S.C.1.2.3.4.5", "does not start"),
    ("$JS.ACKS.S.C.1.2.3.4.5", "does not start"),
    ("$JS.ACK.", "3 tokens"),
    ("$JS.ACK.S.C.1.2.3.4", "8 tokens"),
    (f"{GOOD}.6", "10 tokens"),
    ("$JS.ACK..C.1.2.3.4.5", "name is empty"),
    ("$JS.ACK.S..1.2.3.4.5", "name is empty"),
    ("$JS.ACK..h.S.C.1.2.3.4.5", "name is empty"),
    ("$JS.ACK._.h.S..1.2.3.4.5", "name is empty"),
    ("$JS.ACK.S.C.x.2.3.4.5", "'x' is not an integer"),
    ("$JS.ACK.S.C.1.-2.3.4.5", "'-2' is not an integer"),
    ("$JS.ACK.S.C.1.2.3.1_0.5", "not an integer"),
    ("$JS.ACK.S.C.1.2.3.4.", "'' is not an integer"),
    ("$JS.ACK.S.C.1.2.3.4.٣", "not an integer"),
    ("$JS.ACK.S.C.1.2.3.4." + "9" * 5000, "not an integer"),
    (f"$JS.ACK.S.C.1.{2**63}.3.4.5", "'9223372036854775808' is not an integer"),
    ("$JS.ACK._.h.S.C.1.2.3.4.x", "not an integer"),
    ("$JS.ACK.S.C.1.2.0x3.4.5", "'0x3' is not an integer"),
    ("$JS.ACK.S.C.1.2.3.4.\udcff", "not an integer"),
]


@pytest.mark.parametrize(("subject", "text"), INVALID_REPLIES)
def test_delivery_invalid(subject: str, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        AckReply.parse(subject)


@given(st.text(max_size=60))
def test_text_is_reply_or_protocol_error(text: str) -> None:
    for subject in (text, f"$JS.ACK.{text}"):
        try:
            parsed = AckReply.parse(subject)
        except ProtocolError:
            continue
        tokens = subject.split(".")
        assert len(tokens) == 9 or len(tokens) >= 11
        assert str(parsed.stream_seq).isdigit()


# Statuses

HEARTBEAT = (
    b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\nNats-Last-Stream: 9\r\n"
    b"Nats-Consumer-Stalled: $JS.FC.S.C.ab\r\n\r\n"
)


@pytest.mark.parametrize(
    ("block", "reply", "status"),
    [
        (HEARTBEAT, "", ConsumerStatus(100, "Idle Heartbeat", None, "$JS.FC.S.C.ab", 7, 9)),
        (
            b"NATS/1.0 100 FlowControl Request\r\n\r\n",
            "$JS.FC.x",
            ConsumerStatus(100, "FlowControl Request", "$JS.FC.x"),
        ),
        (b"NATS/1.0 404 No Messages\r\n\r\n", "", ConsumerStatus(404, "No Messages")),
        (b"NATS/1.0 503\r\n\r\n", "", ConsumerStatus(503, "")),
        (b"", "", None),
        (b"NATS/1.0\r\nStatus: 404\r\n\r\n", "", None),  # a publisher's header is data
    ],
)
def test_statuses(block: bytes, reply: str, status: ConsumerStatus | None) -> None:
    assert ConsumerStatus.parse(block, reply) == status


@pytest.mark.parametrize(
    "block",
    [
        HEARTBEAT.replace(b"7", b"seven"),
        HEARTBEAT.replace(b"9", b"-9"),
        b"NATS/1.0 4x4 No Messages\r\n\r\n",
    ],
)
def test_status_invalid(block: bytes) -> None:
    with pytest.raises(ProtocolError):
        ConsumerStatus.parse(block)


@given(st.integers(1, len(HEARTBEAT) - 1))
def test_status_truncated(length: int) -> None:
    with pytest.raises(ProtocolError):
        ConsumerStatus.parse(HEARTBEAT[:length])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (ConsumerStatus(409, "Consumer Deleted"), ConsumerDeletedError),
        (ConsumerStatus(409, "Leadership Change"), LeadershipChangedError),
        (ConsumerStatus(409, "Server Shutdown"), LeadershipChangedError),
        (ConsumerStatus(409, "Exceeded MaxWaiting"), ConflictStatusError),
        (ConsumerStatus(503, ""), NoRespondersStatusError),
        (ConsumerStatus(423, "Nats-Wrong-Pin-Id"), UnknownStatusError),
    ],
)
def test_status_as_error(status: ConsumerStatus, kind: type[StatusError]) -> None:
    error = status_error(status, "consumer 'C' of stream 'S'")
    assert type(error) is kind
    assert (error.code, error.description) == (status.code, status.description)
    assert "consumer 'C' of stream 'S'" in str(error)
    assert status.description in str(error)


@pytest.mark.parametrize(
    ("status", "ends"),
    [
        (ConsumerStatus(404, "No Messages"), True),
        (ConsumerStatus(408, "Request Timeout"), True),
        (ConsumerStatus(408, "Interest Expired"), True),
        (ConsumerStatus(409, "Batch Completed"), True),
        (ConsumerStatus(409, "Consumer Deleted"), False),
        (ConsumerStatus(100, "Idle Heartbeat"), False),
        (ConsumerStatus(503, ""), False),
    ],
)
def test_status_that_ends_only_pull_request(status: ConsumerStatus, ends: bool) -> None:
    assert status.ends_request is ends


# Gaps

M, H = "message", "heartbeat"


@pytest.mark.parametrize(
    ("start", "inputs", "found"),
    [
        (0, [(M, 1), (M, 2), (H, 2), (H, 2), (M, 3)], []),
        (0, [(M, 1), (M, 3), (M, 4)], [(2, 3)]),
        (0, [(M, 2)], [(1, 2)]),
        (0, [(M, 1), (M, 1)], [(2, 1)]),
        # A consumer that was there before is known with its first message or heartbeat.
        (None, [(M, 7), (M, 8), (H, 8)], []),
        (None, [(H, 7), (M, 8)], []),
        (None, [(H, 7), (M, 9)], [(8, 9)]),
        # The second heartbeat counts; then it goes on from there.
        (0, [(M, 1), (H, 2)], []),
        (0, [(M, 1), (H, 2), (M, 2), (H, 2), (H, 2)], []),
        (0, [(M, 1), (H, 2), (H, 2), (H, 2), (M, 3)], [(2, 3)]),
        (0, [(M, 1), (H, 2), (H, 1), (H, 2)], []),
        (0, [(M, 1), (H, 2), (H, 3), (H, 3)], [(2, 4)]),
        (0, [(H, 0), (H, 0), (M, 1)], []),
    ],
)
def test_gaps(
    start: int | None, inputs: list[tuple[str, int]], found: list[tuple[int, int]]
) -> None:
    watch = GapDetector(start)
    gaps = [getattr(watch, kind)(number) for kind, number in inputs]
    assert [gap for gap in gaps if gap is not None] == found
