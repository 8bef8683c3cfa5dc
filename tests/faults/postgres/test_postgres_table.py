"""A Delta table equals a Postgres table after writers, and kills of each process between them.

Four writers insert, update, delete, change primary keys, COPY and roll back, in transactions that
overlap; a column is added. The processes of ``examples/postgres`` are killed (-9) in turn:
Debezium's engine, the NATS server, the Spark driver. A supervisor starts what ended.

``POSTGRES_KILLS`` sets the number of kills, ``POSTGRES_SEED`` the statements and the times.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.postgres.customers import CREATE, delta_rows, postgres_rows
from examples.postgres.engine import Engine, build
from examples.postgres.local_postgres import LocalPostgres, MissingProgramError
from nats_stream_source.embedded import NatsServer
from tests.support.nats.stored import stored_entries
from tests.support.nats.streams import stream_state
from tests.support.paths import ROOT
from tests.support.spark.processes import kill_group
from tests.support.wait import WriterThread, wait_until

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("POSTGRES_KILLS", "6"))
SEED = int(os.environ.get("POSTGRES_SEED", "1"))
WRITERS = 4
KEYS = 200
_DEADLINE = 600.0  # seconds

# The largest copies are larger than a batch of the engine, 2,048 events.
_COPIED = [1] * 20 + [10] * 10 + [2500]
_new_ids = itertools.count(KEYS + 1)


@pytest.fixture(scope="module")
def engine_jars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the engine's classes and jars."""
    try:
        return build(tmp_path_factory.mktemp("engine"))
    except MissingProgramError as error:
        pytest.skip(str(error))


@pytest.fixture
def postgres() -> Iterator[LocalPostgres]:
    try:
        server = LocalPostgres()
    except MissingProgramError as error:
        pytest.skip(str(error))
    with server:
        yield server


