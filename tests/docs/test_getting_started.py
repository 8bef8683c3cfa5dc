"""docs/getting-started.md: its server starts, its examples run in order and print what it shows."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/getting-started.md").read_text()


@pytest.fixture
def page_server(tmp_path: Path) -> Iterator[NatsServer]:
    """The server that the page starts, on a free port."""
    (command,) = re.findall(r"^nats-server .*$", PAGE, re.MULTILINE)
    arguments = shlex.split(command)[1:]
    assert arguments[1:3] == ["--store_dir", "nats-data"]
    with NatsServer(store=tmp_path / arguments[2], args=[arguments[0], *arguments[3:]]) as server:
        yield server


def test_examples_run(
    spark: SparkSession,
    page_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # restores what the page sets
    # Spark resolves the relative paths of the page in the directory in which its JVM was started.
    lake = str(tmp_path / "lake")
    page = PAGE.replace("nats://127.0.0.1:4222", page_server.url).replace('"lake/', f'"{lake}/')
    names: dict[str, Any] = {}
    compared = 0
    for language, block in re.findall(r"```(python|text)\n(.*?)```", page, re.DOTALL):
        if language == "python":
            exec(block, names)
        else:
            assert capsys.readouterr().out.strip() == block.strip()
            compared += 1
    assert compared == 4
    assert names["spark"] is spark
