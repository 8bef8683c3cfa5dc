"""What the demo measures and compares, without this package's own readers.

nats-py reads the bucket, Delta's Rust implementation the Delta table, Spark the Parquet files. The
entries are a dictionary from key to revision and value of the newest one, None for a deleted key.
"""

from __future__ import annotations

import itertools
import json
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from examples.demo.flights import VALUE_FIELDS

Entries = dict[str, tuple[int, "dict[str, Any] | None"]]


async def read_bucket(url: str, bucket: str) -> Entries:
    """The newest entry of each key."""
    client = await nats.connect(url)
    watch = await (await client.jetstream().key_value(bucket)).watchall()
    entries: Entries = {}
    while (entry := await watch.updates(60)) is not None:
        value = None if entry.operation else json.loads(entry.value or b"")
        entries[entry.key] = (entry.revision or 0, value)
    await client.close()
    return entries


def read_table(spark: SparkSession, path: Path) -> Entries:
    """The newest row of each key; ValueError if a key of a Delta table, or a revision, repeats."""
    if (path / "_delta_log").is_dir():
        reader = QueryBuilder().register("t", DeltaTable(path))
        unique, rows = "key", pa.table(reader.execute("SELECT * FROM t"))
    else:
        # Spark reads the sink's list of files, which leaves out those of a batch that was stopped.
        unique, rows = "revision", spark.read.parquet(str(path)).toArrow()
    entries: Entries = {}
    for row in sorted(rows.to_pylist(), key=lambda row: row["revision"]):
        if row["operation"] == "PUT":
            row["scheduled"] = row["scheduled"].strftime("%Y-%m-%dT%H:%M:%SZ")
            value = {name: row[name] for name in VALUE_FIELDS if row[name] is not None}
        entries[row["key"]] = (row["revision"], value if row["operation"] == "PUT" else None)
    if repeated := len(rows) - len(set(rows[unique].to_pylist())):
        raise ValueError(f"could not compare {path.name}: {repeated} rows repeat a {unique}")
    return entries


def compare(bucket: Entries, table: Entries, *, marked: bool) -> tuple[bool, str]:
    """Whether they are equal, and the result as text; ``marked``: deleted keys have rows."""
    live = {key: entry for key, entry in bucket.items() if entry[1] is not None}
    wanted = bucket if marked else live
    differ = sorted(k for k in wanted.keys() | table.keys() if wanted.get(k) != table.get(k))
    if bucket and not differ:
        counts = f"{len(live):,} keys by key, value and revision; {len(bucket) - len(live):,}"
        return True, f"equal: yes ({counts} deleted keys)"
    lines = (f"\n  {k}: {table.get(k)} in the table, {wanted.get(k)} in the bucket" for k in differ)
    return False, f"equal: no ({len(differ):,} keys differ){''.join(itertools.islice(lines, 10))}"


def read_versions(table: Path, visible: list[tuple[int, int]]) -> None:
    """Add time in ns and greatest revision of each version of a Delta table, without end.

    The version shows each write up to that revision: its row, or that of a later write to the key.
    """
    for version in itertools.count():
        while not (table / f"_delta_log/{version:020}.json").exists():
            time.sleep(0.005)
        files = pa.table(DeltaTable(table, version).get_add_actions(flatten=True)).to_pydict()
        if revisions := files.get("max.revision"):
            visible.append((time.time_ns(), max(revisions)))


def freshness(puts: list[tuple[int, int]], visible: list[tuple[int, int]]) -> list[float]:
    """Seconds until puts (revision, ns) were visible: median, 99th percentile, largest, or none."""
    # A version whose last row was removed hides nothing.
    revisions = list(itertools.accumulate((revision for _, revision in visible), max))
    versions = ((bisect_left(revisions, revision), at) for revision, at in puts)
    seconds = [(visible[n][0] - at) / 1e9 for n, at in versions if n < len(visible)]
    return list(map(float, np.percentile(seconds, [50, 99, 100]))) if seconds else []
