"""The fault proxy as a command, ``python -m tests.support.proxy``."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.paths import ROOT
from tests.support.proxy.command import main
from tests.support.recorded_stream import RecordedStream

COUNT = 400

pytestmark = pytest.mark.recorded(count=COUNT)

FAULTS = ("drop first", "drop 5%", "duplicate 100", "reorder 50", "delay 7:0.1", "cut 150")


def test_command_injects_faults_and_prints_counts(
    shared_server: NatsServer, recorded_messages: RecordedStream
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.proxy",
        "--to",
        f"127.0.0.1:{shared_server.port}",
    ]
    for fault in FAULTS:
        kind, which = fault.split(" ")
        command += [f"--{kind}", which]
    command += ["--seed", "7", "--swallow", "answers", "--rate", "20000000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" ")[0]
            with recorded_messages.query(url) as query:
                query.until(COUNT)
            recorded_messages.check(query.rows)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    lines = (line.rpartition(": ") for line in printed.splitlines() if line)
    counts = {what: int(count) for what, _, count in lines}
    assert all(counts[fault] > 0 for fault in FAULTS), counts
    assert counts["connections"] >= 3  # one is cut
    assert counts["deliveries"] > COUNT


WHICH = "is not first, last, a number from 1 on, or a share such as 10%"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--drop 0", f"argument --drop: '0' {WHICH}"),
        ("--delay first", "argument --delay: 'first' does not end with :SECONDS"),
        ("--rate 0", "argument --rate: '0' is not a number of bytes"),
        ("--listen here", "argument --listen: 'here' does not end with a port"),
    ],
)
def test_command_reports_invalid_argument(
    wrong: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--to", "4222", *wrong.split(" ")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"fault-proxy: error: {message}"
