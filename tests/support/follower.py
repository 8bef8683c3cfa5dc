"""Buckets that a client writes while queries or the command `follow` follow them, and the tables.

:class:`MixedWriter` puts, deletes and purges keys, and writes some with a TTL, after which the
server writes a marker (:data:`MARKERS`). :attr:`MixedWriter.written` has all of these, the server's
markers too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from tests.integration.cli.command import COMMAND, command
from tests.support.cdc.events import Event, history, marked
from tests.support.delta import rows_of
from tests.support.nats import buckets
from tests.support.paths import ROOT
from tests.support.wait import WriterThread, wait_until

if TYPE_CHECKING:
    pass

VALUES = (b"x", b"y")
_DEADLINE = 300.0  # seconds

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Query:
    """A query: the options of its source, the arguments of its merge."""

    options: dict[str, str]
    arguments: dict[str, Any] = field(default_factory=dict)

    def reads(self, bucket: str) -> bool:
        if "bucketPattern" in self.options:
            return re.fullmatch(self.options["bucketPattern"], bucket) is not None
        return bucket in self.options.get("bucket", self.options.get("buckets", "")).split(",")

    @property
    def has_history(self) -> bool:
        return self.arguments.get("stored_as_scd_type") == 2

    def expected(self, written: dict[str, list[Event]]) -> list[Row]:
        """The rows of the table after these writes to each bucket."""
        return sorted(
            (bucket, *row)
            for bucket, events in written.items()
            if self.reads(bucket)
            for row in self._of(events)
        )

    def _of(self, events: list[Event]) -> Iterator[Row]:
        if self.has_history:
            for key, start, end, seq, value, _ in history(events):
                yield key, start, end or 0, seq, value
            return
        for key, seq, value, _, deleted in marked(events):
            if not deleted or self.arguments.get("deletes") == "mark":
                yield key, seq, value or 0, deleted

    def stored(self, table: Path | DeltaTable) -> list[Row]:
        """The rows of the table, as `expected` has them."""
        opened = table if isinstance(table, DeltaTable) else DeltaTable(table)
        return sorted(self._row(row) for row in rows_of(opened))

    def _row(self, row: dict[str, Any]) -> Row:
        value = VALUES.index(row["value"]) if row["value"] else 0
        if self.has_history:
            start, end = row["__START_AT"], row["__END_AT"] or {"revision": 0}
            versions = (start["revision"], end["revision"])
            return (row["bucket"], row["key"], *versions, row["revision"], value)
        return (row["bucket"], row["key"], row["revision"], value, bool(row.get("deleted")))


def _message(bucket: str, event: Event, headers: dict[str, str] | None) -> buckets.Message:
    return f"$KV.{bucket}.{event.key}", b"" if event.a is None else VALUES[event.a], headers


class Writer(WriterThread):
    """Writes to buckets and keeps what was acknowledged."""

    def __init__(self, url: str, names: Sequence[str], rng: random.Random) -> None:
        super().__init__(_DEADLINE)
        self._url, self._rng = url, rng
        self.written: dict[str, list[Event]] = {bucket: [] for bucket in names}

    @property
    def writes(self) -> int:
        return sum(map(len, self.written.values()))

    def write_until_stopped(self) -> None:
        while not self.over.wait(0.05):
            self._write()

    def _write(self) -> None:
        sent = [
            (bucket, self._event(len(self.written[bucket]) + number))
            for bucket in self.written
            for number in range(self._rng.randint(0, 8))
        ]
        messages = [
            _message(bucket, event, buckets.DEL if event.op == "D" else None)
            for bucket, event in sent
        ]
        for (bucket, event), seq in zip(sent, buckets.publish(self._url, messages), strict=True):
            self.written[bucket].append(event._replace(seq=seq))

    def _event(self, number: int) -> Event:
        # Most keys are written once: a later entry would hide a lost one.
        back = self._rng.randint(1, 50) if self._rng.random() < 0.3 else 0
        key = f"key.{max(number - back, 0)}"
        if back and self._rng.random() < 0.5:
            return Event(key, 0, "D", None, None)
        return Event(key, 0, "U", self._rng.randrange(len(VALUES)), None)


MARKERS: dict[str, Any] = {"allow_msg_ttl": True, "subject_delete_marker_ttl": 15 * 10**9}
"""The configuration of a bucket whose keys with a TTL leave a marker.

