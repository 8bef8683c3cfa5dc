"""`follow BUCKET TABLE`: refused command lines, errors and exit status."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from nats_stream_source.cli.follow import _error_of
from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConfigurationError, DataLossError, NatsSourceError
from tests.integration.cli.command import COMMAND
from tests.support.paths import ROOT
from tests.support.spark.session import program_environment


def test_missing_bucket_is_failure_after_once(nats_server: NatsServer, tmp_path: Path) -> None:
    words = ("fleet", str(tmp_path / "fleet"), "--servers", nats_server.url, "--once")
    done = subprocess.run(
        [*COMMAND, "follow", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=program_environment(tmp_path / "conf"),
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = (one for one in done.stderr.splitlines() if one.startswith("nats-stream-source: "))
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
