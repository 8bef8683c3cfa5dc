"""Output of the command: JSON, cells of tables, values that may be any bytes."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import json
import os
import shutil
import stat
import sys
import unicodedata
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any


def terminal_columns() -> int | None:
    """The columns of the terminal on standard output; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_json(value: Any) -> None:
    """Print one JSON value on one line; in ASCII if the output's encoding is not UTF-8."""
    print(json.dumps(value, ensure_ascii=(sys.stdout.encoding or "utf-8").lower() != "utf-8"))


@contextlib.asynccontextmanager
async def closed_pipe() -> AsyncIterator[None]:
    """Raise BrokenPipeError in the block when the reader of standard output closes the pipe.

    A write would raise it too, but a command that waits for rows may not write for hours.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    closed = False
    try:
        descriptor = sys.stdout.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, ValueError):  # a replaced standard output without a descriptor
        is_pipe = False

    def close() -> None:
        nonlocal closed
        closed = True
        loop.remove_reader(descriptor)
        task.cancel()

    if is_pipe:
        # The writing end of a pipe becomes "readable" only by the error that its reader left.
        loop.add_reader(descriptor, close)
    try:
        yield
    except asyncio.CancelledError:
        if closed:
            raise BrokenPipeError from None
        raise
    finally:
        if is_pipe:
            loop.remove_reader(descriptor)


def text_width(text: str) -> int:
    """The number of terminal columns of a string."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _cut(text: str, width: int) -> str:
    """The beginning of ``text`` that fits ``width`` terminal columns."""
    end = min(len(text), width)
    while text_width(text[:end]) > width:
        end -= 1
    return text[:end]


def format_cell(value: Any, width: int) -> str:
    """A value as one cell: strings unchanged, other bytes in hexadecimal, cut at ``width``.

    ``width`` is a number of terminal columns.
    """
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, bytes):
        # Only the visible part is decoded: a value may have many megabytes.
        text = _decode_text(value[: 4 * width], cut=len(value) > 4 * width)
        value = text if text is not None else f"0x{value[:width].hex()}"
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))
    return text if text_width(text) <= width else _cut(text, width - 1) + "…"


def json_column(name: str, value: Any) -> dict[str, Any]:
    """A column's value for JSON; bytes that are not UTF-8 as ``<name>_base64``."""
    if isinstance(value, datetime):
        return {name: rfc3339(value)}
    if not isinstance(value, bytes):
        return {name: value}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def rfc3339(time: datetime) -> str:
    """A timestamp in UTC, to the microsecond."""
    return (
        time.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    )


def _decode_text(data: bytes, cut: bool) -> str | None:
    """Bytes as a string, without a last character that was cut; None if they are not text.

    Text does not contain control characters except white space.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c in "\t\r\n" for c in text) else None
