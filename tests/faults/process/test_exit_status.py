"""How programs that merge end: their exit status, and `follow` and the demo on SIGTERM and SIGINT.

A scheduler reports any status other than 0 as a failed job. A thread that outlives the main program
can end the process by ``abort`` (status 134): see docs/internals/measurements.md, Delta.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from nats_stream_source.embedded import NatsServer, free_port
from tests.integration.cli.command import COMMAND
from tests.integration.delta.merge_model import live
from tests.support.nats import buckets
from tests.support.nats.buckets import create_bucket, put
from tests.support.paths import ROOT
from tests.support.prometheus import scrape, value
from tests.support.spark.session import program_environment
from tests.support.wait import wait_until

_START = """
import json, signal, sys
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession
from nats_stream_source.delta import configure, follow, merge

def read():
    rows = pa.table(QueryBuilder().register("t", DeltaTable(table)).execute("SELECT * FROM t"))
    assert len(rows) == 2

def merge_twice():
    merge(batch.where("key = 'a'"), table, **engine)
    merge(batch, table, **engine)

def start():
    changes = spark.readStream.format("nats_kv").options(**source).load()
    query = follow(changes, table, checkpoint=table + "-checkpoint", **engine)
    query.processAllAvailable()
    return query

servers, table, engine = sys.argv[1:]
engine = json.loads(engine)
source = {"servers": servers, "bucket": "fleet"}
in_spark = engine["engine"] == "spark"
spark = configure(SparkSession.builder, delta=in_spark, small_machine=in_spark).getOrCreate()
batch = spark.read.format("nats_kv").options(**source).load()
"""
_WRITE = (
    'batch.select("key", "value").write.format("nats_kv").mode("append")'
    '.options(servers=servers, bucket="copy").save()'
)
_WAIT = 'print("ready", flush=True)\nsignal.pause()'

_COMMAND = """
import sys
from nats_stream_source.cli.main import main
servers, table, _ = sys.argv[1:]
sys.exit(main(["follow", "fleet", table, "--servers", servers, "--once"]))
"""

# What the program does, and how it ends.
CASES: dict[str, tuple[str, int]] = {
    "merge": (f"{_START}merge_twice()", 0),
    "merge and read": (f"{_START}merge_twice()\nread()", 0),
    "session stopped": (f"{_START}merge_twice()\nread()\nspark.stop()", 0),
    "query stopped": (f"{_START}start().stop()\nread()", 0),
    "query, writer": (f"{_START}query = start()\nread()\n{_WRITE}", 0),
    "writer": (f"{_START}{_WRITE}", 0),
    "command": (_COMMAND, 0),
    "exception": (f"{_START}query = start()\nread()\nraise RuntimeError", 1),
    "SIGTERM": (f"{_START}query = start()\nread()\n{_WAIT}", -signal.SIGTERM),
    "SIGINT": (f"{_START}query = start()\nread()\n{_WAIT}", -signal.SIGINT),
}
_ENGINES = (
    {"engine": "driver"},
    {"engine": "driver", "deletion_vectors": False},
    {"engine": "spark"},
)
_USUAL = ("query, writer", "SIGTERM")  # in `make test-all`, once each
_TIMES = 20
_DEADLINE = 600.0  # seconds; Spark starts in this time on a busy machine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with NatsServer() as server:
        for bucket in ("fleet", "copy"):
            create_bucket(server.url, bucket)
        for key in "ab":
            put(server.url, "fleet", key, b"x")
        yield server.url


def ended(
    url: str, directory: Path, case: str, engine: Mapping[str, str | bool]
) -> tuple[int, str]:
    """Run a case in a process of its own; its exit status and standard error."""
    directory.mkdir()
    text, status = CASES[case]
    process = subprocess.Popen(
        [sys.executable, "-c", text, url, str(directory / "table"), json.dumps(engine)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        # A test run in the background of a shell ignores SIGINT, and so would the program.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        env={**program_environment(directory / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    try:
        if status < 0:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "ready\n", line
            process.send_signal(-status)
        _, errors = process.communicate(timeout=_DEADLINE)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@pytest.mark.parametrize("case", _USUAL)
def test_exit_status_of_program(url: str, tmp_path: Path, case: str) -> None:
    status, errors = ended(url, tmp_path / "one", case, _ENGINES[0])
    assert status == CASES[case][1], errors[-3000:]


@pytest.mark.faults
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.xdist_group(f"exit status {number % 2}"))
        for number, case in enumerate(CASES)
    ],
)
def test_exit_status_is_stable(url: str, tmp_path: Path, case: str) -> None:
    for number, engine in zip(range(_TIMES), itertools.cycle(_ENGINES)):
        status, errors = ended(url, tmp_path / str(number), case, engine)
        assert status == CASES[case][1], f"run {number}, {engine}: {errors[-3000:]}"


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
