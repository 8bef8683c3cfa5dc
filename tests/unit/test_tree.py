"""The size of the tree: modules of at most 400 lines, folders of at most 15 modules."""

from __future__ import annotations

from collections import Counter

from tests.support.paths import ROOT

PACKAGE = ROOT / "nats_stream_source"
MODULES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx")])


def test_modules_have_at_most_400_lines() -> None:
    assert [path for path in MODULES if len(path.read_text().splitlines()) > 400] == []


def test_folders_have_at_most_15_modules() -> None:
    folders = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert [folder for folder, count in folders.items() if count > 15] == []
