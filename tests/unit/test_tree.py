"""The size of the tree, and private names of nats-py, in ``connection/nats_py`` only."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nats

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


ADAPTER = PACKAGE / "connection" / "nats_py"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_nats_py() -> set[str]:
    """Private attributes, methods, functions and modules of the installed nats-py."""
    names: set[str] = set()
    for file in Path(nats.__file__).parent.rglob("*.py"):
        names.add(file.stem)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return {name for name in names if is_private(name)}


def uses(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Accesses to ``names`` on objects other than the class's own, and imports of private names."""
    of_nats: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nats":
            of_nats |= {alias.asname or alias.name for alias in node.names}
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.lineno}: import {part}" for part in parts if is_private(part))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
                name = node.args[1]
                if isinstance(name, ast.Constant) and name.value in names:
                    yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ClassDef):
            # In a subclass of nats-py, `self._name` would be nats-py's own.
            bases = {ast.unparse(base).split(".")[0] for base in node.bases}
            exceptions = all(ast.unparse(base).endswith("Error") for base in node.bases)
            if bases & (of_nats | {"nats"}) and not exceptions:
                yield f"{node.lineno}: class {node.name}"


def test_private_names_of_nats_py_only_in_adapter() -> None:
    names = private_names_of_nats_py()
    assert {"_subs", "_transport", "_process_op_err"} <= names
    found = [
        f"{file.relative_to(ROOT)}:{use}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if ADAPTER not in file.parents
        for use in uses(ast.parse(file.read_text()), names)
    ]
    assert found == []


def test_private_name_use_is_found() -> None:
    code = """
from nats.aio.client import Client, _secret
class Own(Client): ...
client._subs
self._subs
getattr(client, "_transport")
client.close()
"""
    found = list(uses(ast.parse(code), {"_subs", "_transport"}))
    assert [use.partition(": ")[2] for use in found] == [
        "import _secret",
        "class Own",
        "client._subs",
        "getattr(client, '_transport')",
    ]
