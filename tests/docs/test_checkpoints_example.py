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


def test_printed_sections(run: tuple[str, Path]) -> None:
    first, resumed, files, replayed, lag = (section(run[0], number) for number in range(1, 6))
    assert first == ["batch 0: revision 1 PUT pump on", "batch 0: revision 2 PUT fan off"]
    assert resumed == [
        "batch 1: revision 3 PUT pump off",
        "batch 1: revision 4 DEL fan None",
        "batch 1: revision 5 PUT door open",
    ]
    shown = [line.partition(":")[0] for line in files]
    assert shown == ["commits/0", "commits/1", "metadata", "offsets/0", "offsets/1"]
    assert [int(line.split()[3]) for line in replayed] == [2, 3, 4, 5]
    behind = [line for line in lag if line.endswith("behind")]
    assert [re.sub(r", [\d.]+ s", "", line) for line in behind] == [
        f"batch {number}: {rows} rows behind" for number, rows in enumerate((3, 1, 0))
    ]


def test_sample_equals_current_checkpoint(run: tuple[str, Path]) -> None:
    fixed = ("stream", "epoch", "origin", "stream_seq", "consumer_seq", "initial_through", "filter")
    sample, today = (
        [[offset[name] for name in fixed] for offset in offsets(checkpoint)]
        for checkpoint in (EXAMPLE / "checkpoint", run[1])
    )
    assert sample == today
    assert all(offset["time"] and offset["created"] for offset in offsets(EXAMPLE / "checkpoint"))


def test_readme_shows_sample_and_explains_every_field() -> None:
    readme = (EXAMPLE / "README.md").read_text()
    sample = json.loads((EXAMPLE / "checkpoint/offsets/1").read_text().splitlines()[2])
    (shown,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    assert json.loads(shown) == sample
    assert sample.keys() <= set(re.findall(r"`(\w+)`", readme))
