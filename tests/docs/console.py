"""The commands of a page's ``console`` blocks."""

from __future__ import annotations

import re


def console_commands(page: str) -> list[tuple[str, str]]:
    """Each command of the page, and what it prints there."""
    shown = "\n".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL))
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", shown, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))
