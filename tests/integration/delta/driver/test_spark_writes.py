"""Commits of Spark between the merges of a query: the index that is kept equals the one built."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from delta.tables import DeltaTable as DeltaLake
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import Engine, merge
from nats_stream_source.delta.tables import TableChangedError
from tests.integration.delta.driver.in_process import (
    InProcessTable,
    index_of,
    model_rows,
    rebuilt,
    table_rows,
)
from tests.integration.delta.merge_model import Entry, Frame, Model, delete, put
from tests.support.delta import rows_of

pytestmark = [pytest.mark.delta, pytest.mark.faults]


class _Query:
    """A query that keeps its table open, and the rows that the table should have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = Model("remove")
        self.table = InProcessTable(path)

    def merge(self, *entries: Entry) -> None:
        self.model.merge(entries)
        self.table.merge(*entries)

    def verify(self) -> None:
        assert table_rows(rows_of(DeltaTable(self.path))) == model_rows(self.model.rows)
        try:
            self.table.state.refresh()
        except TableChangedError:  # RESTORE commits the table's metadata
            self.table.opened.close()
        else:
            assert index_of(self.table.state) == index_of(rebuilt(self.path))


def test_spark_commits_between_merges(spark: SparkSession, frame: Frame, table: Path) -> None:
    query = _Query(table)
    rows = query.model.rows
    target = f"delta.`{table}`"
    query.merge(*[put(f"k{number}", number + 1) for number in range(20)])
    query.merge(put("k1", 30), delete("k2", 31))

    spark.sql(f"DELETE FROM {target} WHERE key IN ('k3', 'k4')")
    del rows["k3"], rows["k4"]
    query.verify()
    query.merge(put("k3", 32), put("k5", 33))

    spark.sql(f"UPDATE {target} SET revision = 100 WHERE key IN ('k5', 'k6')")
    for key in ("k5", "k6"):
        rows[key] = dataclasses.replace(rows[key], revision=100)
    query.verify()
    query.merge(put("k5", 34), put("k6", 101), put("k7", 35))
    query.verify()

    version = DeltaTable(table).version()
    before = dict(rows)
    merged = [put("k8", 200), put("new", 201)]
    (
        DeltaLake.forPath(spark, str(table))
        .alias("t")
        .merge(frame(*merged).drop("delta", "initial").alias("s"), "t.key = s.key")
        .whenMatchedUpdateAll()
        .whenNotMatchedInsertAll()
        .execute()
    )
    query.model.merge(merged)
    query.verify()
    query.merge(delete("k8", 202), put("new", 203), put("k9", 204))

    spark.sql(f"OPTIMIZE {target}")
    query.verify()
    query.merge(put("k10", 205), delete("k11", 206))
    query.verify()

    spark.sql(f"RESTORE TABLE {target} TO VERSION AS OF {version}")
    rows.clear()
    rows.update(before)
    query.verify()
    query.merge(put("k10", 300), delete("k12", 301), put("k2", 302))
    query.verify()


@pytest.mark.parametrize("seed", range(3))
def test_both_engines_in_turn_and_spark_commits(
    spark: SparkSession, frame: Frame, table: Path, seed: int
) -> None:
    """Random batches, some of them replayed, each by another engine or kept table."""
    choice, query = random.Random(seed), _Query(table)
    log: list[Entry] = []

    def batch() -> list[Entry]:
        if log and choice.random() < 0.25:
            return log[choice.randrange(len(log)) :]
        entries = [
            choice.choice((put, put, put, delete))(f"k{choice.randrange(15)}", len(log) + 1 + index)
            for index in range(choice.randint(1, 8))
        ]
        log.extend(entries)
        return entries

    def by_engine(engine: Engine) -> None:
        entries = batch()
        query.model.merge(entries)
        merge(frame(*entries), str(table), engine=engine, upkeep=None)

    steps = [
        lambda: query.merge(*batch()),
        lambda: by_engine("spark"),
        lambda: by_engine("driver"),
        lambda: spark.sql(f"OPTIMIZE delta.`{table}`"),
    ]
    query.merge(*batch())
    taken = [*range(4), *(choice.randrange(3) for _ in range(9))]
    choice.shuffle(taken)
    for number in taken:
        steps[number]()
        query.verify()
