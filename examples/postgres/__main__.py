"""Everything on this machine: Postgres, Debezium, nats-server, Spark; then compare the tables.

Run: python -m examples.postgres [--target DIRECTORY], the directory of the engine's jars
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.postgres.customers import CREATE, delta_rows, postgres_rows
from examples.postgres.engine import TARGET, Engine, build
from examples.postgres.local_postgres import LocalPostgres
from nats_stream_source.embedded import NatsServer

_SECONDS = 180.0

BEFORE = """
INSERT INTO customers (id, name, email, balance) VALUES
    (1, 'Ann', 'ann@example.org', 10), (2, 'Bob', NULL, 20), (3, 'Cid', 'cid@example.org', NULL);
"""

CHANGES = {
    "insert, with a value of 3 kB": (
        "INSERT INTO customers VALUES (4, 'Dan', NULL, 1, now(), long_text())"
    ),
    "update, which leaves that value": "UPDATE customers SET balance = 2 WHERE id = 4",
    "delete": "DELETE FROM customers WHERE id = 3",
    "change a primary key": "UPDATE customers SET id = 20 WHERE id = 2",
    "roll back": "BEGIN; DELETE FROM customers; ROLLBACK",
    "copy": "COPY customers (id, name) FROM STDIN;\n30\tEve\n31\tFay\n32\tGus\n\\.",
    "add a column": "ALTER TABLE customers ADD COLUMN phone text",
    "write the column": "UPDATE customers SET phone = '+1-555' WHERE id IN (1, 31)",
}


def main() -> None:
    """Run the example, and exit with an error if the tables differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, default=TARGET)
    print("building the engine (Maven)")
    target = build(parser.parse_args().target)
    scratch = Path(tempfile.mkdtemp(prefix="postgres-example-"))
    with LocalPostgres() as postgres, NatsServer() as server:
        postgres.psql(CREATE + BEFORE)
        program = Engine(target, postgres, server.url, scratch, "public.customers")
        engine = program.start()
        follow: subprocess.Popen[bytes] | None = None
        try:
            program.wait_for_stream(engine)
            module = "examples.postgres.follow_table"
            follow = subprocess.Popen([sys.executable, "-m", module, server.url, str(scratch)])
            _wait_for_equal(postgres, scratch, [engine, follow], "the snapshot")
            for what, sql in CHANGES.items():
                print(what)
                postgres.psql(sql)
            _wait_for_equal(postgres, scratch, [engine, follow], "the changes")
        finally:
            for process in (engine, follow):
                if process is not None:
                    process.terminate()
                    process.wait()
    for row in delta_rows(scratch / "table"):
        print({**row, "notes": row["notes"] and f"{len(row['notes'])} characters"})
    print(f"the tables are equal: {scratch / 'table'}")


def _wait_for_equal(
    postgres: LocalPostgres, scratch: Path, processes: list[subprocess.Popen[bytes]], what: str
) -> None:
    print(f"waiting for {what}")
    end = time.monotonic() + _SECONDS
    while delta_rows(scratch / "table") != postgres_rows(postgres):
        if any(process.poll() is not None for process in processes):
            sys.exit(f"a process ended, see {scratch}/engine.log")
        if time.monotonic() > end:
            sys.exit(f"the tables differ after {_SECONDS:g} s")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
