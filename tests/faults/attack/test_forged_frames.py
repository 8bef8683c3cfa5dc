"""Frames between a real server and a query, made by an adversary.

A proxy puts other bytes in the place of the server's, while a query reads; and publishers, who need
no proxy, store what the server lets them. Either the rows are right, or the query fails with an
error of this package's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.framing.frames import Framer
from tests.faults.attack.forged_frames import bomb, token, with_block, with_reply, with_size
from tests.support import attack_target
from tests.support.attack_target import FORMATS, peak, read
from tests.support.nats.buckets import create_bucket, publish, put_many
from tests.support.nats.streams import create_stream, stream_state
from tests.support.nats.topology import wait_for_seq
from tests.support.proxy.fault_proxy import Proxy, is_delivery, is_status, with_header
from tests.support.proxy.verdicts import EVERY, Nth

BUCKET = "attacked"
ROWS = 300
SENT = [(seq, b"%d" % (seq - 1)) for seq in range(1, ROWS + 1)]


def run_attack(
    proxy: Proxy, verdict: Callable[[bytes], Any], injected: Callable[[], int], *, cut: int = ROWS
) -> str:
    """What becomes of a range that is read meanwhile: ``rows``, ``cut``, or the name of the error.

    Args:
        cut: the rows may also be only the first so many.
    """
    found = attack_target.run_attack(proxy, "ordered reader", BUCKET, verdict, injected)
    if isinstance(found, str):
        return found
    if cut < ROWS and found == SENT[:cut]:
        return "cut"
    assert found == SENT
    return "rows"


DELIVERIES: dict[str, Callable[[bytes], bytes]] = {
    "ack: too few tokens": lambda frame: with_reply(frame, lambda reply: b"$JS.ACK.x"),
    "ack: 10 tokens": lambda frame: with_reply(frame, lambda reply: reply + b".1"),
    "ack: 1000 tokens": lambda frame: with_reply(frame, lambda reply: b"$JS.ACK" + b".7" * 1000),
    "ack: sequence is a text": token(5, b"x"),
    "ack: sequence is negative": token(5, b"-5"),
    "ack: sequence is huge": token(5, b"9" * 30),
    "ack: sequence is the largest": token(5, b"%d" % (2**63 - 1)),
    "ack: sequence is 0": token(5, b"0"),
    "ack: consumer sequence is huge": token(6, b"9" * 18),
    "ack: consumer sequence is 0": token(6, b"0"),
    "ack: time is the largest": token(7, b"%d" % (2**63 - 1)),
    "ack: pending is empty": token(8, b""),
    "ack: not UTF-8": token(3, b"\xff"),
    "size: one too small": lambda frame: with_size(frame, b"1"),
    "size: one too large": lambda frame: with_size(frame, b"5"),
    "size: 99999999999": lambda frame: with_size(frame, b"99999999999"),
    "size: 2000000000": lambda frame: with_size(frame, b"2000000000"),
    "size: negative": lambda frame: with_size(frame, b"-1"),
    "size: a text": lambda frame: with_size(frame, b"many"),
    "garbage": lambda frame: b"\x00\xff garbage\r\n",
    "half": lambda frame: frame[: len(frame) // 2],
    "nothing but LF": lambda frame: b"\n" * 100_000,
}

# What nobody can know to be wrong, or does not look at.
UNSEEN = ("ack: time is the largest", "ack: not UTF-8")

# Says that nothing lies between: where such a one is the last that has arrived, it is believed.
BELIEVED = "ack: sequence is the largest"

# A publisher's headers are data: whatever they are, the row is there.
HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "10,000 lines": bomb,
    "64 KiB in one line": lambda frame: bomb(frame, 1, b"a: " + b"b" * 65_000),
    "10,000 empty lines": lambda frame: bomb(frame, 10_000, b""),
    "lines without a colon": lambda frame: bomb(frame, 100, b"abc"),
    "names of bytes": lambda frame: bomb(frame, 100, b"\xff\x00\xfe: \xff"),
    "an operation that nobody knows": lambda frame: bomb(frame, 1, b"KV-Operation: EXPLODE"),
    "a status": with_block(b"NATS/1.0 503 No Responders\r\n\r\n"),
    "a status without end": with_block(b"NATS/1.0 503"),
    "no NATS/1.0": with_block(b"HTTP/1.1 200 OK\r\n\r\n"),
    "one byte": with_block(b"\n"),
    "zeros": with_block(bytes(1000)),
}


SLOW = ("size: 2000000000", "garbage", "size: one too large", "size: 99999999999")


@pytest.mark.parametrize("name", [*DELIVERIES, *HEADERS])
def test_forged_delivery_is_refused(proxy: Proxy, name: str) -> None:
    """One bad delivery in the middle of a range: the reader requests it a second time, or fails."""
    fault = Nth([100], (DELIVERIES | HEADERS)[name])
    with peak() as memory:
        run_attack(proxy, fault, lambda: fault.done, cut=99 if name == BELIEVED else ROWS)
    assert fault.done == 1
    assert memory.grown < 128 << 20


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.faults if n in SLOW else ()) for n in DELIVERIES]
)
def test_bad_deliveries(proxy: Proxy, name: str) -> None:
    """All are bad from the middle of a range on."""
    fault = Nth(EVERY[99:], DELIVERIES[name])
    with peak() as memory:
        outcome = run_attack(proxy, fault, lambda: fault.done, cut=99 if name == BELIEVED else ROWS)
    assert fault.done
    assert outcome != "rows" or name in UNSEEN
    assert memory.grown < 128 << 20


@pytest.mark.parametrize("subject", [b"$KV.attacker.k", b"$KV.attacked.\xff", b"\xff", b"$KV"])
def test_subjects_outside_bucket(proxy: Proxy, subject: bytes) -> None:
    def fault(frame: bytes) -> bytes:
        return frame.replace(b"$KV.attacked.k", subject, 1)

    proxy.verdict = Nth(EVERY[99:], fault)
    try:
        with pytest.raises(ProtocolError):
            read(proxy.url, bucket=BUCKET, includeHistory=True)
    finally:
        proxy.verdict = lambda frame: True


@pytest.mark.parametrize("reading", FORMATS)
@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_data(proxy: Proxy, name: str, reading: str) -> None:
    fault = proxy.verdict = Nth(EVERY, HEADERS[name])
    try:
        assert FORMATS[reading](proxy.url, BUCKET, None) == SENT
    finally:
        proxy.verdict = lambda frame: True
    assert fault.done >= ROWS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Nats-Last-Consumer", b"x"),
        ("Nats-Last-Consumer", b"-1"),
        ("Nats-Last-Consumer", b"9" * 5000),
        ("Nats-Last-Consumer", "²".encode()),
        ("Nats-Last-Stream", b""),
        ("Nats-Last-Stream", b"1e9"),
        ("Nats-Last-Consumer", b"1\r\nNats-Consumer-Stalled: a b"),
        ("Nats-Last-Consumer", b"1\r\nNats-Consumer-Stalled: \xff"),
        ("Nats-Last-Consumer", b"1\r\nNats-Consumer-Stalled: "),
    ],
    ids=repr,
)
def test_heartbeats(proxy: Proxy, name: str, value: bytes) -> None:
    """The last messages do not come, so that the reader has to rely on heartbeats."""
    lies = 0

    def verdict(frame: bytes) -> bool | bytes:
        nonlocal lies
        if is_delivery(frame) and frame.split(b" ")[1].endswith((b".k298", b".k299")):
            return False
        if is_status(frame, b"Idle"):
            lies += 1
            return with_header(frame, name.encode(), value)
        return True

    assert run_attack(proxy, verdict, lambda: lies) != "rows"


@pytest.mark.parametrize("name", [b"Nats-Last-Consumer", b"Nats-Last-Stream"])
def test_heartbeats_without_number(proxy: Proxy, name: bytes) -> None:
    """Heartbeats without numbers prove nothing, also not that the range is empty."""
    lies = 0

    def verdict(frame: bytes) -> bool | bytes:
        nonlocal lies
        if is_status(frame, b"Idle"):
            lies += 1
            return frame.replace(name, name[:-1] + b"_")
        return not is_delivery(frame)

    assert run_attack(proxy, verdict, lambda: lies) == "ConsumerLostError"


def test_announced_size_is_not_allocated() -> None:
    """Room is made for 64 MiB at once, and then for as much again as has come."""
    framer = Framer()
    framer.feed(b"MSG a 1 2000000000\r\n")
    framer.room(1)
    assert framer._block.nbytes < 65 << 20
    for _ in range(80):
        framer.feed(bytes(1 << 20))
    framer.room(1)
    assert framer._block.nbytes < 200 << 20


# -- what publishers may do ---------------------------------------------------------------------


def test_value_of_8_mib_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The largest that a server should be set to; many are many batches, not much memory."""
    config = tmp_path_factory.mktemp("large") / "server.conf"
    config.write_text("max_payload: 8MB\nmax_pending: 64MB\n")
    with NatsServer(config=config) as server:
        create_bucket(server.url, "large")
        for start in range(0, 12, 4):
            put_many(
                server.url,
                "large",
                ((f"k{i}", bytes([i]) * (8 << 20)) for i in range(start, start + 4)),
            )
        for reading in FORMATS.values():
            with peak() as memory:
                rows = reading(server.url, "large", None)
                assert [(seq, len(value)) for seq, value in rows] == [
                    (i + 1, 8 << 20) for i in range(12)
                ]
                assert all(value == bytes([seq - 1]) * (8 << 20) for seq, value in rows)
            # The rows themselves, and what is under way.
            assert memory.grown < (96 << 20) + (256 << 20)
            del rows


