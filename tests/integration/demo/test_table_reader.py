"""The demo's reader process: each version of a table, and the freshness computed from them."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from nats_stream_source.demo.table_reader import Freshness, TableReader, freshness

SECOND = 10**9


def test_write_is_visible_from_first_version_with_its_revision() -> None:
    puts = [(1, 0), (2, SECOND), (3, 2 * SECOND), (9, 3 * SECOND)]
    visible = [(SECOND, 1), (4 * SECOND, 3)]
    # 1, 3 and 2 seconds; the fourth is not visible yet.
    assert freshness(puts, visible) == Freshness(3, 2.0, pytest.approx(2.98), 3.0)


def test_version_with_removed_last_row_hides_nothing() -> None:
    assert freshness([(5, 0)], [(SECOND, 5), (2 * SECOND, 3)]) == Freshness(1, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("puts", "visible"), [([], [(1, 1)]), ([(1, 1)], []), ([(2, 1)], [(1, 1)])]
)
def test_table_without_visible_rows(
    puts: list[tuple[int, int]], visible: list[tuple[int, int]]
) -> None:
    assert freshness(puts, visible) is None


def test_reader_process_reads_each_version(tmp_path: Path) -> None:
    table = tmp_path / "table"
    with TableReader(table) as reader:
        for revision in (3, 7):
            write_deltalake(table, pa.table({"revision": [revision]}), mode="append")
            deadline = time.monotonic() + 60
            while not reader.visible or reader.visible[-1][1] != revision:
                assert time.monotonic() < deadline, reader
                time.sleep(0.01)
        process = reader._process
    assert process.poll() is not None
    assert [revision for _, revision in reader.visible] == [3, 7]
    assert reader.visible[0][0] < reader.visible[1][0] < time.time_ns()
