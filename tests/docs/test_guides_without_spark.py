"""The pages on the command, on asyncio and on operations: their examples run without Spark."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import logging
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nats_stream_source.jetstream as layer
from nats_stream_source.cli.main import main
from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.progress import BatchProgress
from tests.docs.pages import blocks, console_commands, page
from tests.support.nats import buckets
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.spark.checkpoints import Checkpoint, ends

# -- command.md ----------------------------------------------------------------------------------

LAKE = "/lake/plant-checkpoint"

_VARIES = (
    (r"\d{4}-\d\d-\d\dT[\d:]+\.\d{6}Z", "<microseconds>"),  # of one length: columns stay
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<time>"),
    (r"[\d.]+ s$", "<seconds>"),
    (r"^scanner    \w+$", "<scanner>"),
)


def fixed(text: str) -> list[str]:
    """Lines without what differs from run to run."""
    for pattern, name in _VARIES:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    # The server leaves trailing zeros out, so its times may look like ours.
    return text.replace("<microseconds>;", "<time>;").splitlines()


def test_commands_run(
    nats_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = nats_server.url
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
    monkeypatch.setenv("NATS_URL", url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = console_commands("command")
    assert [command.split()[:2] for command, _ in found] == [
        ["nats-stream-source", name] for name in ("peek", "peek", "inspect")
    ]
    for command, printed in found:
        words = shlex.split(command)[1:]
        given = [str(checkpoint.path) if word == LAKE else word for word in words]
        assert main(given) == 0
        output = capsys.readouterr().out.replace(str(checkpoint.path), LAKE)
        assert fixed(output) == fixed(printed.rstrip("\n") + "\n")


def test_flags_of_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    flags = set(re.findall(r"(?<![-|])--[a-z][a-z-]+", page("command")))
    helps = ""
    for command in ("peek", "inspect", "follow"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helps += capsys.readouterr().out
    assert flags
    assert [flag for flag in sorted(flags) if flag not in helps] == []


# -- jetstream.md --------------------------------------------------------------------------------


def examples() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for example in blocks("jetstream", "python"):
        exec(example, names)
    return names


def test_examples_of_jetstream_run(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = examples()
    asyncio.run(asyncio.wait_for(names["main"](url), 60))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("b'IAH' 2 ")
    assert printed[1] == "['ua.N14228']"
    assert printed[3] == "ua.N14228 DEL"
    assert "2 b'IAH'" in printed


async def test_puts_in_bounded_number(url: str) -> None:
    async with layer.connect(url) as jetstream:
        fleet = await layer.KeyValue.create_bucket(jetstream, layer.KeyValueConfig("many"))
        await examples()["put_all"](fleet, [(f"k{number}", b"x") for number in range(12_000)])
        assert len(await fleet.keys()) == 12_000


def test_spark_is_not_loaded_with_it() -> None:
    """A program without Spark does not pay for it."""
    code = "import sys, nats_stream_source.jetstream; sys.exit('pyspark' in sys.modules)"
    ran(sys.executable, "-c", code)


# -- operations.md -------------------------------------------------------------------------------


def test_examples_of_operations_run(capsys: pytest.CaptureFixture[str]) -> None:
    watching, exporting, handling = blocks("operations", "python")
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
    section = (
        page("operations").partition("An idle query logs nothing.")[2].partition("### Where")[0]
    )
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def _code() -> dict[Path, str]:
    package = ROOT / "nats_stream_source"
    return {file: file.read_text() for file in sorted(package.rglob("*.py"))}


def test_log_lines_of_page_are_logged() -> None:
    texts = _lines_of_page()
    assert len(texts) > 50
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