With more than one revision of a key, the server makes no TTL shorter than that of the markers.
"""

QUERY = Query({"bucket": "b"})
TABLES = {
    "removed": ((), QUERY),
    "marked": (("--deletes", "mark"), Query({"bucket": "b"}, {"deletes": "mark"})),
    "history": (("--history",), Query({"bucket": "b"}, {"stored_as_scd_type": 2})),
}
"""The kinds of tables of the bucket ``b``: words of the command, and what the table has."""

DEADLINE = 60.0  # seconds
_PAUSE = 0.02  # seconds between two groups of writes


class FollowProcess:
    """A process of the command.

    Attributes:
        process: the process.
        table: its table, if it is on this machine.
    """

    def __init__(self, process: subprocess.Popen[bytes], table: Path, errors: Path) -> None:
        self.process, self.table, self._errors = process, table, errors

    @property
    def errors(self) -> str:
        """The process's standard error up to now."""
        return self._errors.read_text()

    def alive(self) -> None:
        """Fail if the process has ended by itself."""
        assert self.process.poll() is None, self.errors

    def wait(
        self, condition: Callable[[], object], what: str, seen: Callable[[], object] | None = None
    ) -> None:
        """Wait for a condition while the process runs."""
        seen = seen or (lambda: self.errors)
        wait_until(condition, what, DEADLINE, alive=self.alive, seen=seen)

    def wait_for_commits(self, number: int = 1) -> None:
        """Wait until the process has committed that many versions."""
        before = version(self.table)
        self.wait(lambda: version(self.table) >= before + number, f"{number} versions")

    def wait_for_rows(self, writer: MixedWriter, query: Query) -> None:
        """Wait until the table has the rows of what was written."""
        table = self.table

        def equal() -> bool:
            return version(table) >= 0 and writer.differences(query, table) == []

        self.wait(equal, "equal rows", lambda: (writer.differences(query, table), self.errors))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the process, so that it sees only what is there afterwards."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        yield
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Stop the process by a signal; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)


