"""Write golden checkpoints of this version: ``python -m tests.compat.golden.write [DIRECTORY]``.

To be done once for each released version, and never again for the same one: what is there shows
what that version really wrote. The directories of :data:`STORIES` are made in ``DIRECTORY``, or
else beside this file; those that are there already stay as they are.

What happens to the queries whose checkpoints are kept: ``rounds``: they are stopped after two
rounds of changes, some before the second was committed. ``epochs``: bucket and stream were deleted
and re-created, and the query accepted that. ``first``: not even the first micro-batch was
committed. ``several``: as ``rounds``, with two buckets in each query.

The data: a bucket and a stream, what is written to them, and queries (:class:`Case`).
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession

from nats_stream_source.embedded import NatsServer
from tests.compat.golden.write_delta_tables import as_text
from tests.support.nats import buckets
from tests.support.nats.stored import stored_entries
from tests.support.nats.streams import create_stream, stream_state
from tests.support.spark.session import delta_session
from tests.support.spark.streaming_query import run_to_the_end

BUCKET, STREAM = "plant", "ORDERS"
OTHER = "yard"
"""A second bucket, whose keys are not those of the first one."""


@dataclass(frozen=True)
class Case:
    """One query and its checkpoint.

    Attributes:
        options: of the source, beside ``servers``.
        uncommitted: whether its last micro-batch was written to the sink and not committed.
    """

    format: str
    options: dict[str, str]
    uncommitted: bool = False


class SinkError(Exception):
    """The sink fails after it wrote, so that the micro-batch is not committed."""


def shown(row: Row) -> list[Any]:
    """What of a row must be the same in every version."""
    if "revision" in row:
        value = None if row.value is None else bytes(row.value).decode()
        return [row.revision, row.operation, row.key, value, row.initial]
    return [row.sequence, row.subject, bytes(row.data).decode()]


def by_key(row: list[Any]) -> tuple[str, int]:
    """The key, and the revision, of a row of ``nats_kv`` as :func:`shown`."""
    return row[2], row[0]


def go_on(
    spark: SparkSession, url: str, case: Case, checkpoint: Path, fail: bool = False
) -> list[list[Any]]:
    """Run the query to the end of the stream; its rows, as :func:`shown`."""
    rows: list[list[Any]] = []

    def collect(batch: DataFrame, batch_id: int) -> None:
        found = [shown(row) for row in batch.collect()]
        rows.extend(found)
        if fail:
            raise SinkError

    writes = (
        spark.readStream.format(case.format)
        .options(servers=url, **case.options)
        .load()
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    try:
        run_to_the_end(writes.start)
    except StreamingQueryException as error:
        if not fail or "SinkError" not in str(error):
            raise
    return rows


def write(url: str, first: int) -> None:
    """One round of changes, whose values begin at ``first``."""
    keys = ["pump.a", "pump.b", "fan.1", "door", "pump.a"]
    buckets.put_many(url, BUCKET, ((key, b"%d" % (first + i)) for i, key in enumerate(keys)))
    buckets.delete(url, BUCKET, "fan.1")
    buckets.purge(url, BUCKET, "door")
    subjects = ["orders.eu.de", "orders.us", "orders.asia", "orders.eu.fr", "orders.us"]
    messages = [(name, b"%d" % (first + i), None) for i, name in enumerate(subjects)]
    buckets.publish(url, messages)


def create(url: str) -> None:
    """The bucket and the stream."""
    buckets.create_bucket(url, BUCKET, history=5)
    create_stream(url, STREAM, "orders.>", allow_direct=True)


def state_of(url: str, case: Case) -> dict[str, Any]:
    return stream_state(url, case.options.get("stream") or f"KV_{BUCKET}")


def stored(url: str, case: Case, after: int, initial: int = 0) -> list[list[Any]]:
    """What a query must still read after ``after``, read by nats-py.

    Args:
        initial: the last sequence of the initial values, of which it reads those that are left.
    """
    kv = case.format == "nats_kv"
    stream, prefix = (f"KV_{BUCKET}", f"$KV.{BUCKET}.") if kv else (case.options["stream"], "")
    filters = case.options.get("keys" if kv else "filterSubjects")
    rows = []
    for one in stored_entries(url, stream, prefix):
        if one.seq > after and _fits(one.key, filters):
            value = None if one.value is None else one.value.decode()
            row = [one.seq, one.operation, one.key, value, one.seq <= initial]
            rows.append(row if kv else [one.seq, one.key, value])
    if not kv or "includeHistory" in case.options:
        return rows
    # Initial values are those that were not written again.
    last = {row[2]: row[0] for row in rows}
    return [row for row in rows if not row[4] or last[row[2]] == row[0]]


def _fits(name: str, filters: str | None) -> bool:
    """Whether a name matches one of the filters, as far as these tests have them."""
    return filters is None or any(
        name == one or (one[-2:] in (".>", ".*") and name.startswith(one[:-1]))
        for one in filters.split(",")
    )


ROUNDS = {
    "kv": Case("nats_kv", {"bucket": BUCKET}),
    "kv_uncommitted": Case("nats_kv", {"bucket": BUCKET}, uncommitted=True),
    "kv_keys_history": Case(
        "nats_kv",
        {"bucket": BUCKET, "keys": "pump.>,fan.*", "includeHistory": "true"},
    ),
    "kv_updates": Case("nats_kv", {"bucket": BUCKET, "updatesOnly": "true"}),
    "stream_filters": Case(
        "nats_stream", {"stream": STREAM, "filterSubjects": "orders.eu.>,orders.us"}
    ),
    "stream_new_uncommitted": Case(
        "nats_stream", {"stream": STREAM, "deliverPolicy": "new"}, uncommitted=True
    ),
}

HISTORY = {"bucket": BUCKET, "includeHistory": "true"}
NOT_STRICT = {"failOnDataLoss": "false"}
EPOCHS = {
    "kv": Case("nats_kv", {"bucket": BUCKET, **NOT_STRICT}),
    "kv_history_uncommitted": Case("nats_kv", {**HISTORY, **NOT_STRICT}, uncommitted=True),
    "stream": Case("nats_stream", {"stream": STREAM, **NOT_STRICT}),
    "stream_uncommitted": Case("nats_stream", {"stream": STREAM, **NOT_STRICT}, uncommitted=True),
}
FIRST = {
    "kv": Case("nats_kv", {"bucket": BUCKET}, uncommitted=True),
    "kv_history": Case("nats_kv", HISTORY, uncommitted=True),
    "kv_updates": Case("nats_kv", {"bucket": BUCKET, "updatesOnly": "true"}, uncommitted=True),
    "stream": Case("nats_stream", {"stream": STREAM}, uncommitted=True),
    "stream_new": Case("nats_stream", {"stream": STREAM, "deliverPolicy": "new"}, uncommitted=True),
}

BUCKETS = {"bucketPattern": f"{BUCKET}|{OTHER}", "includeHistory": "true"}
SEVERAL = {
    "kv": Case("nats_kv", {"buckets": f"{BUCKET},{OTHER}", "includeHistory": "true"}),
    "kv_uncommitted": Case("nats_kv", BUCKETS, uncommitted=True),
}


@dataclass
class Writer:
    """Runs the queries of a story and keeps what they read.

    Attributes:
        kept: by case, what ``cases.json`` has of it.
    """

    spark: SparkSession
    url: str
    scratch: Path
    cases: dict[str, Case]
    kept: dict[str, Any]

    def run(self, name: str, *, fail: bool = False) -> None:
        """Run a query to the end, or to its first micro-batch if its sink fails."""
        case = self.cases[name]
        rows = go_on(self.spark, self.url, case, self.scratch / name / "checkpoint", fail)
        kept = self.kept.setdefault(name, {**asdict(case), "read": [], "again": []})
        kept["again" if fail else "read"] += rows

    def offset(self, name: str) -> dict[str, Any]:
        logged = (self.scratch / name / "checkpoint" / "offsets").glob("[0-9]*")
        last = max(logged, key=lambda path: int(path.name))
        return dict(json.loads(last.read_text().splitlines()[-1]))

    def missing(self, name: str, after: int, initial: int = 0) -> None:
        """Keep what a query must still read."""
        self.kept[name]["missing"] = stored(self.url, self.cases[name], after, initial)


def rounds(writer: Writer) -> None:
    """Two rounds with all queries, a third without."""
    create(writer.url)
    for round_ in (0, 1, 2):
        write(writer.url, 10 * (round_ + 1))
        for name, case in writer.cases.items() if round_ < 2 else ():
            writer.run(name, fail=case.uncommitted and round_ == 1)
    for name, kept in writer.kept.items():
        # Where no rows were committed, those of the failed micro-batch come first.
        read = kept["read"] or [[kept["again"][0][0] - 1]]
        writer.missing(name, read[-1][0])


def epochs(writer: Writer) -> None:
    """A round that all queries read; streams are re-created, and read again or not committed."""
    create(writer.url)
    write(writer.url, 10)
    write(writer.url, 20)
    for name in writer.cases:
        writer.run(name)
    for stream in (f"KV_{BUCKET}", STREAM):
        buckets.api(writer.url, f"STREAM.DELETE.{stream}")
    create(writer.url)
    # Fewer than there were: what was read before must not be taken for read now.
    write(writer.url, 30)
    ends = {name: state_of(writer.url, case)["last_seq"] for name, case in writer.cases.items()}
    for name, case in writer.cases.items():
        writer.run(name, fail=case.uncommitted)
        assert writer.offset(name)["epoch"] == 1
    write(writer.url, 40)
    for name, case in writer.cases.items():
        writer.missing(name, 0 if case.uncommitted else ends[name])


def first(writer: Writer) -> None:
    """The first micro-batch of each query is read and not committed; then comes another round."""
    create(writer.url)
    buckets.put_many(writer.url, BUCKET, [("boiler", b"1"), ("vent.2", b"2")])  # never again
    write(writer.url, 10)
    ends = {name: state_of(writer.url, case)["last_seq"] for name, case in writer.cases.items()}
    for name in writer.cases:
        writer.run(name, fail=True)
    write(writer.url, 20)
    for name in writer.cases:
        new = name in ("kv_updates", "stream_new")
        assert writer.offset(name)["origin"] == (ends[name] if new else 0)
        writer.missing(name, ends[name] if new else 0, ends[name])


def several(writer: Writer) -> None:
    """Two rounds of two buckets, the second one in some queries not committed; then a third."""
    create(writer.url)
    buckets.create_bucket(writer.url, OTHER, history=5)
    last = 0
    for round_ in (0, 1, 2):
        committed = last
        write(writer.url, 10 * (round_ + 1))
        last = state_of(writer.url, SEVERAL["kv"])["last_seq"]
        buckets.put(writer.url, OTHER, "yard.gate", b"%d" % round_)
        for name, case in writer.cases.items() if round_ < 2 else ():
            writer.run(name, fail=case.uncommitted and round_ == 1)
            assert writer.offset(name)["v"] == 2
    initial = committed // 2  # one round of two
    for name, case in writer.cases.items():
        after, rounds_left = (initial, (1, 2)) if case.uncommitted else (committed, (2,))
        plant = stored(writer.url, case, after)
        yard = [[r + 1, "PUT", "yard.gate", str(r), False] for r in rounds_left]
        writer.kept[name]["missing"] = sorted(plant + yard, key=by_key)


STORIES: dict[str, tuple[Callable[[Writer], None], dict[str, Case]]] = {
    "": (rounds, ROUNDS),
    "-epochs": (epochs, EPOCHS),
    "-first": (first, FIRST),
    "-several": (several, SEVERAL),
}
"""By what follows the version in the directory's name: what happens, and the queries."""