def test_subject_with_every_legal_byte_is_read(shared_server: NatsServer) -> None:
    """A server takes any bytes but blanks and dots at the wrong place; UTF-8 comes as it is."""
    url = shared_server.url
    create_bucket(url, "bytes")
    ascii_keys = [chr(c) for c in range(33, 127) if chr(c) not in ".*>"]
    keys = [*ascii_keys, "ключ", "鍵", "🔑", "x" * 1000, "a.b.c", "k*y", "k>y"]
    publish(url, ((f"$KV.bytes.{key}", b"v", None) for key in keys))
    rows = read(url, bucket="bytes", startSequence=1)
    assert [row["key"] for row in rows] == keys


def test_subjects_with_control_characters(shared_server: NatsServer) -> None:
    """A client can publish them: a stream stays readable, by a consumer and without."""
    bytes_ = bytes(one for one in range(256) if one not in b"\t\n\r .*>")
    create_stream(shared_server.url, "control", "ctl.>")
    with socket.create_connection(("127.0.0.1", shared_server.port)) as line:
        line.sendall(b"CONNECT {}\r\n")
        line.sendall(b"".join(b"PUB ctl.%c 1\r\n.\r\n" % one for one in bytes_))
        # A PONG does not say that the stream has stored what came before the PING.
        wait_for_seq(shared_server.url, "control", len(bytes_))
    count = stream_state(shared_server.url, "control")["messages"]
    assert count == len(bytes_)
    for start in (1, count - 5):
        rows = read(shared_server.url, "nats_stream", stream="control", startSequence=start)
        sent = [(b"ctl.%c" % one).decode(errors="replace") for one in bytes_[start - 1 :]]
        assert [row["subject"] for row in rows] == sent
