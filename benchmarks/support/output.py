"""The end of each benchmark: its tables on standard output, its figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.machine import machine
from benchmarks.support.report import SECTIONS


def finish(name: str, figures: Mapping[str, Any], path: Path | None) -> None:
    """Print the tables of a benchmark as on the page; write its figures to ``path``, if set."""
    all_figures = {"machine": machine(), **figures}
    print(SECTIONS[name][1](all_figures))
    if path is not None:
        path.write_text(json.dumps(all_figures, indent=1) + "\n")