def main(target: Path, scratch: Path, suffix: str) -> None:
    tell, cases = STORIES[suffix]
    spark = delta_session()
    kept: dict[str, Any] = {}
    try:
        with NatsServer(store=scratch / "nats") as server:
            tell(Writer(spark, server.url, scratch, cases, kept))
    finally:
        spark.stop()
    target.mkdir(parents=True)
    keep(scratch / "nats" / "jetstream", target / "store.tar.gz")
    for name in cases:
        copy(scratch / name / "checkpoint", target / name / "checkpoint")
    (target / "cases.json").write_text(as_text(kept) + "\n")


def keep(store: Path, archive: Path) -> None:
    """The store as an archive; without what a server creates again."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(store, "jetstream")


def copy(checkpoint: Path, target: Path) -> None:
    """A checkpoint without the check sums of Hadoop's local file system, which may be absent."""
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns(".*"))
    for directory in target.iterdir():
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()  # as in a clone, where no empty ones are


if __name__ == "__main__":
    here = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent
    for suffix in STORIES:
        target = here / f"v{importlib.metadata.version('nats-stream-source')}{suffix}"
        if target.exists():
            continue
        scratch = Path(tempfile.mkdtemp(prefix="golden-"))
        try:
            main(target, scratch, suffix)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
