"""The soak's command line."""

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

from soak.outcome import TOPOLOGIES, Settings, summary
from soak.run import clean, run


def main(arguments: list[str] | None = None) -> int:
    """Run as the arguments say; the exit status: 1 where there was an anomaly."""
    parser = argparse.ArgumentParser(
        prog="soak", description="Write, read and break things for a while, then compare."
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, help="the run to repeat; default: a new one")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="cluster")
    parser.add_argument("--rate", type=float, default=300, help="writes a second; default 300")
    parser.add_argument("--plain", action="store_true", help="without Spark: more restarts")
    parser.add_argument("--only", action="append", choices=("servers", "between", "driver"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result in numbers")
    parser.add_argument("--keep", action="store_true", help="the directory of a passing run, too")
    said = parser.parse_args(arguments)
    # Everything is ended on the way out, which a signal's default would leave out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Of each connection that is reset while something is written to it.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    console = Console()
    settings = Settings(
        seed=random.randrange(10**6) if said.seed is None else said.seed,
        minutes=said.minutes,
        topology=said.topology,
        rate=said.rate,
        spark=not said.plain,
        only=tuple(said.only or ()),
    )
    try:
        outcome = run(settings, lambda line: console.print(line, markup=False, highlight=False))
    except KeyboardInterrupt:
        console.print("interrupted; all that was started has been ended")
        return 130
    result = summary(outcome)
    console.print(table_of(result))
    if said.json:
        said.json.write_text(json.dumps(result, indent=2) + "\n")
    if not result["anomalies"]:
        if not said.keep:
            clean(outcome)
        return 0
    for kind, texts in result["examples"].items():
        for text in texts:
            console.print(f"{kind}: {text}", markup=False, highlight=False)
    console.print(f"anomalies; everything is kept in {outcome.directory}", markup=False)
    (outcome.directory / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return 1


def table_of(result: Mapping[str, Any]) -> Table:
    """The result as a table."""
    table = Table(title=f"soak, {result['topology']}", show_header=False)
    for name, value in result.items():
        if name == "examples":
            continue
        if name == "anomalies":
            table.add_section()
        text = _said(value)
        table.add_row(name.replace("_", " "), text or ("none" if name == "anomalies" else "-"))
    return table


def _said(value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{value:,}" if isinstance(value, int) else str(value)
    lines = []
    for name, one in value.items():
        text = ", ".join(f"{k} {v:,}" for k, v in one.items()) if isinstance(one, Mapping) else one
        lines.append(f"{name}: {text:,}" if isinstance(text, int) else f"{name}: {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
