"""Output of the command: plain-text tables, JSON, values that may be any bytes."""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any


def format_integer(value: int | None) -> str:
    """An integer with thousands separators; a dash for None."""
    return "-" if value is None else f"{value:,}"


def print_json(value: Any) -> None:
    """Print one JSON value on one line; escaped if the output's encoding lacks a character."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text)


def format_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> str:
    """Rows as aligned columns; the columns in ``right`` are aligned right."""
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
    """The number of terminal columns of a string."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def format_cell(value: Any, width: int) -> str:
    """A value as one cell: strings unchanged, other bytes in hexadecimal, cut at ``width``."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, bytes):
        # Only the visible part is decoded: a value may have many megabytes.
        text = _decode_text(value[: 4 * width], cut=len(value) > 4 * width)
        value = text if text is not None else f"0x{value[:width].hex()}"
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))
    return text if len(text) <= width else text[: width - 1] + "…"


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
    for missing in range(4 if cut else 1):
        try:
            text = data[: len(data) - missing].decode()
        except UnicodeDecodeError:
            continue
        return text if all(c.isprintable() or c in "\t\r\n" for c in text) else None
    return None
