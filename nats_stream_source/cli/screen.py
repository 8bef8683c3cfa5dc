"""How the command prints: tables of plain text, JSON, values that may be any bytes."""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any


def number(value: int | None) -> str:
    """A number with separators; a dash where there is none."""
    return "-" if value is None else f"{value:,}"


def print_json(value: Any) -> None:
    """One JSON value on one line; escaped where the output's encoding lacks a letter."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text)


def table(names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Rows as columns that stand below each other; those in ``right`` are aligned right."""
    cells = [list(names), *(list(row) for row in rows)]
    widths = [max(_width(row[i]) for row in cells) for i in range(len(names))]
    lines = []
    for row in cells:
        parts = [
            " " * (width - _width(cell)) + cell
            if name in right
            else cell + " " * (width - _width(cell))
            for name, cell, width in zip(names, row, widths, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def readable(value: Any, width: int) -> str:
    """A value as one cell: text as it is, other bytes in hexadecimal, both cut at ``width``."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, bytes):
        # What cannot be shown is not decoded: a value may be of many megabytes.
        text = _text(value[: 4 * width], cut=len(value) > 4 * width)
        value = text if text is not None else f"0x{value[:width].hex()}"
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))
    return text if len(text) <= width else text[: width - 1] + "…"


def jsonable(name: str, value: Any) -> dict[str, Any]:
    """A column's value for JSON; bytes that are no text as ``<name>_base64``."""
    if isinstance(value, datetime):
        return {name: rfc3339(value)}
    if not isinstance(value, bytes):
        return {name: value}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def rfc3339(time: datetime) -> str:
    """A time in UTC, to the microsecond."""
    return (
        time.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    )


def _text(data: bytes, cut: bool) -> str | None:
    """Bytes as text, without a last character that the cut left unfinished; None if they are none.

    Other than white space, control characters are not in a text.
    """
    for missing in range(4 if cut else 1):
        try:
            text = data[: len(data) - missing].decode()
        except UnicodeDecodeError:
            continue
        return text if all(c.isprintable() or c in "\t\r\n" for c in text) else None
    return None
