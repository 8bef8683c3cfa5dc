"""The same entries for every source: keys in turn, values of a fixed size that are all different.

A value is its number and then bytes of all kinds, line ends among them: text would be easier to
frame, and repeated values easier to write to Parquet, than what a bucket holds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.raw import RawConnection, fill

SIZE = 128  # bytes of a value
_CHUNK = 100_000


def entries(
    rows: int, keys: int, size: int = SIZE, *, scattered: bool = False
) -> Iterator[tuple[str, bytes]]:
    """``rows`` pairs of key and value, on ``keys`` keys.

    Each key comes in its turn; with ``scattered`` only at first, and then at random, so that a
    bucket that keeps one revision of a key is left with holes all over.
    """
    chance = random.Random(1)
    tails = [chance.randbytes(max(size - 8, 0)) for _ in range(64)]
    for i in range(rows):
        number = chance.randrange(keys) if scattered and i >= keys else i % keys
        yield f"key.{number}", (i.to_bytes(8, "big") + tails[i % 64])[:size]


def fill_bucket(port: int, bucket: str, pairs: Iterator[tuple[str, bytes]], *, history: int) -> int:
    """Create a bucket with ADR-8's configuration and put all ``pairs``; how many there were."""
    config: dict[str, Any] = {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "max_msgs_per_subject": history,
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "deny_delete": True,
    }
    with RawConnection(port) as connection:
        connection.request(f"$JS.API.STREAM.CREATE.KV_{bucket}", config)
    return fill(port, ((f"$KV.{bucket}.{key}", b"", value) for key, value in pairs))


def write_parquet(path: Path, pairs: Iterator[tuple[str, bytes]]) -> None:
    """All ``pairs`` into one Parquet file with the columns ``key`` and ``value``, in order."""
    schema = pa.schema([("key", pa.string()), ("value", pa.binary())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        while chunk := list(itertools.islice(pairs, _CHUNK)):
            keys, values = zip(*chunk, strict=True)
            columns = [pa.array(keys, pa.string()), pa.array(values, pa.binary())]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
