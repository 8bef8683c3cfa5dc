"""Many commits into one Delta table by deletion vectors: time, bytes written, files, disk space.

``python -m benchmarks.commits [--case KEYS:ROWS:COMMITS ...] [--json FILE]``

Each commit merges ROWS entries with random keys into a table of KEYS keys, without Spark; a tenth
of them are new keys, and every twentieth entry is a DEL. Upkeep runs as in a query. "Written ÷
changed" divides the bytes of all objects that were put (data, vectors, log; with compaction and
checkpoints) by the bytes of the merged entries in Arrow. At the end, the rows are read by delta-rs
and compared with the index. Each case runs in a process of its own, so that the peak memory is that
of the case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from benchmarks.support.delta_merge import merge_rows, rows
from benchmarks.support.output import finish
from nats_stream_source.delta import Upkeep
from nats_stream_source.delta.driver.engine import opened_table
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.limits import IndexLimit

CASES = ("100000:350:2000", "1000000:5000:300", "10000000:5000:200")
_CHUNK = 1_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """One case.

    Attributes:
        built: seconds to build the index.
        index: bytes of the index for each key.
        p50, p99: milliseconds of a merge.
        changed: bytes of the merged entries.
        data, vectors, log, upkeep: bytes written, as a multiple of ``changed``.
        files: live data files at the end, and the most of them.
        disk: bytes of the table's directory at the end, expired files included.
        opened: milliseconds in which delta-rs opens the table at the end.
        memory: peak resident memory in bytes.
    """

    keys: int
    rows: int
    commits: int
    built: float
    index: float
    p50: float
    p99: float
    changed: int
    data: float
    vectors: float
    log: float
    upkeep: float
    files: int
    most_files: int
    disk: int
    opened: float
    memory: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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


def _case(keys: int, count: int, commits: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = f"{scratch}/table"
        opened = opened_table(path, path)
        upkeep = Upkeep()

        merge_rows(opened, rows(np.arange(0), 1), upkeep)
        opened.close()
        for start in range(0, keys, _CHUNK):
            part = rows(np.arange(start, min(keys, start + _CHUNK)), start + 1)
            write_deltalake(path, part, mode="append")
        began = time.perf_counter()
        state = opened.open(None, IndexLimit())
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
            merge_rows(opened, batch, upkeep)
            seconds.append(1000 * (time.perf_counter() - began))
            changed += batch.nbytes
            most = max(most, len(state.files))
        opened.upkeep.wait()
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        target = DeltaTable(path)
        delta_rs = 1000 * (time.perf_counter() - began)
        query = QueryBuilder().register("t", target).execute("SELECT count(*) AS n FROM t")
        assert pa.table(query)["n"][0].as_py() == len(state.index.live())
        files = [file for file in Path(path).rglob("*") if file.is_file()]
        checkpoints = sum(file.stat().st_size for file in files if "checkpoint" in file.name)
        return Result(
            keys=keys,
            rows=count,
            commits=commits,
            built=built,
            index=state.index.nbytes / len(state.index),
            p50=float(np.percentile(seconds, 50)),
            p99=float(np.percentile(seconds, 99)),
            changed=changed,
            data=written.bytes["data"] / changed,
            vectors=written.bytes["vectors"] / changed,
            log=written.bytes["log"] / changed,
            upkeep=(written.bytes["upkeep"] + checkpoints) / changed,
            files=len(state.files),
            most_files=most,
            disk=sum(file.stat().st_size for file in files),
            opened=delta_rs,
            memory=memory,
        )


def run(case: str) -> Result:
    """Measure a case, ``KEYS:ROWS:COMMITS``, in a process of its own."""
    keys, count, commits = map(int, case.split(":"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_case, (keys, count, commits))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", help="KEYS:ROWS:COMMITS")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    results = [run(case) for case in given.case or CASES]
    finish("commits", {"commits": [one.as_dict() for one in results]}, given.json)


if __name__ == "__main__":
    main()
