"""The documents say what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from nats_stream_source.options import CONNECTION, KV, Option, markdown_table
from nats_stream_source.source.schema import KV_DDL

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs/security.md",
    ROOT / "checkpoints_example/README.md",
]

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.parametrize(("name", "table"), [("kv", KV), ("connection", CONNECTION)])
def test_readme_has_the_options(name: str, table: tuple[Option, ...]) -> None:
    shown = re.search(rf"<!-- options: {name} -->\n(.*?)<!-- /options -->", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == markdown_table(table)


def test_readme_has_the_columns() -> None:
    section = README.partition("## Rows\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    assert shown == [tuple(column.split()) for column in KV_DDL.split(", ")]


def test_readme_names_only_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?= *(?:#|$|`|[A-Z]+=))", README, re.MULTILINE))
    assert named
    assert named <= targets


@documents
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [
        link for link in links if "://" not in link and not (path.parent / link).resolve().exists()
    ]
    assert not missing


@documents
def test_python_examples_are_python(path: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        ast.parse(example)


def test_architecture_names_each_module_as_it_calls_itself() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    there = {
        f"{folder}/{file.name}": _first_sentence(file)
        for folder in ("wire", "jetstream", "source", "delta")
        for file in (ROOT / "nats_stream_source" / folder).glob("[a-z]*.py")
    }
    table = text.partition("<!-- modules -->")[2]
    assert dict(re.findall(r"^\| `(\w+/\w+\.py)` \| (.*) \|$", table, re.MULTILINE)) == there
    named = set(re.findall(r"`((?:wire|jetstream|source|delta)/\w+\.py)`", text))
    assert named <= set(there)


def _first_sentence(module: Path) -> str:
    """The first paragraph of a module's docstring, as a cell of a table."""
    doc = ast.get_docstring(ast.parse(module.read_text())) or ""
    return doc.partition("\n\n")[0].replace("\n", " ").replace("``", "`").rstrip(".")
