"""``peek --follow``: rows as they arrive, to a file, a pipe and after a restart of the server."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.cli.command import COMMAND
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.paths import ROOT
from tests.support.wait import DEADLINE, wait_until

_serial = itertools.count()


class Following:
    """A running ``peek --follow``, whose output is a pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def line(self) -> str:
        """The next line of the output."""
        return self._lines.get(timeout=DEADLINE)

    def value(self) -> Any:
        """The value of the next row as JSON."""
        row = json.loads(self.line())
        return row.get("value", row.get("data"))

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C; the exit status and the standard error."""
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(DEADLINE)
        assert self.process.stderr is not None
        return status, self.process.stderr.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def following(*words: str) -> Iterator[Following]:
    process = subprocess.Popen(
        [*COMMAND, "peek", "--follow", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        # A test run in the background of a shell ignores SIGINT, and so would the command.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    peek = Following(process)
    try:
        yield peek
    finally:
        peek.close()


@pytest.fixture
def bucket(shared_server: NatsServer) -> str:
    name = f"b{next(_serial)}"
    buckets.create_bucket(shared_server.url, name, 5)
    for i in range(12):
        buckets.put(shared_server.url, name, f"k{i}", b"%d" % i)
    return name


def test_follow_prints_last_rows_then_new_ones(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    with following("--bucket", bucket, "--servers", url, "-n", "2") as peek:
        assert [peek.line().split()[0] for _ in range(3)] == ["key", "k10", "k11"]
        buckets.put(url, bucket, "new", b"here")
        assert peek.line().split()[:3] == ["new", "here", "13"]
        buckets.delete(url, bucket, "new")
        assert peek.line().split()[-1] == "DEL"
        assert peek.interrupt() == (130, "")
    assert not buckets.consumers(url, bucket)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], [str(i) for i in range(2, 12)]),
        (["--start-sequence", "2"], [str(i) for i in range(1, 12)]),
        (["--keys", "k3,later"], ["3"]),
    ],
)
def test_follow_start_positions(
    shared_server: NatsServer, bucket: str, words: list[str], values: list[str]
) -> None:
    url = shared_server.url
    with following("--json", "--bucket", bucket, "--servers", url, *words) as peek:
        assert [peek.value() for _ in values] == values
        buckets.put_many(url, bucket, [("later", b"new")])
        assert peek.value() == "new"
        peek.process.terminate()
        assert peek.process.wait(DEADLINE) == 143
    assert not buckets.consumers(url, bucket)


def test_stream_empty(shared_server: NatsServer) -> None:
    url, name = shared_server.url, f"S{next(_serial)}"
    create_stream(url, name)
    with following("--json", "--subject", f"{name}.a", "--servers", url) as peek:
        wait_until(
            lambda: buckets.api(url, f"CONSUMER.NAMES.{name}").get("consumers"),
            "the command has a consumer",
        )
        buckets.publish(url, [(f"{name}.b", b"other", None), (f"{name}.a", b"1", None)])
        assert peek.value() == "1"


def test_pipe_closed_by_reader_while_idle(shared_server: NatsServer, bucket: str) -> None:
    """As with ``| head -1``: the command must not wait for a row to notice it."""
    url = shared_server.url
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "peek", "-f", "-n", "1", "--json", "--bucket", bucket, "--servers", url],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    os.close(writing)
    try:
        with open(reading) as pipe:
            assert json.loads(pipe.readline())["value"] == "11"
            wait_until(lambda: buckets.consumers(url, bucket), "the command waits for rows")
        assert process.wait(DEADLINE) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    assert not buckets.consumers(url, bucket)


def test_bucket_deleted(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    with following("--bucket", bucket, "--servers", url, "-n", "1") as peek:
        peek.line()
        wait_until(lambda: buckets.consumers(url, bucket), "the command has a consumer")
        buckets.delete_bucket(url, bucket)
        assert peek.process.wait(DEADLINE) == 2
        assert peek.process.stderr is not None
        said = peek.process.stderr.read().splitlines()[-1]
    assert said == (f"nats-stream-source: could not follow stream 'KV_{bucket}': it was deleted")


def test_follow_retries_while_server_restarts(nats_server: NatsServer) -> None:
    url = nats_server.url
    buckets.create_bucket(url, "plant")
    buckets.put(url, "plant", "a", b"1")
    with following("--json", "--bucket", "plant", "--servers", url) as peek:
        assert peek.value() == "1"
        wait_until(lambda: buckets.consumers(url, "plant"), "the command has a consumer")
        nats_server.kill()
        nats_server.start()
        buckets.put(url, "plant", "a", b"2")
        assert peek.value() == "2"
        status, log = peek.interrupt()
    assert status == 130
    assert "consumer rebuilt" in log  # the restart was seen
