"""Frames with other bytes in the place of the server's, and the verdict that puts them there."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.proxy.verdicts import EVERY, Counted

KINDS = {
    "stream_info": "stream_info_response",
    "message": "stream_msg_get_response",
    "consumer": "consumer_create_response",
    "deletion": "consumer_delete_response",
}
"""Of each kind of answer of the API, its type."""


class ForgedReplies(Counted):
    """Damages all responses of one kind, from the ``first``-th on."""

    def __init__(self, kind: str, damage: Callable[[bytes], bytes], first: int = 1) -> None:
        super().__init__(
            lambda frame: KINDS[kind].encode() in payload(frame)[:120],
            EVERY[first - 1 :],
            lambda frame: with_payload(frame, damage(payload(frame))),
        )


def payload(frame: bytes) -> bytes:
    """What a MSG carries; the API does not respond with an HMSG."""
    line, _, rest = frame.partition(b"\r\n")
    return rest[: int(line.split(b" ")[-1])] if line.startswith(b"MSG ") else b""


def with_payload(frame: bytes, other: bytes) -> bytes:
    words = frame.split(b"\r\n", 1)[0].split(b" ")
    return b"%s %d\r\n%s\r\n" % (b" ".join(words[:-1]), len(other), other)


def line_of(frame: bytes) -> tuple[list[bytes], bytes]:
    line, rest = frame.split(b"\r\n", 1)
    return line.split(b" "), rest


def with_reply(frame: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A delivery with another reply subject."""
    words, rest = line_of(frame)
    words[3] = change(words[3])
    return b" ".join(words) + b"\r\n" + rest


def token(number: int, text: bytes) -> Callable[[bytes], bytes]:
    """Puts ``text`` in the place of a token of the ACK subject."""

    def change(reply: bytes) -> bytes:
        tokens = reply.split(b".")
        tokens[number] = text
        return b".".join(tokens)

    return lambda frame: with_reply(frame, change)


def with_size(frame: bytes, size: bytes) -> bytes:
    words, rest = line_of(frame)
    return b" ".join([*words[:-1], size]) + b"\r\n" + rest


def bomb(frame: bytes, lines: int = 10_000, text: bytes = b"a: b") -> bytes:
    return with_block(b"NATS/1.0\r\n" + (text + b"\r\n") * lines + b"\r\n")(frame)


def with_block(block: bytes) -> Callable[[bytes], bytes]:
    def fault(frame: bytes) -> bytes:
        words, rest = line_of(frame)
        value = rest[: int(words[-1])]
        sizes = b"%d %d" % (len(block), len(block) + len(value))
        return b"H" + b" ".join([*words[:-1], sizes]) + b"\r\n" + block + value + b"\r\n"

    return fault
