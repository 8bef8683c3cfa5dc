"""The documents name modules, tests, options and commands that exist."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from docs.generate import documents
from tests.support.paths import ROOT

PACKAGE = ROOT / "nats_stream_source"
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "checkpoints_example/README.md",
]

each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def test_readme_names_only_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?= *(?:#|$|`|[A-Z]+=))", README, re.MULTILINE))
    assert named
    assert named <= targets


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [
        link for link in links if "://" not in link and not (path.parent / link).resolve().exists()
    ]
    assert not missing


@each_document
def test_python_examples_are_python(path: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        ast.parse(textwrap.dedent(example))  # an example in a list is indented


def test_generated_parts_are_as_generated() -> None:
    for path, text in documents().items():
        assert path.read_text() == text, f"{path.name}: run make docs"


@each_document
def test_modules_named_by_page_exist(path: Path) -> None:
    folders = "|".join(folder.name for folder in PACKAGE.iterdir() if folder.is_dir())
    named = set(re.findall(rf"[`>]((?:{folders})/[\w/]*(?:\.pyx?|/))[`\"]", path.read_text()))
    # `docs/internals/` writes paths below the package; other pages may name the same folders.
    assert [
        name for name in named if not any((top / name).exists() for top in (PACKAGE, ROOT))
    ] == []


def test_paths_of_contributing_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where a change goes")[2]
    named = set(re.findall(r"`([\w./]+(?:/|\.pyx?|\.md|\.yml|\.in))`", table.partition("\n## ")[0]))
    assert len(named) > 50
    # A name without a folder follows a path of the same folder.
    missing = [
        name
        for name in named
        if not any((top / name).exists() for top in (PACKAGE, ROOT))
        and ("/" in name or not any(PACKAGE.rglob(name)))
    ]
    assert missing == []


@each_document
def test_tests_and_benchmarks_named_by_page_exist(path: Path) -> None:
    named = set(re.findall(r"`((?:tests|benchmarks)/[\w/]*(?:\.py|/))`", path.read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_promises_have_tests() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| .* \|$", text.partition("## Promises\n")[2].partition("\n## ")[0], re.M)
    promises = [row for row in rows if not row.startswith(("| ---", "| event |"))]
    assert len(promises) > 50
    assert [row for row in promises if not re.search(r"`tests/[\w/]+(?:\.py|/)` \|$", row)] == []
