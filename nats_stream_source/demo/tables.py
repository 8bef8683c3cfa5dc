"""Read the result and the bucket without this package's own readers.

The bucket is read key by key with nats-py, the Delta table with the Rust implementation of Delta
(``deltalake``), the Parquet files with Arrow. Each function returns a dictionary from key to
:class:`~nats_stream_source.demo.compare.State`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from nats.js.client import JetStreamContext

from nats_stream_source.demo.compare import State
from nats_stream_source.demo.flights import VALUE_FIELDS
from nats_stream_source.demo.writer import connect

_IN_FLIGHT = 256
_COLUMNS = ("key", "revision", "operation", *VALUE_FIELDS)


async def read_bucket(url: str, bucket: str) -> dict[str, State]:
    """The newest entry of each key: lists the subjects, then requests the last message of each."""
    client = await connect(url)
    try:
        return await _newest_entries(client.jetstream(), f"KV_{bucket}", f"$KV.{bucket}.")
    finally:
        await client.close()


async def _newest_entries(stream: JetStreamContext, name: str, prefix: str) -> dict[str, State]:
    info = await stream.stream_info(name, subjects_filter=prefix + ">")
    limit = asyncio.Semaphore(_IN_FLIGHT)

    async def newest(subject: str) -> tuple[str, State]:
        async with limit:
            message = await stream.get_last_msg(name, subject)
        deleted = "KV-Operation" in (message.headers or {})
        value = None if deleted else json.loads(message.data or b"null")
        return subject.removeprefix(prefix), State(message.seq or 0, value)

    return dict(await asyncio.gather(*map(newest, info.state.subjects or {})))


def read_delta(path: Path) -> dict[str, State]:
    """The rows of a Delta table, one per key.

    Raises:
        ValueError: two rows have the same key.
    """
    # Imported here: only the Delta sink requires this package.
    import deltalake

    reader = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(str(path)))
    rows = pa.table(reader.execute(f"SELECT {', '.join(_COLUMNS)} FROM t"))
    table = dict(_states(rows))
    if len(table) != rows.num_rows:
        raise ValueError(
            f"could not read {path.name}: {rows.num_rows - len(table)} keys have more than one row"
        )
    return table


def read_parquet(path: Path) -> dict[str, State]:
    """The newest row of each key in Parquet files that a query appended to.

    Reads only the files in the sink's list, which a finished batch extends. The files of a batch
    that was stopped stay in the directory, and the batch writes its rows again.

    Raises:
        ValueError: a revision occurs more than once.
    """
    rows = pyarrow.dataset.dataset(_committed_files(path)).to_table(columns=list(_COLUMNS))
    repeated = rows.num_rows - pc.count_distinct(rows["revision"]).as_py()
    if repeated:
        raise ValueError(f"could not read {path.name}: {repeated} revisions occur more than once")
    return dict(_states(rows.sort_by("revision")))


def _committed_files(path: Path) -> list[str]:
    lists = (path / "_spark_metadata").glob("[0-9]*")
    lines = (line for file in lists for line in file.read_text().splitlines()[1:])
    # A newer list repeats the older ones, so a file can occur more than once.
    return sorted({unquote(urlparse(json.loads(line)["path"]).path) for line in lines})


def _states(rows: pa.Table) -> Iterator[tuple[str, State]]:
    # The text of the JSON value. A timestamp without a zone has Parquet's INT96 type, always in
    # UTC.
    scheduled = pc.strftime(rows["scheduled"].cast(pa.timestamp("s", "UTC")), "%Y-%m-%dT%H:%M:%SZ")
    index = rows.column_names.index("scheduled")
    for row in rows.set_column(index, "scheduled", scheduled).to_pylist():
        value = {name: row[name] for name in VALUE_FIELDS if row[name] is not None}
        yield row["key"], State(row["revision"], value if row["operation"] == "PUT" else None)
