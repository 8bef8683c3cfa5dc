"""``peek --follow`` and ``follow BUCKET TABLE``: output, refused command lines, exit status."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer, free_port
from tests.integration.cli.command import COMMAND, command
from tests.support.delta import rows
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
def bucket(url: str) -> str:
    name = f"b{next(_serial)}"
    buckets.fill_bucket(url, name, ((f"k{i}", b"%d" % i) for i in range(12)), 5)
    return name


def test_follow_prints_last_rows_then_new_ones(url: str, bucket: str) -> None:
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
def test_follow_start_positions(url: str, bucket: str, words: list[str], values: list[str]) -> None:
    with following("--json", "--bucket", bucket, "--servers", url, *words) as peek:
        assert [value(peek) for _ in values] == values
        buckets.put_many(url, bucket, [("later", b"new")])
        assert value(peek) == "new"
        peek.terminate()
        assert peek.wait(DEADLINE) == 143
    assert not buckets.consumers(url, bucket)


def test_stream_empty(url: str) -> None:
    name = f"S{next(_serial)}"
    create_stream(url, name)
    with following("--json", "--subject", f"{name}.a", "--servers", url) as peek:
        wait_until(
            lambda: buckets.api(url, f"CONSUMER.NAMES.{name}").get("consumers"),
            "the command has a consumer",
        )
        buckets.publish(url, [(f"{name}.b", b"other", None), (f"{name}.a", b"1", None)])
        assert value(peek) == "1"


def test_pipe_closed_by_reader_while_idle(url: str, bucket: str) -> None:
    """As with ``| head -1``: the command must not wait for a row to notice it."""
    with following("-n", "1", "--json", "--bucket", bucket, "--servers", url) as peek:
        assert value(peek) == "11"
        wait_until(lambda: buckets.consumers(url, bucket), "the command waits for rows")
        assert peek.stdout is not None
        peek.stdout.close()
        assert ended(peek) == (0, "")
    assert not buckets.consumers(url, bucket)


def test_bucket_deleted(url: str, bucket: str) -> None:
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


def test_once_ends_with_rows_and_keys(url: str, bucket: str, tmp_path: Path) -> None:
    buckets.delete(url, bucket, "k3")
    words = (bucket, str(tmp_path / "fleet"), "--servers", url, "--once")
    assert command("follow", *words) == ("12 rows read, up to date, 11 keys\n", "")
    assert command("follow", *words) == ("0 rows read, up to date, 11 keys\n", "")
    assert os.listdir(tmp_path) == ["fleet"]


def test_metrics_and_signal(url: str, bucket: str, tmp_path: Path) -> None:
    words = (bucket, "fleet", "--servers", url, "--prometheus", "127.0.0.1:0")
    process = subprocess.Popen(
        [*COMMAND, "follow", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stderr is not None
        match = re.search(r"http://\S+/metrics", process.stderr.readline())
        assert match is not None
        metrics = match[0]

        def text() -> str:
            with urllib.request.urlopen(metrics) as response:
                return response.read().decode()

        label = f'query="follow {bucket}"'
        wait_until(
            lambda: f'nats_stream_source_input_rows_total{{{label},source="0"}} 12.0' in text(),
            "the rows are counted",
        )
        assert f"nats_stream_source_query_active{{{label}}} 1.0" in text()
        lag = f'offsets_behind_latest{{{label},source="0",stream="KV_{bucket}"}} 0.0'
        wait_until(lambda: lag in text(), "the lag is reported")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=DEADLINE)
        assert (process.returncode, errors) == (0, "")
        assert output == "12 rows read, up to date, 12 keys\n"
    finally:
        process.kill()
        process.communicate()
    assert {row["key"] for row in rows(tmp_path / "fleet")} == {f"k{i}" for i in range(12)}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("fleet lake --option keyz=a", "keyz"),
        ("fleet lake --option keys", "'keys' is not NAME=VALUE"),
        ("fleet lake --option outageTimeout=many", "value for --option outageTimeout: 'many'"),
        ("fleet lake --option minPartitions=2", ": --option minPartitions is not one of a"),
        ("fleet lake --option startSequence=0", " or --option updatesOnly=true for later"),
        ("fleet lake --option ignoreDeletes=true", "; use --deletes mark to keep them"),
        ("fleet lake --option bucket=b", "invalid --option bucket: BUCKET sets this option"),
        ("fleet lake --option Servers=a", "invalid --option Servers: --servers sets this option"),
        ("fleet lake --option keys=a --option KEYS=b", "KEYS: an earlier --option keys sets this"),
        ("fleet", "TABLE"),
        ("fleet lake --commit-interval -1", ": --commit-interval is -1.0, expected seconds"),
        ("fleet lake --prometheus x", ": --prometheus is 'x', expected a port"),
        ("fleet lake --deletes mark --history", ": --deletes mark with --history; remove"),
        ("fleet lake%41", "lake%41': delta-rs does not take '%41' in a path literally; rename"),
        ("fleet lake%41", "; rename the directory, or follow with Spark"),
    ],
)
def test_wrong_command_line_has_status_2(
    words: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["follow", *words.split(), "--no-context"]) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.usefixtures("bucket")
def test_misspelt_bucket_has_status_2_and_leaves_no_directory(url: str, tmp_path: Path) -> None:
    table = tmp_path / "lake" / "fleet"
    output, errors = command("follow", "flet", str(table), "--servers", url, status=2)
    assert (output, "flet" in errors) == ("", True)
    assert not table.parent.exists()


def test_undecodable_key_has_status_2_and_names_options_once(
    url: str, bucket: str, tmp_path: Path
) -> None:
    words = (bucket, str(tmp_path / "fleet"), "--servers", url, "--option", "keyCodec=base64")
    _, errors = command("follow", *words, status=2)
    said = "to skip such entries (--option keyCodec or --option onUndecodable)\n"
    assert errors.endswith(said)


def test_absent_server_is_named_at_once(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    _, errors = command("follow", "fleet", str(tmp_path / "fleet"), "--servers", url, status=1)
    assert url.removeprefix("nats://") in errors
    assert "connectTimeout" not in errors


def test_marks_for_table_of_removals_are_refused_at_start(
    url: str, bucket: str, tmp_path: Path
) -> None:
    words = (bucket, str(tmp_path / "fleet"), "--servers", url, "--once")
    command("follow", *words)
    _, errors = command("follow", *words, "--deletes", "mark", status=2)
    assert "with --deletes mark: it has no column 'deleted'" in errors


def test_signal_while_packages_are_imported_has_status_0(tmp_path: Path) -> None:
    code = (
        "import builtins, os, signal, sys\n"
        "load = builtins.__import__\n"
        "def stop(name, *given):\n"
        "    if name.endswith('delta.follower.follower'):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return load(name, *given)\n"
        "builtins.__import__ = stop\n"
        "from nats_stream_source.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ("follow", "fleet", str(tmp_path / "fleet"), "--no-context")
    ended = subprocess.run([sys.executable, "-c", code, *words], timeout=DEADLINE, check=False)
    assert ended.returncode == 0
