"""When a write is visible in the table: a separate process opens each new version of it.

The process reads the table with ``deltalake``, apart from the query and its Spark. It prints one
line for each version, the time at which it had opened it and the greatest revision in it. The
table then shows each write up to that revision: its row, or that of a later write to the key.

:class:`TableReader` runs in the parent process.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_POLL_INTERVAL = 0.005  # seconds


@dataclass(frozen=True, slots=True)
class Freshness:
    """Seconds from a write until it was visible: median, 99th percentile, largest; ``writes``."""

    writes: int
    p50: float
    p99: float
    largest: float


def freshness(
    puts: Sequence[tuple[int, int]], visible: Sequence[tuple[int, int]]
) -> Freshness | None:
    """How long writes took to become visible; None if none of them did.

    Args:
        puts: revision and time of the writes, in ns.
        visible: time in ns and the greatest revision of each version.
    """
    if not puts or not visible:
        return None
    times = np.array([at for at, _ in visible])
    revisions = np.maximum.accumulate([revision for _, revision in visible])
    put_revisions, put_times = np.array(puts).T
    position = np.searchsorted(revisions, put_revisions)
    counted = position < len(times)
    seconds = (times[position[counted]] - put_times[counted]) / 1e9
    if not len(seconds):
        return None
    p50, p99 = np.percentile(seconds, [50, 99])
    return Freshness(len(seconds), float(p50), float(p99), float(seconds.max()))


class TableReader:
    """The parent's handle of the reading process; a context manager.

    Args:
        table: the table's directory, which need not exist yet.
    """

    def __init__(self, table: Path) -> None:
        self.visible: list[tuple[int, int]] = []
        """Time in ns and greatest revision of each version so far."""
        # A new session: Ctrl-C reaches only the parent, which then ends the reader.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nats_stream_source.demo.table_reader", str(table)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TableReader pid {self._process.pid} versions={len(self.visible)}>"

    def __enter__(self) -> TableReader:
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.visible.append(tuple(json.loads(line)))


def versions(table: Path) -> Iterator[tuple[int, int]]:
    """Time in ns and greatest revision of each version of the table that has rows, without end."""
    import pyarrow as pa
    from deltalake import DeltaTable

    log = table / "_delta_log"
    while not (log / f"{0:020}.json").exists():
        time.sleep(_POLL_INTERVAL)
    opened = DeltaTable(table)
    while True:
        revisions = pa.table(opened.get_add_actions(flatten=True)).to_pydict().get("max.revision")
        if revisions:
            yield time.time_ns(), max(revisions)
        while not (log / f"{opened.version() + 1:020}.json").exists():
            time.sleep(_POLL_INTERVAL)
        opened.update_incremental()


def _end_with_the_parent() -> None:
    # The end of standard input is the end of the parent.
    sys.stdin.read()
    signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """The reading process: ``python -m nats_stream_source.demo.table_reader TABLE``."""
    parser = argparse.ArgumentParser(prog="table_reader", description=main.__doc__)
    parser.add_argument("table", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    for version in versions(given.table):
        print(json.dumps(version), flush=True)


if __name__ == "__main__":
    main()
