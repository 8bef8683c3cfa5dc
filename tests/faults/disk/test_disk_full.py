"""A disk that is full, or a directory that is not writable: of a server, a checkpoint, a table.

The disk is a small one of its own (tmpfs), where this process may mount one. All that a server
acknowledged is read, and writes resume with more space. A checkpoint that cannot be written ends
the query with the error; it resumes, with either logs. A directory is not writable without the
permission, which for root is the immutable attribute.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.delta import follow, merge
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConfigurationError, TableError
from tests.integration.delta.merge_model import SCHEMA, live, put as entry_of_put, stored, version
from tests.support.nats.buckets import create_bucket, put
from tests.support.nats.store_files import small_disk
from tests.support.recorded_stream import RecordedStream
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults


FULL = {"no space left on device": "1GB", "resource limits exceeded": "12MB"}
"""What the server's log says then, by what it may store."""


@pytest.mark.parametrize("said", FULL)
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_full(tmp_path: Path, kind: str, said: str) -> None:
    disk = tmp_path / "disk"
    config = tmp_path / "server.conf"
    config.write_text(f"jetstream {{ max_file_store: {FULL[said]} }}\n")
    with small_disk(disk, 24) as resize, NatsServer(store=disk, config=config) as server:
        recorded = RecordedStream(kind, server.url).create()
        with recorded.query() as query:
            with recorded.writing([server.url], size=10_000) as writing:
                # A write that fails may have come too late; what the server says is no mistake.
                wait_until(
                    lambda: writing.failed > 0 and said in server.log,
                    "a write is refused",
                    deadline=300,
                )
                # While it is full, and while others still try to write.
                query.until(recorded.last)
            query.until(recorded.last)
            assert len(recorded.acknowledged) > 500

            config.write_text("jetstream { max_file_store: 1GB }\n")
            resize(64)
            server.restart()
            recorded.write(100, size=10_000)
            query.until(recorded.last)
        recorded.check(query.rows)
        assert recorded.consumers() == []


def test_stream_full_refuses_writes(nats_server: NatsServer) -> None:
    """``discard: new``: the writer is refused, readers notice nothing."""
    recorded = RecordedStream("kv", nats_server.url).create(max_bytes=1_000_000)
    with recorded.writing([nats_server.url], size=10_000) as writing:
        wait_until(
            lambda: writing.failed > 0 and full(recorded), "a write is refused", deadline=300
        )
    with recorded.query() as query:
        query.until(recorded.last)
    recorded.check(query.rows)


def full(recorded: RecordedStream) -> bool:
    return int(recorded.state()["bytes"]) > 1_000_000 - 10_000


_DEADLINE = 180  # seconds; only a failing test takes that long


@dataclass(frozen=True)
class Followed:
    spark: SparkSession
    url: str
    table: Path
    checkpoint: Path
    async_progress: bool

    @contextlib.contextmanager
    def running(self) -> Iterator[StreamingQuery]:
        """The query; it is stopped at the end, before its disk is removed."""
        source = self.spark.readStream.format("nats_kv").options(servers=self.url, bucket="fleet")
        query = begin(
            lambda: follow(
                source.load(),
                str(self.table),
                checkpoint=str(self.checkpoint),
                async_progress=self.async_progress,
            )
        )
        try:
            yield query
        finally:
            query.stop()

    def put(self, value: bytes) -> None:
        put(self.url, "fleet", "a", value)

    def wait_for(self, query: StreamingQuery, revision: int) -> None:
        def alive() -> None:
            assert query.isActive, query.exception()

        first = self.table / "_delta_log" / f"{0:020}.json"
        wait_until(
            lambda: first.exists() and live(self.table) == {"a": revision},
            f"revision {revision} in the table",
            _DEADLINE,
            alive=alive,
        )

    def fail_and_resume(self, fault: AbstractContextManager[None], error: str) -> None:
        with self.running() as query:
            self.put(b"x")
            self.wait_for(query, 1)
            with fault:
                self.put(b"y")
                with pytest.raises(StreamingQueryException, match=error):
                    query.awaitTermination(_DEADLINE)
        self.put(b"z")
        with self.running() as query:
            self.wait_for(query, 3)


@pytest.fixture(params=[True, False], ids=["asynchronous", "synchronous"])
def followed(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Followed:
    create_bucket(nats_server.url, "fleet", 5)
    table, checkpoint = tmp_path / "table", tmp_path / "disk" / "checkpoint"
    return Followed(spark, nats_server.url, table, checkpoint, request.param)


def test_checkpoint_disk_full(followed: Followed) -> None:
    disk = followed.checkpoint.parent
    with small_disk(disk, 1) as resize:
        followed.fail_and_resume(filled(disk, resize), "No space left")


@pytest.mark.parametrize("log", ["offsets", "commits"])
def test_checkpoint_log_not_writable(followed: Followed, log: str) -> None:
    followed.fail_and_resume(unwritable(followed.checkpoint / log), "not permitted|denied")


def test_commit_without_offsets_not_removable(followed: Followed) -> None:
    commits = followed.checkpoint / "commits"
    with followed.running() as query:
        followed.put(b"x")
        followed.wait_for(query, 1)
    (commits / "1000").touch()
    with (
        unwritable(commits),
        pytest.raises(ConfigurationError, match=r"commits/1000 .* could not be removed"),
        followed.running(),
    ):
        pass


@contextlib.contextmanager
def filled(disk: Path, resize: Callable[[int], None]) -> Iterator[None]:
    with pytest.raises(OSError, match=r".") as full:
        (disk / "filler").write_bytes(b"x" * (2 << 20))
    assert full.value.errno == errno.ENOSPC
    yield
    resize(16)


@contextlib.contextmanager
def unwritable(directory: Path) -> Iterator[None]:
    if os.geteuid():
        directory.chmod(0o500)
    else:  # for root the permission has no effect
        _change_attribute("+i", directory)
    try:
        with pytest.raises(PermissionError):
            (directory / "file").touch()
        yield
    finally:
        directory.chmod(0o700) if os.geteuid() else _change_attribute("-i", directory)


def _change_attribute(change: str, directory: Path) -> None:
    changed = subprocess.run(["chattr", change, str(directory)], capture_output=True, text=True)
    if changed.returncode:
        pytest.skip(f"no attribute can be changed here: {changed.stderr.strip()}")


# -- a merge by the driver: the table stays, and a later merge works -------------------------------


@pytest.mark.delta
def test_table_disk_full(spark: SparkSession, tmp_path: Path) -> None:
    def batch(revision: int, size: int) -> None:
        value = bytes(index * 7 % 251 for index in range(size))
        entry = entry_of_put("a", revision, value=value * 64)
        merge(spark.createDataFrame([entry.row()], SCHEMA), str(table), engine="driver")

    disk = tmp_path / "disk"
    with small_disk(disk, 2) as resize:
        table = disk / "table"
        batch(1, 100)
        before, rows = version(table), stored(table)
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(b"x" * (4 << 20))
        with pytest.raises(TableError, match=r"could not merge .*[Nn]o space left.*unchanged"):
            batch(2, 100)
        assert (version(table), stored(table)) == (before, rows)
        resize(16)
        batch(2, 100)
        assert [row["revision"] for row in stored(table)] == [2]