class Supervised:
    """A program that is started again whenever it has ended."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._process = start()
        self.restarts = 0

    def keep_running(self) -> None:
        if self._process.poll() is not None:
            self._process = self._start()
            self.restarts += 1

    def kill(self) -> None:
        """End the process and the others of its group as a crash of its machine does."""
        kill_group(self._process)


class Writer(WriterThread):
    """Runs random transactions until it is stopped."""

    def __init__(self, postgres: LocalPostgres, seed: int) -> None:
        super().__init__(_DEADLINE)
        self._postgres, self._rng = postgres, random.Random(seed)
        self.done: Counter[str] = Counter()

    def write_until_stopped(self) -> None:
        while not self.over.wait(self._rng.uniform(0, 0.3)):
            self._transaction()

    def _transaction(self) -> None:
        kinds = [self._rng.choice(list(_STATEMENTS)) for _ in range(self._rng.randint(1, 4))]
        # Overlapping transactions: Postgres logs a change when it is made, and Debezium sends it
        # when its transaction ends.
        pause = f"SELECT pg_sleep({self._rng.uniform(0, 0.1):.3f});"
        statements = "\n".join(_STATEMENTS[kind](self._rng) + pause for kind in kinds)
        end = "ROLLBACK" if self._rng.random() < 0.1 else "COMMIT"
        try:
            self._postgres.psql(f"BEGIN;\n{statements}\n{end};")
        except RuntimeError as error:
            if "deadlock" not in str(error):
                raise
            end = "deadlock"
        self.done.update(kinds if end == "COMMIT" else [end])


def insert(rng: random.Random) -> str:
    key, notes = rng.randint(1, KEYS), rng.choice(["NULL", "'short'", "long_text()"])
    return (
        f"INSERT INTO customers (id, name, balance, notes) VALUES ({key}, 'new', {key}.5, {notes}) "
        f"ON CONFLICT (id) DO UPDATE SET name = 'again', updated_at = clock_timestamp();"
    )


def update(rng: random.Random) -> str:
    return (
        f"UPDATE customers SET balance = {rng.randint(0, 10**6)}.25, email = 'e{rng.random()}', "
        f"updated_at = clock_timestamp() WHERE id % 10 = {rng.randint(0, 9)} AND id <= {KEYS};"
    )


def delete(rng: random.Random) -> str:
    return f"DELETE FROM customers WHERE id = {rng.randint(1, KEYS)};"


def change_key(rng: random.Random) -> str:
    # Debezium sends the new row without values that Postgres does not log, so `notes` is written.
    return (
        f"UPDATE customers SET id = {next(_new_ids)}, notes = long_text() "
        f"WHERE id = {rng.randint(1, KEYS)};"
    )


def copy(rng: random.Random) -> str:
    rows = "".join(f"{next(_new_ids)}\tcopied\n" for _ in range(rng.choice(_COPIED)))
    return f"COPY customers (id, name) FROM STDIN;\n{rows}\\.\n"


_STATEMENTS = {
    "insert": insert,
    "update": update,
    "delete": delete,
    "change key": change_key,
    "copy": copy,
}


def test_delta_table_equals_postgres_table_after_kills(
    engine_jars: Path, postgres: LocalPostgres, nats_server: NatsServer, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    table = tmp_path / "table"
    postgres.psql(CREATE)
    writers = [Writer(postgres, SEED * WRITERS + number) for number in range(WRITERS)]
    for writer in writers:
        writer.start()  # before the snapshot, so that it begins in the middle of transactions
    program = Engine(engine_jars, postgres, nats_server.url, tmp_path, "public.customers")
    engine = Supervised(program.start)
    driver = Supervised(lambda: _start_driver(nats_server.url, tmp_path))
    supervised = [engine, driver]

    def keep_running() -> None:
        for one in supervised:
            one.keep_running()

    def wait_for(condition: Callable[[], object], what: str) -> None:
        wait_until(
            condition,
            what,
            _DEADLINE,
            alive=keep_running,
            seen=lambda: program.log.read_text(errors="replace")[-2000:],
        )

    try:
        kills: list[Callable[[], None]] = [engine.kill, nats_server.kill, driver.kill]
        for number in range(KILLS):
            version = _version(table)
            wait_for(lambda version=version: _version(table) > version, "a commit of the table")
            if number == KILLS // 2:
                postgres.psql(
                    f"BEGIN; ALTER TABLE customers ADD COLUMN phone text; "
                    f"UPDATE customers SET phone = 'p' || id WHERE id <= {KEYS}; COMMIT"
                )
            end = time.monotonic() + rng.uniform(0, 3)
            wait_for(lambda end=end: time.monotonic() > end, "the time of the kill")
            kills[number % len(kills)]()
            if number % len(kills) == 1:
                nats_server.start()
        for writer in writers:
            writer.stop()
        expected = postgres_rows(postgres)
        wait_for(lambda: delta_rows(table) == expected, "equal tables")
        _check_work(sum((writer.done for writer in writers), Counter()))
        assert engine.restarts >= KILLS // 3
        assert driver.restarts >= KILLS // 3
        assert not any(path.stat().st_size for path in tmp_path.glob("corrupt/*.json"))
    finally:
        for one in supervised:
            one.kill()


def test_rows_deleted_between_snapshots_are_deleted(
    engine_jars: Path, postgres: LocalPostgres, nats_server: NatsServer, tmp_path: Path
) -> None:
    rows = 50_000
    postgres.psql(CREATE)
    postgres.psql(f"INSERT INTO customers SELECT i, 'x' FROM generate_series(1, {rows}) i")
    program = Engine(engine_jars, postgres, nats_server.url, tmp_path, "public.customers")
    engine = Supervised(program.start)
    try:
        wait_until(lambda: _published(nats_server), "rows of the snapshot", _DEADLINE)
        engine.kill()
        published = _published(nats_server)
        assert 0 < published < rows, "the snapshot was not interrupted"
        postgres.psql("DELETE FROM customers WHERE id <= 100 OR id > 1000")
        postgres.psql("UPDATE customers SET name = 'y' WHERE id = 500")
        engine.keep_running()
        wait_until(
            lambda: _published(nats_server) >= 2 * published + 900, "the second one", _DEADLINE
        )
        postgres.psql("UPDATE customers SET name = 'z' WHERE id = 501")
        expected = {row["id"]: row["name"] for row in postgres_rows(postgres)}
        wait_until(lambda: _rows_of_stream(nats_server) == expected, "equal rows", _DEADLINE)
    finally:
        engine.kill()


def _published(server: NatsServer) -> int:
    with contextlib.suppress(RuntimeError):  # the stream does not exist yet
        return int(stream_state(server.url, "SHOP")["messages"])
    return 0


def _rows_of_stream(server: NatsServer) -> dict[int, str]:
    """The names by id that the events give in their order."""
    events = []
    for entry in stored_entries(server.url, "SHOP"):
        event = json.loads(entry.value or b"")
        if "op" in event:  # a slow engine also sends heartbeats
            events.append((0 if event["op"] == "r" else event["source"]["lsn"], entry.seq, event))
    rows: dict[int, str] = {}
    for _, _, event in sorted(events, key=lambda one: one[:2]):
        if event["op"] == "d":
            rows.pop(event["before"]["id"], None)
        else:
            rows[event["after"]["id"]] = event["after"]["name"]
    return rows


def _start_driver(url: str, directory: Path) -> subprocess.Popen[bytes]:
    module = "examples.postgres.follow_table"
    return subprocess.Popen(
        [sys.executable, "-m", module, url, str(directory)], cwd=ROOT, start_new_session=True
    )


def _version(table: Path) -> int:
    return max((int(path.stem) for path in table.glob("_delta_log/0*[0-9].json")), default=-1)


def _check_work(done: Counter[str]) -> None:
    """Each kind of statement was committed, and transactions were rolled back."""
    print(dict(done))
    assert set(done) >= {*_STATEMENTS, "ROLLBACK"}
