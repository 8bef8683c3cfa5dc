"""Run all benchmarks one after the other and write their page: ``python -m benchmarks``.

``python -m benchmarks [--quick] [--only reader --only spark ...]``

Each benchmark runs in a separate process. The figures are written to
``docs/internals/performance.json``, which keeps the figures of benchmarks that did not run; tables
and plots are written to ``docs/internals/performance_method.md``; ``make docs`` writes the results.
``--quick`` takes less than a minute: small sizes, without Spark and Kafka, and the figures are not
saved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.support.machine import OtherProcesses
from benchmarks.support.report import SECTIONS, block, replace_block

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/internals/performance_method.md"
FIGURES = ROOT / "docs/internals/performance.json"
_PLOTS = "performance"  # folder of the plots, relative to the page

FULL: dict[str, list[str]] = {
    "reader": [],
    "spark": ["--rows", "1000000", "--rows", "10000000", "--size", "128", "--size", "1024"],
    "latency": [],
    "freshness": [],
    "commits": [],
    "writing": [],
    "planner": [],
    "several": [],
    "lookup": [],
}
"""Benchmarks in order, and their arguments."""

QUICK: dict[str, list[str]] = {
    "writing": ["--size", "128", "--rows", "50000", "--rounds", "2", "--plain", "--no-spark"],
    # Last, so that the output ends with its ratio.
    "reader": ["--size", "128", "--rows", "200000", "--rounds", "3"],
}


def run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark in a separate process.

    Returns:
        Its figures, and the load of other processes.

    Raises:
        subprocess.CalledProcessError: the benchmark failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        result = Path(scratch, "figures.json")
        command = [sys.executable, "-m", "benchmarks.one", name, *arguments, "--json", str(result)]
        began = time.monotonic()
        with OtherProcesses() as others:
            subprocess.run(command, cwd=ROOT, check=True)
        figures: dict[str, Any] = json.loads(result.read_text())
    return {
        **figures,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began),
        "others": {"share": others.share},
    }


def render(known: dict[str, Any]) -> None:
    """Write tables and plots of all ``known`` figures into the page."""
    from benchmarks.support.plots import plot

    page = PAGE.read_text()
    for name in SECTIONS:
        if name in known:
            plots = plot(name, known[name], PAGE.parent / _PLOTS)
            links = [f"{_PLOTS}/{path.name}" for path in plots]
            page = replace_block(page, name, block(name, known[name], links))
    PAGE.write_text(page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected benchmarks; save their figures unless ``--quick`` is set."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run less than a minute, save nothing")
    parser.add_argument("--only", action="append", choices=list(FULL), help="repeatable")
    options = parser.parse_args(arguments)
    known = json.loads(FIGURES.read_text())
    chosen = QUICK if options.quick else FULL
    for name in (one for one in chosen if one in (options.only or chosen)):
        print(f"\n{SECTIONS[name][0]}", flush=True)
        figures = run(name, chosen[name])
        share, seconds = figures["others"]["share"], figures["seconds"]
        print(f"{seconds} s; other processes used {share:.0%} of the CPU time", flush=True)
        if options.quick and name == "reader":
            (one,) = (one for one in figures["reader"] if not one["headers"])
            print(f"reader / bare socket, {one['size']} B: {one['ratio']:.2f}")
        if not options.quick:
            known[name] = figures
            # After each benchmark, so that a later failure keeps earlier figures.
            FIGURES.write_text(json.dumps(known, indent=1) + "\n")
            render(known)


if __name__ == "__main__":
    main()
