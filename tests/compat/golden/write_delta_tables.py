"""Write golden tables of this version: ``python -m tests.compat.golden.write_delta_tables [DIR]``.

To be done before the code that writes tables changes, and never again for the same version: what is
there shows what that version really wrote. A :class:`Story` has the arguments of ``merge``, the
batches that an earlier version merged, the next batch, and an old batch that a query would merge
again. For each story it writes ``DIR/NAME.tar.gz``, the table and its state table, and
``DIR/NAME.json``: the arguments of ``merge``, the rows, an old batch, the next batch, and the rows
after it. A copy of the table gives these, and the same rows must come from each engine that can
merge the batch. In JSON a time is ISO text, and a binary is text.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, functions as F

from nats_stream_source.delta import Engine, Upkeep, merge
from nats_stream_source.errors import ConfigurationError
from tests.support.delta import rows_of
from tests.support.spark.session import delta_session

TABLE = "table"
"""The directory of a table; its state table is beside it."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Batch:
    """Rows of a batch."""

    schema: str
    rows: list[list[Any]]


@dataclass(frozen=True)
class Written:
    """One step of an earlier version: a batch, or a statement of another writer.

    Attributes:
        how: arguments of ``merge`` beside the rules: the engine, with or without vectors.
        sql: a statement in which ``{table}`` is the table; instead of the batch.
    """

    batch: Batch | None = None
    how: dict[str, Any] = field(default_factory=dict)
    sql: str = ""


@dataclass(frozen=True)
class Story:
    """One table.

    Attributes:
        rules: arguments of ``merge`` that each call has.
        steps: what made the table.
        old: one of the merged batches, which changes nothing when it is merged again.
        after: the next batch.
    """

    rules: dict[str, Any]
    steps: list[Written]
    old: Batch
    after: Batch


def written(spark: SparkSession, batch: Batch) -> DataFrame:
    """A DataFrame of a batch."""
    schema = spark.createDataFrame([], batch.schema).schema
    names = schema.names
    texts = [(json.dumps(dict(zip(names, row, strict=True))),) for row in batch.rows]
    as_text = batch.schema.replace("BINARY", "STRING")
    parsed = spark.createDataFrame(texts, "row STRING").select(
        F.from_json("row", as_text).alias("r")
    )
    return parsed.select(
        [F.col(f"r.{one.name}").cast(one.dataType).alias(one.name) for one in schema.fields]
    )


def content(table: Path) -> Rows:
    """The rows of a table as JSON, as delta-rs reads them."""
    return as_json(rows_of(DeltaTable(table)))


def as_json(rows: Rows) -> Rows:
    """Rows as JSON, in an order of their own."""
    return sorted(map(_shown, rows), key=lambda row: json.dumps(row, sort_keys=True))


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    return value


def as_text(value: Any, depth: int = 0) -> str:
    """JSON with one row a line, so that a person can read it."""
    pad = " " * (depth + 1)
    if isinstance(value, dict) and depth < 2:
        lines = [f"{pad}{json.dumps(key)}: {as_text(one, depth + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{pad[1:]}}}"
    if isinstance(value, list) and value and isinstance(value[0], (list, dict)):
        lines = [f"{pad}{json.dumps(one)}" for one in value]
        return "[\n" + ",\n".join(lines) + f"\n{pad[1:]}]"
    return json.dumps(value)


# --- entries of a bucket -------------------------------------------------------------------------

_CREATED = datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=timezone.utc)
_RECREATED = _CREATED + timedelta(days=1)
ENTRIES = (
    "bucket STRING, key STRING, value BINARY, revision BIGINT, created TIMESTAMP, "
    "operation STRING, delta BIGINT, initial BOOLEAN, stream_created TIMESTAMP"
)

Entry = tuple[str, int] | tuple[str, int, str]
"""Key and revision, and the operation if it is not a PUT."""


