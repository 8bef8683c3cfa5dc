"""The size of the tree: a large module or folder gives the reason in its docstring."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "nats_stream_source"
MODULES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx")])


def _docstring(path: Path) -> str:
    found = re.search(r'"""(.*?)"""', path.read_text(), re.DOTALL)
    return " ".join(found[1].split()).lower() if found else ""


def test_docstrings_of_modules_above_500_lines_give_reason() -> None:
    large = [path for path in MODULES if len(path.read_text().splitlines()) > 500]
    assert [path for path in large if "one module" not in _docstring(path)] == []


def test_docstrings_of_folders_above_20_modules_give_reason() -> None:
    counts = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    large = [folder for folder, count in counts.items() if count > 20]
    assert [one for one in large if "one folder" not in _docstring(one / "__init__.py")] == []
