"""Command line of the soak."""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.soak.outcome import TOPOLOGIES, Settings, summary
from tests.soak.run import clean, run


def main(arguments: list[str] | None = None) -> int:
    """Run a soak; returns the exit status, 1 if it found an anomaly."""
    parser = argparse.ArgumentParser(
        prog="soak", description="Write and read under random faults, then compare."
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, help="seed of the run to repeat; default: random")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="cluster")
    parser.add_argument("--rate", type=float, default=300, help="writes per second; default 300")
    parser.add_argument(
        "--plain", action="store_true", help="run without Spark, with more restarts"
    )
    parser.add_argument("--only", action="append", choices=("servers", "between", "driver"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the files of a passing run")
    options = parser.parse_args(arguments)
    # SIGTERM raises SystemExit, so that all started processes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # asyncio logs a warning for each write to a connection that was reset.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    console = Console()
    settings = Settings(
        seed=random.randrange(10**6) if options.seed is None else options.seed,
        minutes=options.minutes,
        topology=options.topology,
        rate=options.rate,
        spark=not options.plain,
        only=tuple(options.only or ()),
    )
    try:
        outcome = run(settings, lambda line: console.print(line, markup=False, highlight=False))
    except KeyboardInterrupt:
        console.print("interrupted; all started processes were stopped")
        return 130
    result = summary(outcome)
    console.print(result_table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if not result["anomalies"]:
        if not options.keep:
            clean(outcome)
        return 0
    for kind, texts in result["examples"].items():
        for text in texts:
            console.print(f"{kind}: {text}", markup=False, highlight=False)
    console.print(f"anomalies found; files in {outcome.directory}", markup=False)
    (outcome.directory / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return 1


def result_table(result: Mapping[str, Any]) -> Table:
    """The result as a table."""
    table = Table(title=f"soak, {result['topology']}", show_header=False)
    for name, value in result.items():
        if name == "examples":
            continue
        if name == "anomalies":
            table.add_section()
        text = _format(value)
        table.add_row(name.replace("_", " "), text or ("none" if name == "anomalies" else "-"))
    return table


def _format(value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{value:,}" if isinstance(value, int) else str(value)
    lines = []
    for name, item in value.items():
        nested = isinstance(item, Mapping)
        text = ", ".join(f"{k} {v:,}" for k, v in item.items()) if nested else item
        lines.append(f"{name}: {text:,}" if isinstance(text, int) else f"{name}: {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