def entries(*given: Entry, bucket: str = "plant", of: datetime = _CREATED) -> Batch:
    """A batch of entries."""
    rows: list[list[Any]] = []
    for key, revision, *operation in given:
        put = not operation
        created = of + timedelta(seconds=revision)
        values = [f"{key}@{revision}" if put else None, revision, created.isoformat()]
        rows.append([bucket, key, *values, *(operation or ["PUT"]), 0, False, of.isoformat()])
    return Batch(ENTRIES, rows)


def _both(*batches: Batch) -> Batch:
    return Batch(batches[0].schema, [row for batch in batches for row in batch.rows])


def _without(batch: Batch, column: str) -> Batch:
    parts = batch.schema.split(", ")
    at = next(number for number, part in enumerate(parts) if part.startswith(f"{column} "))
    rows = [row[:at] + row[at + 1 :] for row in batch.rows]
    return Batch(", ".join(parts[:at] + parts[at + 1 :]), rows)


_FIRST = entries(*((key, number) for number, key in enumerate("abcdefgh", 1)))
_SECOND = entries(("a", 9), ("b", 10, "DEL"), ("c", 11, "PURGE"), ("i", 12))
_THIRD = entries(("d", 13), ("b", 14), ("e", 15, "DEL"), ("x", 16, "DEL"))
_ENTRIES = [_FIRST, _SECOND, _THIRD]
# Keys of all files, older entries among them, and the bucket created again with the same key.
_AFTER = _both(
    entries(("a", 17), ("b", 18, "DEL"), ("c", 19), ("d", 5), ("j", 20), ("k", 21, "DEL")),
    entries(("f", 1), ("g", 2, "DEL"), of=_RECREATED),
)

# --- events of other rows ------------------------------------------------------------------------

EVENTS = "key STRING, seq BIGINT, part INT, op STRING, a BIGINT, b STRING"
Event = tuple[str, int, str, int | None, str | None]


def events(*given: Event) -> Batch:
    """A batch of events: key, sequence, operation (U or D), values."""
    return Batch(EVENTS, [[key, seq, seq % 3, op, a, b] for key, seq, op, a, b in given])


_EVENTS = [
    events(*((key, 10 + number, "U", number, "x") for number, key in enumerate("abcdefgh"))),
    events(("a", 20, "U", 5, "x"), ("b", 21, "D", None, None), ("c", 22, "U", 2, "x")),
    # Late ones: before the delete of b, before the row of d, a delete before anything of y.
    events(("b", 15, "U", 9, "late"), ("d", 5, "U", 0, "late"), ("y", 30, "D", None, None)),
    events(("e", 31, "D", None, None), ("f", 32, "U", 6, "z"), ("i", 33, "U", 1, None)),
]
_EVENTS_AFTER = events(
    ("b", 18, "U", 1, "late"),  # hidden by the delete at 21
    ("y", 29, "U", 1, "late"),  # hidden by the delete at 30
    ("e", 40, "U", 4, "back"),
    ("a", 15, "U", 7, "late"),  # between 10 and 20
    ("c", 23, "U", 2, "x"),  # nothing changes
    ("d", 41, "D", None, None),
    ("g", 42, "U", 8, "g"),
    ("j", 43, "U", 1, "new"),
    ("f", 12, "D", None, None),  # before its rows
)
_BY_SEQ: dict[str, Any] = {
    "keys": ["key"],
    "sequence_by": "seq",
    "apply_as_deletes": "op = 'D'",
    "except_column_list": ["op", "part"],
}
_BY_STRUCT = {**_BY_SEQ, "sequence_by": ["seq", "part"], "except_column_list": ["op"]}
_BY_EXPRESSION = {**_BY_SEQ, "sequence_by": ["seq + 0", "part"]}

# --- Debezium's shape ----------------------------------------------------------------------------

