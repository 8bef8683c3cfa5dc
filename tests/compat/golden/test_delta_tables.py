"""Old tables: this version continues each Delta table that an earlier version wrote.

See this package's docstring; ``write_delta_tables.py`` has written them.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import Engine, merge
from tests.compat.golden.write_delta_tables import TABLE, Batch, Rows, as_json, content, written
from tests.support.delta_readers import by_duckdb, by_polars

pytestmark = pytest.mark.delta

GOLDEN = Path(__file__).parent

_TABLES = sorted(GOLDEN.glob("tables-v*/*.json"))
ALL = [
    pytest.param(
        path,
        engine,
        id=f"{path.parent.name}-{path.stem}-{engine}",
        # A MERGE by Spark takes seconds.
        marks=pytest.mark.faults if engine == "spark" else (),
    )
    for path in _TABLES
    for engine in json.loads(path.read_text())["engines"]
]


@dataclass(frozen=True)
class StoredTable:
    """A copy of a table, and what is known of it.

    Attributes:
        known: see ``write_delta_tables.py``.
    """

    path: Path
    known: dict[str, Any]

    def content(self) -> Rows:
        return content(self.path)

    def state(self) -> dict[str, tuple[int, str, dict[str, str]]]:
        """Version, identity and properties of the table and of its state table."""
        found = {}
        for path in sorted(self.path.parent.iterdir()):
            table = DeltaTable(path)
            metadata = table.metadata()
            found[path.name] = (table.version(), str(metadata.id), metadata.configuration)
        return found

    def files(self) -> set[str]:
        """The live data files of the table."""
        return set(DeltaTable(self.path).file_uris())

    def by_other_readers(self) -> dict[str, Rows]:
        """The rows of the table by reader."""
        return {
            "duckdb": as_json(by_duckdb(self.path)),
            "polars": as_json(by_polars(self.path)),
        }

    def merge(self, spark: SparkSession, batch: str, engine: Engine) -> None:
        """Merge one of the batches that are beside the table."""
        rows = written(spark, Batch(**self.known[batch]))
        merge(rows, self.path, engine=engine, **self.known["rules"])


@pytest.fixture
def stored(stored_path: Path, tmp_path: Path) -> StoredTable:
    """The table whose description is ``stored_path``, a parameter of the test."""
    with tarfile.open(stored_path.with_suffix(".tar.gz")) as tar:
        tar.extractall(tmp_path, filter="data")
    return StoredTable(tmp_path / TABLE, json.loads(stored_path.read_text()))


@pytest.mark.parametrize(("stored_path", "engine"), ALL)
def test_table_continues(spark: SparkSession, stored: StoredTable, engine: Engine) -> None:
    """A repeated batch makes no version; the next one gives the rows, in the same table."""
    before, files = stored.state(), stored.files()
    assert stored.content() == stored.known["rows"]

    stored.merge(spark, "old", engine)
    assert (stored.state(), stored.content()) == (before, stored.known["rows"])

    stored.merge(spark, "next", engine)
    assert stored.content() == stored.known["rows_after"]
    assert stored.by_other_readers() == dict.fromkeys(
        ("duckdb", "polars"), stored.known["rows_after"]
    )
    after = stored.state()
    assert {name: one[1:] for name, one in after.items()} == {
        name: one[1:] for name, one in before.items()
    }
    if engine in stored.known["keeps_files"]:
        assert files & stored.files(), "a data file stays"

    stored.merge(spark, "next", engine)
    assert (stored.state(), stored.content()) == (after, stored.known["rows_after"])
