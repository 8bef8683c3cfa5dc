"""The public names are those of ``public_names.json``, as docs/reference/compatibility.md promises.

``python -m tests.compat.test_public_names`` writes the file.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import nats_stream_source
from nats_stream_source import delta, embedded, errors, jetstream
from nats_stream_source.cli import main as command
from nats_stream_source.delta.rules.layout import PROPERTY
from nats_stream_source.metrics.table import METRICS
from nats_stream_source.options import COMMON, CONNECTION, KV, STREAM
from nats_stream_source.options.reading import LOOKUP
from nats_stream_source.options.writing import KV_WRITE, STREAM_WRITE
from nats_stream_source.rows.columns import COLUMNS
from nats_stream_source.rows.offsets import ONE_STREAM, SEVERAL_STREAMS
from tests.support.paths import ROOT

FILE = Path(__file__).parent / "public_names.json"
PAGE = (ROOT / "docs/reference/compatibility.md").read_text()
_LOGGERS = {"_log", "log"}
_LEVELS = {"debug", "info", "warning", "error"}


def parameters(value: Any) -> list[str]:
    """The parameters of a function or a class; empty for other names."""
    if is_typeddict(value):
        return sorted(value.__annotations__)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return []
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


def python_names(module: ModuleType, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each name with its parameters, and the public attributes of a class with theirs."""
    for name in names:
        value = getattr(module, name)
        full = f"{module.__name__}.{name}"
        yield full, parameters(value)
        own = [
            one
            for one in (inspect.getmro(value) if inspect.isclass(value) else ())
            if one.__module__.startswith("nats_stream_source")
        ]
        for attribute in {attribute for one in own for attribute in vars(one)}:
            if not attribute.startswith("_"):
                yield f"{full}.{attribute}", parameters(getattr(value, attribute))


def log_fields() -> set[str]:
    """The fields of all log lines, which have no other arguments: a machine can read fields."""
    found: set[str] = set()
    for path in (ROOT / "nats_stream_source").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            logger = node.func.value
            if isinstance(logger, ast.Name) and logger.id in _LOGGERS and node.func.attr in _LEVELS:
                assert len(node.args) == 1, f"{path}:{node.lineno}"
                found |= {one.arg for one in node.keywords if one.arg}
    return found - {"exc_info"}


def public_names() -> dict[str, Any]:
    modules = (
        *((one, vars(one)["__all__"]) for one in (nats_stream_source, delta, jetstream)),
        (embedded, ["NatsServer"]),
    )
    options = {"connection": CONNECTION, "reading": COMMON, "nats_kv": KV, "nats_stream": STREAM}
    options |= {"lookup": LOOKUP, "write nats_kv": KV_WRITE, "write nats_stream": STREAM_WRITE}
    return {
        "python": dict(
            sorted(pair for module, names in modules for pair in python_names(module, [*names]))
        ),
        "options": {table: sorted(one.name for one in rows) for table, rows in options.items()},
        "columns": {
            name: {one.name: one.type for one in columns if one.type is not None}
            for name, columns in COLUMNS.items()
        },
        "errors": sorted(
            name
            for name, value in vars(errors).items()
            if inspect.isclass(value) and issubclass(value, errors.NatsSourceError)
        ),
        "metrics": {one.full_name: list(one.labels) for one in METRICS.values()},
        "log fields": sorted(log_fields()),
        "commands": sorted(command._COMMANDS),
        "exit statuses": [command.FAILED, command.USAGE, command.DATA_LOSS, command.INTERRUPTED],
        "offset versions": [ONE_STREAM, SEVERAL_STREAMS],
        "table property": PROPERTY,
    }


def test_public_names_are_those_of_file() -> None:
    """A difference is a change for users: write the file again, and a line of CHANGELOG.md."""
    assert json.loads(FILE.read_text()) == json.loads(json.dumps(public_names()))


def test_page_names_file() -> None:
    assert FILE.relative_to(ROOT).as_posix() in PAGE


def test_upper_limits_of_requirements_are_on_page() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for limit in ("nats-py[nkeys]>=2.16,<2.17", "deltalake>=1.6.6,<1.7", "pandas>=2.2,<3"):
        assert limit in project
        name = limit.partition("[")[0].partition(">")[0]
        assert f"`{name}<{limit.rpartition('<')[2]}`" in PAGE


if __name__ == "__main__":
    FILE.write_text(json.dumps(public_names(), indent=1) + "\n")