CHANGES = (
    "id INT, name STRING, big STRING, _operation STRING, _unavailable ARRAY<STRING>, "
    "_lsn BIGINT, _sequence BIGINT"
)
_DEBEZIUM: dict[str, Any] = {
    "keys": ["id"],
    "sequence_by": ["_lsn", "_sequence"],
    "apply_as_deletes": "_operation = 'd'",
    "unavailable_columns": "_unavailable",
    "except_column_list": ["_operation"],
}
_CHANGES = [
    Batch(CHANGES, [[n, f"n{n}", f"big{n}", "c", [], 100 + n, n] for n in range(1, 7)]),
    Batch(
        CHANGES,
        [
            [1, "m1", None, "u", ["big"], 201, 11],
            [2, None, None, "d", [], 202, 12],
            [3, "m3", None, "u", None, 203, 13],  # big was set to null
        ],
    ),
]
_CHANGES_AFTER = Batch(
    CHANGES,
    [
        [1, "o1", None, "u", ["big"], 301, 21],
        [1, "p1", None, "u", ["big"], 302, 22],
        [2, "back", "big2b", "c", [], 303, 23],
        [4, None, None, "d", [], 304, 24],
        [5, "old", "old", "c", [], 104, 4],
        [6, "q6", "bigger", "u", [], 305, 25],
        [6, "r6", None, "u", ["big"], 306, 26],
        [9, "new", None, "c", [], 307, 27],
    ],
)

# --- the tables ----------------------------------------------------------------------------------

_VECTORS: dict[str, Any] = {"engine": "driver"}
_REWRITTEN: dict[str, Any] = {"engine": "driver", "deletion_vectors": False}
_SPARK: dict[str, Any] = {"engine": "spark"}
_WAYS = {"vectors": _VECTORS, "rewritten": _REWRITTEN, "spark": _SPARK}


def _story(
    rules: dict[str, Any],
    batches: list[Batch],
    after: Batch,
    *ways: dict[str, Any],
    before: str = "",
    between: Sequence[str] = (),
    end: str = "",
) -> Story:
    """The batches, written in these ways in turn, with statements of another writer."""
    first, *rest = (Written(batch, ways[at % len(ways)]) for at, batch in enumerate(batches))
    statements = [[Written(sql=one) for one in some if one] for some in ([before], between, [end])]
    steps = [*statements[0], first, *statements[1], *rest, *statements[2]]
    return Story(rules, steps, batches[1], after)


def _each(name: str, rules: dict[str, Any], batches: list[Batch], after: Batch) -> dict[str, Story]:
    """A table of the same batches for each way to write it."""
    return {f"{name}_{way}": _story(rules, batches, after, how) for way, how in _WAYS.items()}


_TWO = [_both(one, Batch(ENTRIES, [["yard", *row[1:]] for row in one.rows])) for one in _ENTRIES]
_TWO_AFTER = _both(
    _AFTER, entries(("a", 30), ("d", 31, "DEL"), bucket="yard"), entries(("z", 1), bucket="dock")
)
_WIDER = Batch(
    f"{ENTRIES}, place STRUCT<hall: INT, row: STRING>, note STRING",
    [[*row, {"hall": 1, "row": "r"}, "new"] for row in _AFTER.rows],
)
_WITHOUT_BUCKET = [_without(batch, "bucket") for batch in (*_ENTRIES, _AFTER)]
_MARK: dict[str, Any] = {"deletes": "mark"}
_HISTORY: dict[str, Any] = {"stored_as_scd_type": 2}
_TRACKED = {**_BY_SEQ, **_HISTORY, "track_history_column_list": ["b"]}
_OWN_COLUMNS = (
    "ALTER TABLE {table} ADD COLUMNS (owner STRING, rank INT)",
    "UPDATE {table} SET owner = concat('of ', key), rank = 7 WHERE key IN ('a', 'd', 'g')",
)
_PARTITIONED = (
    "CREATE TABLE {table} (bucket STRING, key STRING, value BINARY, revision BIGINT, created "
    "TIMESTAMP, operation STRING, stream_created TIMESTAMP) USING delta PARTITIONED BY (bucket)"
)
_NOT_NULL = (
    "CREATE TABLE {table} (bucket STRING NOT NULL, key STRING NOT NULL, value BINARY, revision "
    "BIGINT NOT NULL, created TIMESTAMP, operation STRING NOT NULL, stream_created TIMESTAMP NOT "
    "NULL) USING delta"
)
_CREATED_WAYS = {
    "vectors": " TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')",
    "rewritten": "",
}
_OFTEN = ["ALTER TABLE {table} SET TBLPROPERTIES ('delta.checkpointInterval' = '2')"]
_NO_VECTORS = "ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'false')"
_BY_DRIVER = {way: _WAYS[way] for way in ("vectors", "rewritten")}

