"""`follow`: a table that equals its bucket, signals, exit status."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from nats_stream_source.cli.follow import _error_of
from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import ConfigurationError, DataLossError, NatsSourceError
from tests.integration.cli.command import COMMAND
from tests.integration.delta.table_content import live
from tests.support.nats import buckets
from tests.support.paths import ROOT
from tests.support.scrape import scrape, value
from tests.support.spark.session import program_environment
from tests.support.wait import wait_until

_DEADLINE = 240.0  # seconds; Spark starts in this time on a busy machine


def _start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    directory = tmp_path / "conf"
    environment = (
        program_environment(directory)
        if not directory.exists()
        else {**os.environ, "SPARK_CONF_DIR": str(directory)}
    )
    return subprocess.Popen(
        [*COMMAND, "follow", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        # A test run in the background of a shell ignores SIGINT, and so would the command.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_table_follows_bucket_until_signal(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table = nats_server.url, tmp_path / "lake" / "fleet"
    buckets.create_bucket(url, "fleet", 5)
    buckets.put_many(url, "fleet", [("plane.1", b"EWR"), ("plane.2", b"IAH"), ("car", b"x")])
    port = free_port()
    words = ["fleet", str(table), "--servers", url, "--option", "keys=plane.>"]
    words += ["--prometheus", f"127.0.0.1:{port}"]

    def reached(expected: dict[str, int]) -> bool:
        return (table / "_delta_log").exists() and live(table) == expected

    for number, expected in ((signal.SIGTERM, {"plane.1": 4, "plane.2": 2}), (signal.SIGINT, {})):
        process = _start(tmp_path, *words)
        try:
            if number == signal.SIGTERM:
                buckets.put(url, "fleet", "plane.1", b"JFK")
            else:
                buckets.delete(url, "fleet", "plane.1")
                buckets.delete(url, "fleet", "plane.2")
            condition = functools.partial(reached, expected)
            wait_until(condition, f"the table to be {expected}", _DEADLINE)
            # The merge is recorded after its commit.
            wait_until(lambda: "merges_total" in scrape(port), "a merge", _DEADLINE)
            assert value(scrape(port), "query_active") == 1
            process.send_signal(number)
            printed, reported = process.communicate(timeout=_DEADLINE)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, reported
        # Workers of Spark that the end of the query interrupts also write to standard error.
        assert "nats-stream-source: " not in reported
        (*_, line) = printed.splitlines()
        assert re.fullmatch(
            # Spark reports a micro-batch later than it commits it.
            rf"[\d,]+ rows/s, (0|\?) rows behind, (0\.0|\?) s behind, {len(expected)} keys",
            line,
        )
    assert (tmp_path / "lake" / "fleet-checkpoint" / "offsets").is_dir()


def test_missing_bucket_is_a_failure_after_once(nats_server: NatsServer, tmp_path: Path) -> None:
    words = ("fleet", str(tmp_path / "fleet"), "--servers", nats_server.url, "--once")
    process = _start(tmp_path, *words)
    printed, reported = process.communicate(timeout=_DEADLINE)
    assert process.returncode == 1, reported
    assert printed == ""
    (line,) = (one for one in reported.splitlines() if one.startswith("nats-stream-source: "))
    assert "fleet" in line


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("fleet", "lake", "--option", "keyz=a"), "keyz"),
        (("fleet", "lake", "--option", "keys"), "'keys' is not NAME=VALUE"),
        (("fleet", "s3://lake/fleet"), "--checkpoint is missing"),
        (("fleet", "lake", "--option", "maxRowsPerTrigger=many"), "option 'maxRowsPerTrigger'"),
        (("fleet",), "TABLE"),
        (("fleet", "lake", "--prometheus", "x"), "prometheus is 'x', expected a port"),
    ],
)
def test_wrong_command_line_is_reported_before_spark_starts(
    words: tuple[str, ...], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["follow", *words, "--no-context"]) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "x\nnats_stream_source.errors.DataLossError: messages 3 to 9 are lost\n\tat org.a",
            DataLossError("messages 3 to 9 are lost"),
        ),
        (
            "x: nats_stream_source.errors.OptionError: option 'keys' is wrong",
            ConfigurationError("option 'keys' is wrong"),
        ),
        (
            "nats_stream_source.errors.ConnectError: a\nnats_stream_source.errors.ApiError: b\n",
            NatsSourceError("b"),
        ),
        ("disk full\nJVM stacktrace:\n at x", NatsSourceError("the query failed: disk full\n")),
    ],
)
def test_error_of_query_has_exit_status(text: str, expected: Exception) -> None:
    error = _error_of(text)
    assert (type(error), str(error)) == (type(expected), str(expected))
