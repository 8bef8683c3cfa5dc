"""Run one benchmark: ``python -m benchmarks.one NAME``; tables on standard output.

It has a flag for each argument of the benchmark's ``run``; ``--json FILE`` writes the figures.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.machine import machine
from benchmarks.support.report import SECTIONS


def main(name: str, *words: str) -> None:
    """Run a benchmark. A boolean is a switch, a sequence is a repeatable flag."""
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(description=(module.__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    for parameter in inspect.signature(module.run).parameters.values():
        flag, default = "--" + parameter.name.replace("_", "-"), parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, Sequence):
            parser.add_argument(flag, action="append", type=type(default[0]), help="repeatable")
        else:
            parser.add_argument(flag, type=type(default))
    given = {name: one for name, one in vars(parser.parse_args(words)).items() if one is not None}
    path = given.pop("json", None)
    figures = {"machine": machine(), **module.run(**given)}
    print(SECTIONS[name][1](figures))
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
