"""``peek --follow``: rows as they arrive, to a pipe and after a restart of the server."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
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

Following = subprocess.Popen[str]
"""A running ``peek --follow``, whose outputs are pipes."""


@contextlib.contextmanager
def following(*words: str) -> Iterator[Following]:
    with subprocess.Popen(
        [*COMMAND, "peek", "--follow", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        # A test run in the background of a shell ignores SIGINT, and so would the command.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        watchdog = threading.Timer(2 * DEADLINE, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def line(peek: Following) -> str:
    """The next line of the output."""
    assert peek.stdout is not None
    return peek.stdout.readline()


def value(peek: Following) -> Any:
    """The value of the next row as JSON."""
    row = json.loads(line(peek))
    return row.get("value", row.get("data"))


def ended(peek: Following) -> tuple[int, str]:
    """The exit status and the standard error."""
    assert peek.stderr is not None
    return peek.wait(DEADLINE), peek.stderr.read()


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
        assert [line(peek).split()[0] for _ in range(3)] == ["key", "k10", "k11"]
        buckets.put(url, bucket, "new", b"here")
        assert line(peek).split()[:3] == ["new", "here", "13"]
        buckets.delete(url, bucket, "new")
        assert line(peek).split()[-1] == "DEL"
        peek.send_signal(signal.SIGINT)
        assert ended(peek) == (130, "")
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
        assert [value(peek) for _ in values] == values
        buckets.put_many(url, bucket, [("later", b"new")])
        assert value(peek) == "new"
        peek.terminate()
        assert peek.wait(DEADLINE) == 143
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
        assert value(peek) == "1"


def test_pipe_closed_by_reader_while_idle(shared_server: NatsServer, bucket: str) -> None:
    """As with ``| head -1``: the command must not wait for a row to notice it."""
    url = shared_server.url
    with following("-n", "1", "--json", "--bucket", bucket, "--servers", url) as peek:
        assert value(peek) == "11"
        wait_until(lambda: buckets.consumers(url, bucket), "the command waits for rows")
        assert peek.stdout is not None
        peek.stdout.close()
        assert ended(peek) == (0, "")
    assert not buckets.consumers(url, bucket)


def test_bucket_deleted(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    with following("--bucket", bucket, "--servers", url, "-n", "1") as peek:
        wait_until(lambda: buckets.consumers(url, bucket), "the command has a consumer")
        buckets.delete_bucket(url, bucket)
        status, log = ended(peek)
    said = f"nats-stream-source: could not follow stream 'KV_{bucket}': it was deleted"
    assert (status, log.splitlines()[-1]) == (2, said)


def test_follow_retries_while_server_restarts(nats_server: NatsServer) -> None:
    url = nats_server.url
    buckets.create_bucket(url, "plant")
    buckets.put(url, "plant", "a", b"1")
    with following("--json", "--bucket", "plant", "--servers", url) as peek:
        assert value(peek) == "1"
        wait_until(lambda: buckets.consumers(url, "plant"), "the command has a consumer")
        nats_server.kill()
        nats_server.start()
        buckets.put(url, "plant", "a", b"2")
        assert value(peek) == "2"
        peek.send_signal(signal.SIGINT)
        status, log = ended(peek)
    assert status == 130
    assert "consumer rebuilt" in log  # the restart was seen
