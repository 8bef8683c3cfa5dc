"""The checkpoint example runs and prints what its README shows; its sample is a real checkpoint."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.spark.session import program_environment

EXAMPLE = ROOT / "checkpoints_example"


def offsets(checkpoint: Path) -> list[dict[str, Any]]:
    files = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    return [json.loads(file.read_text().splitlines()[2]) for file in files]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the example prints, and the checkpoint that it leaves."""
    checkpoint = tmp_path_factory.mktemp("example") / "checkpoint"
    environment = program_environment(checkpoint.with_name("conf"))
    done = ran(sys.executable, EXAMPLE / "run.py", checkpoint, environment=environment)
    assert done.stderr == ""
    return done.stdout, checkpoint


def section(printed: str, number: int) -> list[str]:
    """The indented lines under one of the example's numbered headings."""
    text = re.split(r"^\d\. .*\n", printed, flags=re.MULTILINE)[number]
    return [line.strip() for line in text.splitlines()]


def test_query_continues_after_stop(run: tuple[str, Path]) -> None:
    assert section(run[0], 1) == [
        "batch 0: revision 1 PUT pump on",
        "batch 0: revision 2 PUT fan off",
    ]
    assert section(run[0], 2) == [
        "batch 1: revision 3 PUT pump off",
        "batch 1: revision 4 DEL fan None",
        "batch 1: revision 5 PUT door open",
    ]


def test_shows_every_file(run: tuple[str, Path]) -> None:
    shown = [line.partition(":")[0] for line in section(run[0], 3)]
    assert shown == ["commits/0", "commits/1", "metadata", "offsets/0", "offsets/1"]


def test_query_replays_from_sequence(run: tuple[str, Path]) -> None:
    revisions = [int(line.split()[3]) for line in section(run[0], 4)]
    assert revisions == [2, 3, 4, 5]


def test_query_reports_lag(run: tuple[str, Path]) -> None:
    behind = [line for line in section(run[0], 5) if line.endswith("behind")]
    assert [re.sub(r", [\d.]+ s", "", line) for line in behind] == [
        "batch 0: 3 rows behind",
        "batch 1: 1 rows behind",
        "batch 2: 0 rows behind",
    ]


def test_sample_equals_current_checkpoint(run: tuple[str, Path]) -> None:
    fixed = ("stream", "epoch", "origin", "stream_seq", "consumer_seq", "initial_through", "filter")
    sample, today = (
        [[offset[name] for name in fixed] for offset in offsets(checkpoint)]
        for checkpoint in (EXAMPLE / "checkpoint", run[1])
    )
    assert sample == today
    assert all(offset["time"] and offset["created"] for offset in offsets(EXAMPLE / "checkpoint"))


def test_readme_shows_sample() -> None:
    shown = re.search(r"```json\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    line = (EXAMPLE / "checkpoint/offsets/1").read_text().splitlines()[2]
    assert json.loads(shown[1]) == json.loads(line)


def test_readme_explains_every_field() -> None:
    explained = set(re.findall(r"`(\w+)`", (EXAMPLE / "README.md").read_text()))
    line = (EXAMPLE / "checkpoint/offsets/1").read_text().splitlines()[2]
    assert json.loads(line).keys() <= explained