STORIES: dict[str, Story] = {
    **_each("entries", {}, _ENTRIES, _AFTER),
    **_each("marks", _MARK, _ENTRIES, _AFTER),
    "entries_in_turn": _story({}, _ENTRIES, _AFTER, _VECTORS, _SPARK),
    "marks_in_turn": _story(_MARK, _ENTRIES, _AFTER, _VECTORS, _SPARK),
    "entries_without_bucket": _story({}, _WITHOUT_BUCKET[:-1], _WITHOUT_BUCKET[-1], _VECTORS),
    **_each("buckets", {}, _TWO, _TWO_AFTER),
    "buckets_marks": _story(_MARK, _TWO, _TWO_AFTER, _VECTORS),
    **{
        f"buckets_partitioned_{way}": _story(
            {}, _TWO, _TWO_AFTER, _VECTORS, before=_PARTITIONED + end
        )
        for way, end in _CREATED_WAYS.items()
    },
    **{
        f"not_null_{way}": _story({}, _ENTRIES, _AFTER, _VECTORS, before=_NOT_NULL + end)
        for way, end in _CREATED_WAYS.items()
    },
    **{
        f"own_columns_{kind}{way}": _story(rules, _ENTRIES, _AFTER, how, between=_OWN_COLUMNS)
        for kind, rules in (("", {}), ("marks_", _MARK))
        for way, how in _BY_DRIVER.items()
    },
    **{
        f"added_columns_{way}": _story({}, _ENTRIES, _WIDER, how) for way, how in _BY_DRIVER.items()
    },
    **{
        f"checkpoint_{way}": _story({}, _ENTRIES, _AFTER, _VECTORS, how, how, between=_OFTEN)
        for way, how in (("vectors", _VECTORS), ("spark", _SPARK))
    },
    "vectors_off": _story({}, _ENTRIES, _AFTER, _VECTORS, end=_NO_VECTORS),
    **_each("latest", _BY_SEQ, _EVENTS, _EVENTS_AFTER),
    "latest_in_turn": _story(_BY_SEQ, _EVENTS, _EVENTS_AFTER, _VECTORS, _SPARK),
    **_each("latest_own_sequence", _BY_EXPRESSION, _EVENTS, _EVENTS_AFTER),
    **_each("latest_marks", {**_BY_SEQ, **_MARK}, _EVENTS, _EVENTS_AFTER),
    "latest_marks_struct": _story({**_BY_EXPRESSION, **_MARK}, _EVENTS, _EVENTS_AFTER, _VECTORS),
    **_each("history_of_entries", _HISTORY, _ENTRIES, _AFTER),
    "history_of_entries_in_turn": _story(_HISTORY, _ENTRIES, _AFTER, _VECTORS, _SPARK),
    "history_of_buckets": _story(_HISTORY, _TWO, _TWO_AFTER, _VECTORS),
    **_each("history", {**_BY_SEQ, **_HISTORY}, _EVENTS, _EVENTS_AFTER),
    **_each("history_struct", {**_BY_STRUCT, **_HISTORY}, _EVENTS, _EVENTS_AFTER),
    "history_tracked": _story(_TRACKED, _EVENTS, _EVENTS_AFTER, _VECTORS),
    **_each("debezium", _DEBEZIUM, _CHANGES, _CHANGES_AFTER),
}


