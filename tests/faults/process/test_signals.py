"""SIGTERM and SIGINT end `follow` and the demo in order."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from nats_stream_source.embedded import NatsServer, free_port
from tests.integration.cli.command import COMMAND
from tests.integration.delta.table_content import live
from tests.support.nats import buckets
from tests.support.paths import ROOT
from tests.support.scrape import scrape, value
from tests.support.spark.session import program_environment
from tests.support.wait import wait_until

_DEADLINE = 240.0  # seconds; Spark starts in this time on a busy machine


def _start(environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
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

    environment = program_environment(tmp_path / "conf")

    def reached(expected: dict[str, int]) -> bool:
        return (table / "_delta_log").exists() and live(table) == expected

    for number, expected in ((signal.SIGTERM, {"plane.1": 4, "plane.2": 2}), (signal.SIGINT, {})):
        process = _start(environment, *words)
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
        assert "nats-stream-source: " not in reported
        (*_, line) = printed.splitlines()
        assert re.fullmatch(rf"\d+ rows read, up to date, {len(expected)} keys", line)


def test_interrupt_ends_demo(tmp_path: Path) -> None:
    """Ctrl-C ends all processes and removes the temporary files."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--rows", "20000", "--sink", "parquet"],
        env={**program_environment(tmp_path / "conf"), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "written to the bucket" in line:
                break
        # A terminal sends SIGINT to all processes of the group.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert errors == "stopped\n"
    assert not list(tmp_path.glob("nats-stream-source-demo-*"))
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in running if str(tmp_path) in " ".join(words)]
