"""The arguments of each benchmark, and its end: tables on standard output, figures as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.machine import machine
from benchmarks.support.report import SECTIONS


def parsed(doc: str | None, arguments: Sequence[str] | None, **defaults: Any) -> argparse.Namespace:
    """The arguments of a benchmark: a flag for each of ``defaults``, and ``--json FILE``.

    A boolean is a switch, a list is a repeatable flag.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, Sequence) and not isinstance(default, str):
            parser.add_argument(flag, action="append", type=type(default[0]), help="repeatable")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    given = vars(parser.parse_args(arguments))
    return argparse.Namespace(
        **{name: defaults.get(name) if value is None else value for name, value in given.items()}
    )


def finish(name: str, figures: Mapping[str, Any], path: Path | None) -> None:
    """Print the tables of a benchmark as on the page; write its figures to ``path``, if set."""
    all_figures = {"machine": machine(), **figures}
    print(SECTIONS[name][1](all_figures))
    if path is not None:
        path.write_text(json.dumps(all_figures, indent=1) + "\n")