# Not Delta's own hour: a table that waits for years is continued with the files that it has.
_UPKEEP = Upkeep(retention_hours=168)
_ENGINES: tuple[Engine, ...] = ("driver", "spark")


def main(target: Path, scratch: Path) -> None:
    spark = delta_session()
    try:
        for name, story in STORIES.items():
            if (target / f"{name}.json").exists():
                continue
            directory = scratch / name
            _create(spark, story, directory / TABLE)
            if name.startswith("checkpoint"):
                _keep_checkpoint_only(directory / TABLE)
            known = {
                "rules": story.rules,
                "rows": content(directory / TABLE),
                "old": asdict(story.old),
                "next": asdict(story.after),
                **_after(spark, story, directory),
            }
            archive = _archive(directory)
            (target / f"{name}.tar.gz").write_bytes(archive)
            (target / f"{name}.json").write_text(as_text(known) + "\n")
            print(f"{name}: {len(archive):,} bytes, {known['engines']}", flush=True)
    finally:
        spark.stop()


def _create(spark: SparkSession, story: Story, table: Path) -> None:
    for step in story.steps:
        if step.batch is None:
            spark.sql(step.sql.format(table=f"delta.`{table}`"))
        else:
            batch = written(spark, step.batch)
            merge(batch, table, upkeep=_UPKEEP, **step.how, **story.rules)


def _keep_checkpoint_only(table: Path) -> None:
    """Delete the log's entries before its last checkpoint, as an expired retention does."""
    log = table / "_delta_log"
    last = json.loads((log / "_last_checkpoint").read_text())["version"]
    for entry in log.glob("[0-9]*.json"):
        if int(entry.stem) < last:
            entry.unlink()
    stored = pq.read_table(next(log.glob(f"{last:020}.checkpoint*.parquet")), columns=["add"])
    vectors = [add["deletionVector"] for add in stored["add"].to_pylist() if add]
    assert any(vector and vector["cardinality"] for vector in vectors), "vectors in the checkpoint"


def _after(spark: SparkSession, story: Story, directory: Path) -> dict[str, Any]:
    """The rows after the next batch, the engines that merge it, and those that keep a data file."""
    found: dict[str, Rows] = {}
    kept = []
    before = _files(directory / TABLE)
    for engine in _ENGINES:
        copy = directory.with_name(f"{directory.name}.{engine}")
        shutil.copytree(directory, copy)
        try:
            merge(written(spark, story.after), copy / TABLE, engine=engine, **story.rules)
        except ConfigurationError as error:
            print(f"{directory.name} with {engine}: {error}")
            continue
        found[engine] = content(copy / TABLE)
        if before & _files(copy / TABLE):
            kept.append(engine)
    rows = next(iter(found.values()))
    assert all(other == rows for other in found.values()), (directory.name, found)
    return {"rows_after": rows, "engines": list(found), "keeps_files": kept}


def _files(table: Path) -> set[str]:
    return {Path(uri).name for uri in DeltaTable(table).file_uris()}


def _archive(directory: Path) -> bytes:
    """The tables as an archive.

    It lacks the check sums of Hadoop's local file system, and the directory in which the tables
    were written: delta-rs logs it when it creates a table.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            if file.name.startswith("."):
                continue
            content = file.read_bytes()
            if file.suffix == ".json":
                content = content.replace(str(directory).encode(), b"/lake")
            member = tarfile.TarInfo(str(file.relative_to(directory)))
            member.size, member.mtime = len(content), int(file.stat().st_mtime)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


if __name__ == "__main__":
    version = importlib.metadata.version("nats-stream-source")
    place = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / f"tables-v{version}"
    place.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        main(place, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
