"""Many commits into one Delta table by deletion vectors: time, bytes written, files, disk space.

Each commit merges ROWS entries with random keys into a table of KEYS keys, without Spark; a tenth
of them are new keys, and every twentieth entry is a DEL. Upkeep runs as in a query. "Written ÷
changed" divides the bytes of all objects that were put (data, vectors, log; with compaction and
checkpoints) by the bytes of the merged entries in Arrow. At the end, the rows are read by delta-rs
and compared with the index. Each case runs in a process of its own, so that the peak memory is that
of the case.
"""

from __future__ import annotations

import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from benchmarks.support.delta_merge import create, driver_table, merge_rows, rows
from benchmarks.support.machine import in_process
from nats_stream_source.delta import Upkeep
from nats_stream_source.delta.driver.objects import TableObjects

CASES = ("100000:350:2000", "1000000:5000:300", "10000000:5000:200")


class _Written:
    """Counts the bytes of objects while it is in place, by kind."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        real = TableObjects.put

        def put(objects: TableObjects, path: str, content: Any, *, create: bool = False) -> None:
            kind = "log" if "_delta_log" in path else "vectors" if path.endswith("bin") else "data"
            if threading.current_thread() is not threading.main_thread():
                kind = "upkeep"
            self.bytes[kind] += len(content)
            real(objects, path, content, create=create)

        TableObjects.put = put  # type: ignore[assignment]


def _case(keys: int, count: int, commits: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = f"{scratch}/table"
        create(path, keys)
        table, upkeep = driver_table(path), Upkeep()
        began = time.perf_counter()
        state = table.indexed()
        built = time.perf_counter() - began
        written, chance = _Written(), np.random.default_rng(1)
        seconds, changed, most, revision = [], 0, 0, keys + 1
        for number in range(commits):
            chosen = chance.choice(keys, count, replace=False)
            chosen[: count // 10] = keys + number * (count // 10) + np.arange(count // 10)
            batch = rows(chosen, revision)
            deletes = ["DEL" if at % 20 == 19 else "PUT" for at in range(count)]
            batch = batch.set_column(5, "operation", pa.array(deletes))
            revision += count
            began = time.perf_counter()
            merge_rows(table, batch, upkeep)
            seconds.append(1000 * (time.perf_counter() - began))
            changed += batch.nbytes
            most = max(most, len(state.files))
        table.wait()
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        target = DeltaTable(path)
        delta_rs = 1000 * (time.perf_counter() - began)
        query = QueryBuilder().register("t", target).execute("SELECT count(*) AS n FROM t")
        assert pa.table(query)["n"][0].as_py() == sum(
            file.live_rows for file in state.files.values()
        )
        files = [file for file in Path(path).rglob("*") if file.is_file()]
        checkpoints = sum(file.stat().st_size for file in files if "checkpoint" in file.name)
        return {
            "keys": keys,
            "rows": count,
            "commits": commits,
            "built": built,  # seconds
            "index": state.index.nbytes / len(state.index),  # bytes of a key
            "p50": float(np.percentile(seconds, 50)),  # milliseconds of a merge
            "p99": float(np.percentile(seconds, 99)),
            "changed": changed,  # bytes; those below are multiples of it
            **{kind: written.bytes[kind] / changed for kind in ("data", "vectors", "log")},
            "upkeep": (written.bytes["upkeep"] + checkpoints) / changed,
            "files": len(state.files),  # at the end
            "most_files": most,
            "opened": delta_rs,  # milliseconds
            "memory": memory,  # bytes
        }


def run(case: Sequence[str] = CASES) -> dict[str, Any]:
    """The figures of all cases, ``KEYS:ROWS:COMMITS``, each in a process of its own."""
    return {"commits": [in_process(_case, *map(int, one.split(":"))) for one in case]}