@contextlib.contextmanager
def following(
    url: str, bucket: str, table: Path | str, *words: str, **environment: str
) -> Iterator[FollowProcess]:
    """Run the command; at the end the process is killed."""
    with (
        tempfile.TemporaryDirectory() as directory,
        (errors := Path(directory) / "errors").open("w") as output,
        subprocess.Popen(
            [*COMMAND, "follow", bucket, str(table), "--servers", url, *words],
            stdout=subprocess.DEVNULL,
            stderr=output,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield FollowProcess(process, Path(table), errors)
        finally:
            process.kill()


def follow_once(
    url: str, bucket: str, table: Path | str, *words: str, status: int = 0, **environment: str
) -> str:
    """Run the command to its end with ``--once``; its standard error."""
    given = ["follow", bucket, str(table), "--servers", url, "--once", *words]
    return command(*given, status=status, **environment)[1]


# -- the log of a table ---------------------------------------------------------------------------


def version(table: Path) -> int:
    """The newest version of a table; -1 before the first one."""
    entries = (table / "_delta_log").glob("0*.json")
    return max((int(one.stem) for one in entries), default=-1)


@dataclass(frozen=True, order=True)
class Stored:
    """A position in the log of a table, with the version that has it."""

    version: int
    created: int
    sequence: int
    time: int


def positions(table: Path) -> list[Stored]:
    """The positions in the entries that the log of a table has."""
    found = []
    for entry in sorted((table / "_delta_log").glob("0*.json")):
        actions = map(json.loads, entry.read_text().splitlines())
        values = {
            one["txn"]["appId"].rpartition("/")[2]: one["txn"]["version"]
            for one in actions
            if "txn" in one
        }
        if values:
            found.append(Stored(int(entry.stem), **values))
    return found


def operation(table: Path, number: int) -> str:
    """The operation of a version."""
    entry = table / "_delta_log" / f"{number:020d}.json"
    for line in entry.read_text().splitlines():
        if "commitInfo" in (action := json.loads(line)):
            return str(action["commitInfo"]["operation"])
    raise AssertionError(f"{entry} has no commitInfo")


def unnamed_files(table: Path) -> set[str]:
    """Data files and vectors that no entry of the log names: their commit did not happen."""
    log = "".join(entry.read_text() for entry in (table / "_delta_log").glob("0*.json"))
    files = {one.name for one in table.glob("*.parquet")}
    return {name for name in files if name not in log}


# -- the writer -----------------------------------------------------------------------------------


class MixedWriter(WriterThread):
    """Puts, deletes and purges keys of a bucket, and writes keys with a TTL.

    Args:
        expiring: whether keys get a TTL, in a bucket with :data:`MARKERS`.
    """

    def __init__(
        self, url: str, bucket: str, rng: random.Random, *, expiring: bool = False
    ) -> None:
        super().__init__(DEADLINE)
        self._url, self.bucket, self._rng, self._expires = url, bucket, rng, expiring
        self.written: list[Event] = []
        self._expiring: dict[str, int] = {}  # sequences of keys with a TTL, by key
        self._looked = time.monotonic()
        self._put: list[str] = []  # keys that are purged next

    def __exit__(self, *exc: object) -> None:
        # A thread that goes on after a failed test keeps its process alive.
        self.over.set()
        self.join(DEADLINE)

    def write_until_stopped(self) -> None:
        while not self.over.wait(_PAUSE):
            self.write(self._rng.randint(1, 8))
            if time.monotonic() - self._looked > 1:
                self._found_markers()

    def write(self, number: int) -> None:
        """Write that many entries."""
        made = [self._made(len(self.written) + one) for one in range(number)]
        sequences = buckets.publish(
            self._url,
            [_message(self.bucket, event, headers) for event, headers in made],
        )
        for (event, _), seq in zip(made, sequences, strict=True):
            self.written.append(event._replace(seq=seq))
            if event.key.startswith("ttl."):
                self._expiring[event.key] = seq

    def put(self, key: str) -> None:
        """Put a value."""
        seq = buckets.put(self._url, self.bucket, key, VALUES[0])
        self.written.append(Event(key, seq, "U", 0, None))

    def _made(self, number: int) -> tuple[Event, dict[str, str] | None]:
        rng = self._rng
        kind = rng.random()
        put = Event(f"key.{number}", 0, "U", rng.randrange(len(VALUES)), None)
        if kind < 0.1 and self._expires:
            return put._replace(key=f"ttl.{number}"), {"Nats-TTL": "1s"}
        if kind < 0.3:
            # A key is put once and purged once: a purge removes what a follower has not read.
            if self._put and rng.random() < 0.5:
                return Event(self._put.pop(0), 0, "D", None, None), buckets.PURGE
            self._put.append(f"purged.{number}")
            return put._replace(key=f"purged.{number}"), None
        if kind < 0.6:
            name = f"key.{max(number - rng.randint(1, 50), 0)}"
            if rng.random() < 0.5:
                return Event(name, 0, "D", None, None), buckets.DEL
            return put._replace(key=name), None
        return put, None

    def stop(self) -> None:
        """Stop, and wait for the markers of the keys with a TTL."""
        super().stop()
        wait_until(self._found_markers, "the markers of the keys with a TTL", DEADLINE)

    def _found_markers(self) -> bool:
        """Add the markers that the server has written; whether no key waits for one."""
        self._looked = time.monotonic()
        sequences = buckets.with_client(self._url, self._last_sequences)
        for key, seq in sequences.items():
            if seq > self._expiring[key]:
                self.written.append(Event(key, seq, "D", None, None))
                del self._expiring[key]
        return not self._expiring

    async def _last_sequences(self, client: Client) -> dict[str, int]:
        jetstream, found = client.jetstream(), {}
        for key in self._expiring:
            subject = f"$KV.{self.bucket}.{key}"
            with contextlib.suppress(NotFoundError):
                message = await jetstream.get_last_msg(f"KV_{self.bucket}", subject)
                found[key] = message.seq or 0
        return found

    def differences(self, query: Query, table: Path | DeltaTable) -> list[Row]:
        """The rows that a table lacks, or has beside what was written; the query can read a mirror.

        A value that was purged or has expired before a follower read it has no row in a history.
        """
        expected = set(query.expected({query.options["bucket"]: self.written}))
        stored = query.stored(table)
        assert len(set(stored)) == len(stored)
        gone = ("ttl.", "purged.") if query.has_history else ()
        missing = {row for row in expected.difference(stored) if not row[1].startswith(gone)}
        return sorted(missing | set(stored).difference(expected))


def written_bucket(
    url: str,
    number: int,
    query: Query = QUERY,
    *,
    rng: random.Random | None = None,
    expiring: bool = False,
) -> MixedWriter:
    """Create the bucket ``b``, with revisions for a history, and write entries; their writer."""
    config = MARKERS if expiring else {}
    buckets.create_bucket(url, "b", 64 if query.has_history else 1, **config)
    writer = MixedWriter(url, "b", rng or random.Random(1), expiring=expiring)
    writer.write(number)
    return writer
