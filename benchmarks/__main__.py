"""All benchmarks, one after the other, and the page that shows them: ``python -m benchmarks``.

``python -m benchmarks [--quick] [--only reader --only spark ...] [--render]``

Each benchmark runs in a process of its own. The figures go into ``docs/performance.json``, where
those of benchmarks that did not run now stay as they are; tables and plots go into
``docs/performance.md``. ``--quick`` is a look that takes less than a minute: small sizes, neither
Spark nor Kafka, and nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import Others
from benchmarks.report import SECTIONS, block, placed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/performance.md"
FIGURES = ROOT / "docs/performance.json"
_PLOTS = "performance"  # beside the page

FULL: dict[str, list[str]] = {
    "reader": [],
    "jetstream": [],
    "spark": ["--rows", "1000000", "--rows", "10000000", "--size", "128", "--size", "1024"],
    "microbatch": [],
    "small_reads": [],
    "latency": [],
    "growth": [],
    "planner": [],
}
"""What runs, in this order, and its arguments."""

QUICK: dict[str, list[str]] = {
    "jetstream": ["--quick"],
    "small_reads": ["--quick", "--rounds", "3"],
    # Last: the run ends with its line.
    "reader": ["--quick"],
}


def run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark in a process of its own; its figures, and what else ran meanwhile.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        result = Path(scratch, "figures.json")
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(result)]
        began = time.monotonic()
        # Tables are wide; where there is no terminal, 80 columns are what they would be cut to.
        wide = {} if sys.stdout.isatty() else {"COLUMNS": "150"}
        with Others() as others:
            subprocess.run(command, cwd=ROOT, env={**wide, **os.environ}, check=True)
        figures: dict[str, Any] = json.loads(result.read_text())
    return {
        **figures,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began),
        "others": others.as_dict(),
    }


def render(known: dict[str, Any]) -> None:
    """Write tables and plots of all ``known`` figures into the page."""
    from benchmarks.plots import plot

    page = PAGE.read_text() if PAGE.exists() else "# Performance\n"
    for name in SECTIONS:
        if name in known:
            plots = plot(name, known[name], PAGE.parent / _PLOTS)
            links = [f"{_PLOTS}/{path.name}" for path in plots]
            page = placed(page, name, block(name, known[name], links))
    PAGE.write_text(page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for; keep the figures unless it was quick."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less than a minute, nothing is kept")
    parser.add_argument("--only", action="append", choices=list(FULL), help="repeatable")
    parser.add_argument("--render", action="store_true", help="run nothing, write the page again")
    given = parser.parse_args(arguments)
    console = Console(highlight=False)
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    chosen = QUICK if given.quick else FULL
    for name in [] if given.render else [one for one in chosen if one in (given.only or chosen)]:
        console.rule(SECTIONS[name][0])
        figures = run(name, chosen[name])
        share = figures["others"]["share"]
        seconds = figures["seconds"]
        console.print(f"{seconds} s; other processes had {share:.0%} of the cores", style="dim")
        if name == "reader" and given.quick:
            (one,) = (one for one in figures["reader"] if not one["headers"])
            console.print(f"reader / bare socket, {one['size']} B: {one['ratio']:.2f}")
        if not given.quick:
            known[name] = figures
            # After each, so that a later failure leaves what there is.
            FIGURES.write_text(json.dumps(known, indent=1) + "\n")
    if not given.quick:
        render(known)


if __name__ == "__main__":
    main()
