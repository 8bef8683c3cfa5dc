"""The entries of all benchmarks: keys in rotation, different values of a fixed size.

A value is its number followed by random bytes, including line ends. Text would be faster to frame,
and repeated values faster to write to Parquet, than the values of a real bucket.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.raw_connection import RawConnection, fill

SIZE = 128  # bytes of a value
_CHUNK = 100_000


def entries(rows: int, keys: int, size: int = SIZE) -> Iterator[tuple[str, bytes]]:
    """``rows`` pairs of key and value, on ``keys`` keys in rotation."""
    chance = random.Random(1)
    tails = [chance.randbytes(max(size - 8, 0)) for _ in range(64)]
    for i in range(rows):
        yield f"key.{i % keys}", (i.to_bytes(8, "big") + tails[i % 64])[:size]


def create_bucket(port: int, bucket: str, *, history: int) -> str:
    """Create a bucket as in ADR-8; returns the time of its creation."""
    with RawConnection(port) as connection:
        response = connection.request(
            f"$JS.API.STREAM.CREATE.KV_{bucket}",
            {
                "name": f"KV_{bucket}",
                "subjects": [f"$KV.{bucket}.>"],
                "max_msgs_per_subject": history,
                "discard": "new",
                "allow_rollup_hdrs": True,
                "allow_direct": True,
                "deny_delete": True,
            },
        )
    return str(response["created"])


def fill_bucket(port: int, bucket: str, pairs: Iterator[tuple[str, bytes]], *, history: int) -> int:
    """Create a bucket and put all ``pairs``; returns their number."""
    create_bucket(port, bucket, history=history)
    return fill(port, ((f"$KV.{bucket}.{key}", None, value) for key, value in pairs))


def purge(port: int, expected: int) -> None:
    """Purge the bucket ``bench``; RuntimeError if it does not have so many messages."""
    with RawConnection(port) as connection:
        stored = connection.request("$JS.API.STREAM.INFO.KV_bench", {})["state"]["messages"]
        if stored != expected:
            raise RuntimeError(f"{stored:,} of {expected:,} messages are stored")
        connection.request("$JS.API.STREAM.PURGE.KV_bench", {})


def write_parquet(path: Path, pairs: Iterator[tuple[str, bytes]]) -> None:
    """Write ``pairs`` in order into one Parquet file with the columns ``key`` and ``value``."""
    schema = pa.schema([("key", pa.string()), ("value", pa.binary())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        while chunk := list(itertools.islice(pairs, _CHUNK)):
            keys, values = zip(*chunk, strict=True)
            columns = [pa.array(keys, pa.string()), pa.array(values, pa.binary())]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
