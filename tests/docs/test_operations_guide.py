"""docs/operations.md: its Python runs, its log lines are logged."""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nats_stream_source.delta import follow
from nats_stream_source.spark.progress import BatchProgress
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/operations.md").read_text()


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    watching, exporting, handling = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    added: list[Any] = []
    names: dict[str, Any] = {
        "spark": SimpleNamespace(streams=SimpleNamespace(addListener=added.append))
    }
    exec(watching, names)
    assert added == [names["listener"]]
    late = BatchProgress("q", 0, 0, "KV_fleet", 0, 9, 9, 1.0, 200_000, None, 0, True, 0)
    names["alarm"](late)
    assert capsys.readouterr().out == "q is 200000 rows behind on KV_fleet\n"
    exported: list[dict[str, Any]] = []
    names |= {"changes": None, "follow": lambda *given, **named: exported.append(named)}
    exec(exporting, names)
    assert exported[0].keys() <= inspect.signature(follow).parameters.keys()
    assert exported[0]["prometheus"] == 9464
    log = logging.getLogger("nats_stream_source")
    before = log.level
    exec(handling, names)
    try:
        names["handler"].setStream(stream := io.StringIO())
        progress = SimpleNamespace(json=json.dumps(_report()))
        added[0].onQueryProgress(SimpleNamespace(progress=progress))
        assert json.loads(stream.getvalue())["context"]["lag"] == "30"
    finally:
        log.removeHandler(names["handler"])
        log.setLevel(before)


def _report() -> dict[str, Any]:
    from tests.integration.spark.streaming.test_progress import REPORT

    return REPORT


def _lines_of_page() -> list[str]:
    section = PAGE.partition("An idle query logs nothing. What")[2].partition("### Where")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def _code() -> dict[Path, str]:
    package = ROOT / "nats_stream_source"
    return {file: file.read_text() for file in sorted(package.rglob("*.py"))}


def test_log_lines_of_page_are_logged() -> None:
    texts = _lines_of_page()
    assert len(texts) == 54
    code = " ".join(_code().values())
    assert [text for text in texts if text not in code] == []


def test_warnings_of_code_are_on_page() -> None:
    """Those of subscriptions and object stores, which Spark does not use, are not."""
    texts = tuple(_lines_of_page())
    warned = [
        text
        for file, code in _code().items()
        if not {"subscriptions", "object_store"} & set(file.parts)
        for text in re.findall(r'log\.warning\(\s*f?"([^"{]+)', code)
    ]
    assert len(warned) > 30
    assert [text for text in warned if not text.startswith(texts)] == []
