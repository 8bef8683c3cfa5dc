"""docs/operations.md: its commands print what stands there, its Python runs."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.progress import BatchProgress
from tests.support.nats import buckets
from tests.support.paths import ROOT
from tests.support.spark.checkpoints import Checkpoint, ends

PAGE = (ROOT / "docs/operations.md").read_text()
LAKE = "/lake/plant-checkpoint"

_VARIES = (
    (r"\d{4}-\d\d-\d\dT[\d:]+\.\d{6}Z", "<microseconds>"),  # of one length: columns stay
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<time>"),
    (r"[\d.]+ s$", "<seconds>"),
)


def fixed(text: str) -> list[str]:
    """Lines without what differs from run to run."""
    for pattern, name in _VARIES:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    # The server leaves trailing zeros out, so its times may look like ours.
    return text.replace("<microseconds>;", "<time>;").splitlines()


def commands() -> list[tuple[str, str]]:
    """Each command of the page, and what it prints there."""
    shown = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", shown, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_the_commands(
    shared_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = shared_server.url
    buckets.create_bucket(url, "plant", 5)
    for key, value in (("pump", b"on"), ("fan", b"off"), ("pump", b"off")):
        buckets.put(url, "plant", key, value)
    buckets.delete(url, "plant", "fan")
    buckets.put(url, "plant", "door", b"open")
    first, second = ends(url, [3, 1], bucket="plant", includeHistory="true")
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.plan(0, first)
    checkpoint.commit(0)
    checkpoint.plan(1, second)
    lines = "consumer rebuilt stream=KV_fleet start=0 end=9 position=1 reason={} attempt=1\n"
    reasons = ("gap", "gap", '"missed heartbeat"')
    (tmp_path / "executor-1.stderr").write_text("".join(map(lines.format, reasons)))
    monkeypatch.setenv("NATS_SERVERS", url)
    monkeypatch.chdir(tmp_path)
    counting, *found = commands()
    command, printed = counting
    assert command.startswith("grep ")
    counted = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert counted.stdout == printed.rstrip("\n") + "\n"
    assert [command.split()[:2] for command, _ in found] == [
        ["nats-stream-source", name] for name in ("peek", "peek", "inspect")
    ]
    for command, printed in found:
        words = shlex.split(command)[1:]
        given = [str(checkpoint.path) if word == LAKE else word for word in words]
        assert main(given) == 0
        output = capsys.readouterr().out.replace(str(checkpoint.path), LAKE)
        assert fixed(output) == fixed(printed.rstrip("\n") + "\n")


def test_the_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    watching, handling = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    added: list[Any] = []
    names: dict[str, Any] = {
        "spark": SimpleNamespace(streams=SimpleNamespace(addListener=added.append))
    }
    exec(watching, names)
    assert added == [names["listener"]]
    late = BatchProgress("q", 0, 0, "KV_fleet", 0, 9, 9, 1.0, 200_000, None, 0, True, 0)
    names["alarm"](late)
    assert capsys.readouterr().out == "q is 200000 rows behind on KV_fleet\n"
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


def test_every_line_it_names_is_logged() -> None:
    section = PAGE.partition("An idle query logs nothing. What")[2].partition("### Where")[0]
    texts = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(texts) == 9
    package = ROOT / "nats_stream_source"
    code = " ".join(file.read_text() for file in sorted(package.rglob("*.py")))
    assert [text for text in texts if text not in code] == []
