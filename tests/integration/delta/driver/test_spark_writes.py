"""Commits of Spark between the merges of a query: the index that is kept equals the one built."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
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
        if self.table.engine.table.snapshot is None:
            return
        try:
            self.table.state.refresh()
        except TableChangedError:  # RESTORE commits the table's metadata
            self.table.engine.table.close()
        else:
            assert index_of(self.table.state) == index_of(rebuilt(self.path))


@pytest.mark.parametrize("seed", range(3))
def test_engines_in_turn_and_commands_of_spark(
    spark: SparkSession, frame: Frame, table: Path, seed: int
) -> None:
    """Random batches, some of them replayed, each by another engine or kept table."""
    choice, query, target = random.Random(seed), _Query(table), f"delta.`{table}`"
    log, rows = list[Entry](), query.model.rows

    def batch() -> list[Entry]:
        if log and choice.random() < 0.25:
            return log[choice.randrange(len(log)) :]
        first = len(log)
        for number in range(first, first + choice.randint(1, 8)):
            kind = choice.choice((put, put, put, delete))
            log.append(kind(f"k{choice.randrange(15)}", 2 * number))
        return log[first:]

    def by_engine(engine: Engine) -> None:
        entries = batch()
        query.model.merge(entries)
        merge(frame(*entries), str(table), engine=engine, upkeep=None)

    def delete_row() -> None:
        key = choice.choice(list(rows))
        spark.sql(f"DELETE FROM {target} WHERE key = '{key}'")
        del rows[key]

    def update_row() -> None:
        key, revision = choice.choice(list(rows)), 2 * len(log) + 11  # of no entry
        spark.sql(f"UPDATE {target} SET revision = {revision} WHERE key = '{key}'")
        rows[key] = dataclasses.replace(rows[key], revision=revision)

    def restore() -> None:
        version, before = DeltaTable(table).version(), dict(rows)
        query.merge(put("new", 1), delete(choice.choice(list(rows)), 2 * len(log) + 21))
        spark.sql(f"RESTORE TABLE {target} TO VERSION AS OF {version}")
        rows.clear()
        rows.update(before)

    steps = [
        lambda: query.merge(*batch()),
        lambda: by_engine("spark"),
        lambda: by_engine("driver"),
        lambda: spark.sql(f"OPTIMIZE {target}"),
        delete_row,
        update_row,
        restore,
    ]
    log += [put(f"k{number}", 2 * number) for number in range(15)]
    query.merge(*log)
    taken = [*range(len(steps)), *(choice.randrange(3) for _ in range(7))]
    choice.shuffle(taken)
    for number in taken:
        steps[number]()
        query.verify()
