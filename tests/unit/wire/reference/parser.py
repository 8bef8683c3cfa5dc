"""The NATS client protocol read slowly and plainly, to hold the fast parser against.

No regular expression, no numpy and nothing of ``nats_stream_source``: one line after the other,
as the protocol's text has it.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_LINE = 1 << 20
SPACES = b" \t"


class NotNatsError(Exception):
    """These bytes are not a frame."""


@dataclass(frozen=True)
class Frame:
    raw: bytes
    kind: str
    sid: int = -1
    subject: bytes = b""
    reply: bytes = b""
    header: bytes = b""
    payload: bytes = b""


def parse(stream: bytes) -> tuple[list[Frame], bytes]:
    """All whole frames of a stream, and its unfinished rest."""
    frames: list[Frame] = []
    while stream:
        frame = first_frame(stream)
        if frame is None:
            break
        frames.append(frame)
        stream = stream[len(frame.raw) :]
    return frames, stream


def first_frame(stream: bytes) -> Frame | None:
    line, lf, after = stream.partition(b"\n")
    if len(line + lf) > MAX_LINE or (not lf and len(line) >= MAX_LINE):
        raise NotNatsError("line too long")
    if not lf:
        return None
    if not line.endswith(b"\r"):
        raise NotNatsError("no CR")
    line = line[:-1]
    if line.rstrip(SPACES) in (b"PING", b"PONG", b"+OK"):
        return Frame(line + b"\r\n", "CONTROL")
    word, rest = line[:4], line[4:]
    if word in (b"INFO", b"-ERR"):
        text = rest.lstrip(SPACES)
        if text == rest or b"\r" in text or not text[:1].strip():
            raise NotNatsError("bad INFO or -ERR")
        if word == b"-ERR" and not (len(text) > 2 and text[:1] == text[-1:] == b"'"):
            raise NotNatsError("bad -ERR")
        return Frame(line + b"\r\n", "CONTROL")
    return message(line, after)


def message(line: bytes, after: bytes) -> Frame | None:
    words = line.replace(b"\t", b" ").split(b" ")
    kind = words[0].decode("latin-1")
    if kind not in ("MSG", "HMSG") or words[-1] == b"":
        raise NotNatsError("unknown word")
    arguments = [word for word in words[1:] if word]
    if any(b"\r" in word for word in arguments):
        raise NotNatsError("CR within an argument")  # VT and FF are characters of a subject
    numbers = 2 if kind == "HMSG" else 1
    if len(arguments) - numbers not in (2, 3):
        raise NotNatsError("wrong number of arguments")
    subject, sid = arguments[:2]
    reply = arguments[2] if len(arguments) - numbers == 3 else b""
    sizes = [number(word, (1 << 31) - 1) for word in arguments[-numbers:]]
    header_size, size = sizes if kind == "HMSG" else (0, sizes[0])
    sid_number = number(sid, (1 << 63) - 1)
    if header_size > size:
        raise NotNatsError("more headers than bytes")
    if len(after) < size + 2:
        return None
    if after[size : size + 2] != b"\r\n":
        raise NotNatsError("no CRLF after the payload")
    return Frame(
        raw=line + b"\r\n" + after[: size + 2],
        kind=kind,
        sid=sid_number,
        subject=subject,
        reply=reply,
        header=after[:header_size],
        payload=after[header_size:size],
    )


def number(word: bytes, largest: int) -> int:
    if not all(c in b"0123456789" for c in word) or len(word) > 100 or int(word) > largest:
        raise NotNatsError("not a number")
    return int(word)
