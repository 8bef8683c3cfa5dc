"""Random batches whose columns change, by each engine in turn.

The oracle of columns and rows is ``tests.support.cdc.changing_columns``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from nats_stream_source.delta import Engine, merge_changes
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.merge_model import ENGINES
from tests.integration.delta.table_content import versions
from tests.support.cdc.changing_columns import (
    STREAM_CREATED,
    Batch,
    Generator,
    Model,
    Rules,
    normalized,
)
from tests.support.cdc.events import RULES
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
ARGUMENTS: dict[Rules, dict[str, Any]] = {
    "entries": {},
    "entries-mark": {"deletes": "mark"},
    "scd1": RULES,
    "scd1-mark": {**RULES, "deletes": "mark"},
    "scd2": {**RULES, "stored_as_scd_type": 2},
}


@pytest.mark.parametrize("seed", range(10))
def test_random_columns_give_rows_of_rules(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    run_schedule(spark, tmp_path, seed, ["driver"], vectors=seed < 5)


@pytest.mark.parametrize("seed", [1002, 1004])
def test_random_columns_give_rows_of_rules_with_every_engine(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    run_schedule(spark, tmp_path, seed, ENGINES, batches=4)


@pytest.mark.faults
@pytest.mark.xdist_group("spark delta cdc columns")
@pytest.mark.parametrize("part", range(10))
def test_many_random_columns_give_rows_of_rules(
    spark: SparkSession, tmp_path: Path, part: int
) -> None:
    for seed in range(2000 + part * 50, 2050 + part * 50):
        engines = ENGINES if seed // 5 % 5 == 0 else ENGINES[:1]
        run_schedule(spark, tmp_path / str(seed), seed, engines, vectors=seed // 5 % 2 == 0)


def run_schedule(
    spark: SparkSession,
    directory: Path,
    seed: int,
    engines: list[Engine],
    batches: int = 8,
    vectors: bool = True,
) -> None:
    rng = random.Random(seed)
    rules = list(ARGUMENTS)[seed % len(ARGUMENTS)]
    table = directory / "fleet"
    arguments = ARGUMENTS[rules]
    if not vectors and engines == ["driver"]:
        arguments = {**arguments, "deletion_vectors": False}
    mergers = {name: merge_changes(str(table), **arguments, engine=name) for name in engines}
    generator, model = Generator(rng, 4, widens="spark" not in engines), Model(rules)
    seen: list[Batch] = []
    for _ in range(batches):
        batch = rng.choice(seen) if seen and rng.random() < 0.2 else generator.batch()
        seen.append(batch)
        engine = rng.choice(engines)
        if len(seen) > 1 and rng.random() < 0.3:
            refused(spark, rules, table, mergers[engine], batch)
        mergers[engine](frame(spark, rules, batch))
        model.merge(batch)
        assert stored(table, rules, model) == sorted(model.rows()), (seed, engine)


def refused(spark: SparkSession, rules: Rules, table: Path, merger: Any, batch: Batch) -> None:
    """A batch with a column of another type changes nothing."""
    columns = [field.name for field in DeltaTable(table).schema().fields]
    known = [f for f in batch.fields if f.name in columns and f.name in batch.columns]
    if not known:
        return
    bad = frame(spark, rules, batch).withColumn(known[0].name, F.lit(b"x"))
    before = versions(table)
    with pytest.raises(ConfigurationError, match=r"BINARY in the batch, expected .* as in the"):
        merger(bad)
    assert versions(table) == before


def frame(spark: SparkSession, rules: Rules, batch: Batch) -> DataFrame:
    entries = rules.startswith("entries")
    own = [StructField("key", StringType())]
    if entries:
        own += [StructField("revision", LongType()), StructField("operation", StringType())]
        own += [StructField("stream_created", TimestampType())]
    else:
        own += [StructField("seq", LongType()), StructField("op", StringType())]
    rows = []
    for change in batch.changes:
        operation = ("DEL" if change.delete else "PUT") if entries else "UD"[change.delete]
        created = (STREAM_CREATED,) if entries else ()
        rows.append((change.key, change.seq, operation, *created, *change.values.values()))
    return spark.createDataFrame(rows, StructType([*own, *batch.fields]))


def stored(table: Path, rules: Rules, model: Model) -> list[tuple[Any, ...]]:
    sequence = "revision" if rules.startswith("entries") else "seq"
    return sorted(
        (
            row["key"],
            row[sequence],
            row.get("__START_AT"),
            row.get("__END_AT"),
            row.get("deleted", False),
            *(normalized(row[name]) for name in model.columns),
        )
        for row in rows_of(DeltaTable(table))
    )
