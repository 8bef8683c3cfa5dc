"""The documents say what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs.generate import FOLDERS, documents
from nats_stream_source.source.schema import kv_ddl, stream_ddl

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs/security.md",
    ROOT / "checkpoints_example/README.md",
]

each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def test_readme_has_the_columns() -> None:
    section = README.partition("## Rows\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    columns = f"{kv_ddl()}, {stream_ddl()}".split(", ")
    assert shown == [tuple(column.split()) for column in columns]


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
        ast.parse(example)


def test_generated_parts_are_as_generated() -> None:
    for path, text in documents().items():
        assert path.read_text() == text, f"{path.name}: run make docs"


def test_architecture_names_modules_that_there_are() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/\w+\.py)`", text))
    assert not [name for name in named if not (ROOT / "nats_stream_source" / name).exists()]


def test_reliability_names_tests_that_there_are() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+(?:\.py|/))`", text))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
