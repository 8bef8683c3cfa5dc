"""The proxy from the command line, as a process of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nats_stream_source.embedded import NatsServer, free_port
from tests.support.paths import ROOT
from tests.support.proxy.command import main
from tests.support.workload import Workload

COUNT = 400

pytestmark = pytest.mark.workload(count=COUNT)

COMMAND = [sys.executable, "-m", "tests.support.proxy"]
_DEADLINE = 60.0  # seconds; only what hangs takes that long


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the URL that it has said."""
    command = [*COMMAND, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        late = threading.Timer(_DEADLINE, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                raise AssertionError(f"it ended: {process.communicate()[1]}")
            yield process, said.split(" ")[0]
        finally:
            late.cancel()
            late.join()
            if process.poll() is None:
                process.kill()


def end(process: subprocess.Popen[str], number: int = signal.SIGINT) -> list[str]:
    """What it says when it is told to end."""
    process.send_signal(number)
    out, err = process.communicate(timeout=_DEADLINE)
    assert (process.returncode, err) == (0, "")
    return out.splitlines()


def passed(lines: list[str]) -> dict[str, int]:
    counts = (line.rpartition(": ") for line in lines if line)
    return {what: int(count) for what, _, count in counts}


def read_through(workload: Workload, url: str) -> None:
    with workload.reading(url) as reading:
        reading.until(COUNT)
    workload.check(reading.rows)


def to(server: NatsServer) -> list[str]:
    return ["--to", f"127.0.0.1:{server.port}"]


def test_it_relays_and_says_what_passed(
    shared_server: NatsServer, stream_workload: Workload
) -> None:
    with running(*to(shared_server)) as (process, url):
        read_through(stream_workload, url)
        counts = passed(end(process))
    assert counts.pop("connections") >= 2  # the planner's and the reader's
    assert counts.pop("deliveries") >= COUNT
    assert counts.pop("other messages") > 0
    assert counts == {}


@pytest.mark.parametrize(
    "harm", ["drop first", "drop last", "drop 5%", "duplicate 100", "reorder 50", "delay 7:0.1"]
)
def test_it_does_harm(shared_server: NatsServer, stream_workload: Workload, harm: str) -> None:
    what, which = harm.split(" ")
    with running(*to(shared_server), f"--{what}", which, "--seed", "7") as (process, url):
        read_through(stream_workload, url)
        counts = passed(end(process))
    assert counts[harm] > 0
    assert counts[harm] == 1 or which == "5%"
    # But for the delay, each makes the reader ask again.
    assert counts["deliveries"] > COUNT or what == "delay"


def test_it_cuts(shared_server: NatsServer, stream_workload: Workload) -> None:
    with running(*to(shared_server), "--cut", "150") as (process, url):
        read_through(stream_workload, url)
        counts = passed(end(process))
    assert counts["cut 150"] == 1
    assert counts["connections"] >= 3


def test_it_swallows_flow_control(shared_server: NatsServer) -> None:
    """And listens where it is told to, at a rate."""
    workload = Workload("stream", shared_server.url).create()
    workload.write(COUNT, size=20_000)
    port = str(free_port())
    more = ["--swallow", "answers", "--rate", "20000000", "--listen", port]
    with running(*to(shared_server), *more) as (process, url):
        assert url == f"nats://127.0.0.1:{port}"
        read_through(workload, url)
        assert passed(end(process))["swallow answers"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_while_a_client_is_connected(shared_server: NatsServer, number: int) -> None:
    with running(*to(shared_server)) as (process, url):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60) as client:
            assert client.recv(5) == b"INFO "
            lines = end(process, number)
        assert passed(lines) == {"connections": 1}


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """What is started now ignores it, too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_ends_where_it_was_told_to_ignore_ctrl_c(shared_server: NatsServer) -> None:
    """As a shell tells its background jobs."""
    with contextlib.ExitStack() as stack:
        with ctrl_c_ignored():
            process, _ = stack.enter_context(running(*to(shared_server)))
        assert passed(end(process)) == {"connections": 0}


def said_of(*arguments: str) -> str:
    """What it says to arguments that are wrong."""
    said = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
    )
    assert said.returncode == 2
    assert said.stdout == ""
    assert said.stderr.startswith("usage: fault-proxy")
    return said.stderr.splitlines()[-1].removeprefix("fault-proxy: error: ")


WHICH = "is not first, last, a number from 1 on, or a share such as 10%"


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("--drop many", f"argument --drop: 'many' {WHICH}"),
        ("--drop 0", f"argument --drop: '0' {WHICH}"),
        ("--cut 101%", f"argument --cut: '101%' {WHICH}"),
        ("--delay first", "argument --delay: 'first' does not end with :SECONDS"),
        ("--delay some:1", f"argument --delay: 'some' {WHICH}"),
        ("--rate 0", "argument --rate: '0' is not a number of bytes"),
        ("--listen here", "argument --listen: 'here' does not end with a port"),
        ("--to localhost", "argument --to: 'localhost' does not end with a port"),
        ("--swallow all", "argument --swallow: invalid choice: 'all' "),
        ("--lose first", "unrecognized arguments: --lose first"),
    ],
)
def test_a_command_line_that_is_wrong(
    wrong: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--to", "4222", *wrong.split(" ")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: fault-proxy")
    assert said.splitlines()[-1].startswith(f"fault-proxy: error: {what}")


def test_a_process_that_is_told_something_wrong(shared_server: NatsServer) -> None:
    assert said_of() == "the following arguments are required: --to"
    taken = said_of(*to(shared_server), "--listen", str(shared_server.port))
    assert taken.startswith(f"cannot listen on port {shared_server.port}: ")


def test_help() -> None:
    said = subprocess.run(
        [*COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE
    )
    assert said.returncode == 0, said.stderr
    assert "--drop WHICH" in said.stdout
    assert "10%" in said.stdout
