"""conformance.md names, for each statement, code and tests that exist, or the reason."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "nats_stream_source"
TEXT = (ROOT / "docs/internals/conformance.md").read_text()
DOCUMENTS = ["ADR-31", "ADR-53", "ADR-15", "ADR-8", "ADR-19"]

_TEST = re.compile(r"`(tests/(?:\w+/)*\w+\.py)::(\w+)`")
_CODE = re.compile(r"`((?:\w+/)*\w+\.py)(?:: ([\w.]+))?`")


@dataclass(frozen=True)
class Row:
    """One statement of a document."""

    document: str
    section: str
    statement: str
    kept_by: str
    proved_by: str

    def __str__(self) -> str:
        return f"{self.document} {self.section}: {self.statement[:40]}"


def _rows() -> list[Row]:
    rows = []
    for part in TEXT.split("\n## ")[1:]:
        document = part.split(" ", 1)[0]
        if not document.startswith("ADR-"):
            continue
        for line in part.splitlines():
            if not line.startswith("|") or set(line) <= set("|- "):
                continue
            # A pipe inside a statement is written \|.
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if cells[:2] != ["section", "statement"]:
                assert len(cells) == 4, line
                rows.append(Row(document, *cells))
    return rows


ROWS = _rows()


@functools.cache
def _names(path: Path) -> frozenset[str]:
    """The functions, classes, methods (``Class.method``) and attributes that a file defines."""
    found: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            elif isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))

    walk(ast.parse(path.read_text()).body, "")
    return frozenset(found)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_document_has_its_statements(document: str) -> None:
    assert sum(row.document == document for row in ROWS) >= 10


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_statement_is_proved_by_tests_that_exist_or_has_a_reason(row: Row) -> None:
    assert row.section
    assert row.statement
    tests = _TEST.findall(row.proved_by)
    if not tests:
        reason = row.proved_by.partition("not kept: ")[2]
        assert len(reason.split()) > 4, "neither a test nor a reason"
        return
    assert not all(file.startswith("tests/unit/") for file, _ in tests), "no test with a server"
    missing = [name for file, name in tests if name not in _names(ROOT / file)]
    assert not missing
    code = _CODE.findall(row.kept_by)
    assert code or row.kept_by.startswith(("server", "not kept: ")), "no function is named"
    absent = [f"{file}: {name}" for file, name in code if name and name not in _names(_where(file))]
    assert not absent


def _where(file: str) -> Path:
    return PACKAGE / file
