"""The fields of the package's log lines, as a reader of a log file finds them."""

from __future__ import annotations

import json
import re

_FIELD = re.compile(r'(?:^|\s)(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def parse_fields(line: str) -> dict[str, str]:
    """Parse the fields of a log line, after any prefix; empty for a line without fields."""
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        if value.startswith('"'):
            try:
                value = json.loads(value)
            except ValueError:
                continue  # a similar line of another program
        fields[name] = str(value)
    return fields
