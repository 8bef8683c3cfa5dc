"""docs/command.md: its commands print what the page shows, its tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer
from tests.docs.pages import console_commands, page
from tests.support.nats import buckets
from tests.support.spark.checkpoints import Checkpoint, ends

PAGE = page("command")
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
    flags = set(re.findall(r"(?<![-|])--[a-z][a-z-]+", PAGE))
    helps = ""
    for command in ("peek", "inspect", "follow"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helps += capsys.readouterr().out
    assert flags
    assert [flag for flag in sorted(flags) if flag not in helps] == []
