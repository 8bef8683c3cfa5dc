"""Random batches whose columns change, by each engine in turn, and the rows by the rules.

A batch has some columns of :data:`COLUMNS`, in any order, with types that contain those of other
batches or are contained by them: structs with some of the fields, smaller and larger numbers. The
models share nothing with the package.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.delta import Engine, merge_changes
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.merge_model import ENGINES, versions
from tests.support.cdc.events import RULES
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
Rules = Literal["entries", "entries-mark", "scd1", "scd1-mark", "scd2"]
Kind = Callable[[random.Random], DataType]
STREAM_CREATED = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Change:
    """An event: the values of its batch's columns, none in a delete."""

    key: str
    seq: int
    delete: bool
    values: Mapping[str, Any]

    def value(self, column: str) -> Any:
        return None if self.delete else self.values.get(column)


@dataclass(frozen=True)
class Batch:
    """Events with one set of columns."""

    fields: tuple[StructField, ...]
    changes: tuple[Change, ...]

    @property
    def columns(self) -> list[str]:
        """The columns that a table without them gets."""
        return [f.name for f in self.fields if not isinstance(f.dataType, NullType)]


class Model:
    """The rows of a table after batches."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.columns: list[str] = []
        self._changes: dict[str, dict[int, Change]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._deleted: dict[str, int] = {}

    def merge(self, batch: Batch) -> None:
        self.columns += [name for name in batch.columns if name not in self.columns]
        newest: dict[str, Change] = {}
        for change in batch.changes:
            self._changes.setdefault(change.key, {})[change.seq] = change
            if change.key not in newest or change.seq > newest[change.key].seq:
                newest[change.key] = change
        for change in newest.values():
            self._apply(change, [f.name for f in batch.fields if f.name in self.columns])

    def _apply(self, change: Change, columns: Sequence[str]) -> None:
        row = self._rows.get(change.key)
        if row is not None and change.seq <= row["seq"]:
            return
        if self.rules == "scd1" and change.seq <= self._deleted.get(change.key, 0):
            return
        if change.delete and self.rules in ("entries", "scd1"):
            self._deleted[change.key] = change.seq
            self._rows.pop(change.key, None)
            return
        row = self._rows.setdefault(change.key, {})
        row |= {name: change.value(name) for name in columns}
        row |= {"key": change.key, "seq": change.seq, "deleted": change.delete}

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows as (key, seq, start, end, deleted, values of the columns)."""
        if self.rules == "scd2":
            return [row for key in sorted(self._changes) for row in self._versions(key)]
        return [
            (
                key,
                row["seq"],
                None,
                None,
                row["deleted"],
                *(normalized(row.get(name)) for name in self.columns),
            )
            for key, row in sorted(self._rows.items())
        ]

    def _versions(self, key: str) -> list[tuple[Any, ...]]:
        versions: list[list[Any]] = []
        opened = False
        for seq, change in sorted(self._changes[key].items()):
            values = [normalized(change.value(name)) for name in self.columns]
            if opened and not change.delete and versions[-1][5:] == values:
                versions[-1][1] = seq
                continue
            if opened:
                versions[-1][3] = seq
            opened = not change.delete
            if opened:
                versions.append([key, seq, seq, None, False, *values])
        return [tuple(version) for version in versions]


class Generator:
    """Random batches for one table.

    Args:
        rng: of the batches.
        keys: how many keys they have.
        widens: whether types can be wider than those of earlier batches; Spark refuses them.
    """

    def __init__(self, rng: random.Random, keys: int, *, widens: bool = True) -> None:
        self._rng = rng
        self._widens = widens
        self._keys = [f"key {number}" for number in range(keys)]
        self._seq = 0
        self._used: set[tuple[str, int]] = set()
        self._values: dict[tuple[str, str, str], Any] = {}

    def batch(self) -> Batch:
        names = self._rng.sample(list(COLUMNS), self._rng.randrange(len(COLUMNS)))
        fields = tuple(self._field(name) for name in names)
        changes = [self._change(fields) for _ in range(self._rng.randrange(1, 9))]
        return Batch(fields, tuple(changes))

    def _field(self, name: str) -> StructField:
        kinds = COLUMNS[name] if self._widens else COLUMNS[name][:1]
        return StructField(name, self._rng.choice(kinds)(self._rng), True)

    def _change(self, fields: Sequence[StructField]) -> Change:
        self._seq += self._rng.randrange(1, 4)
        # A sequence between those of earlier events, of any key: late, and used once.
        late = self._rng.random() < 0.2
        seq = self._seq * 10 if not late else self._rng.randrange(self._seq) * 10 + 5
        key = self._rng.choice(self._keys)
        if (key, seq) in self._used:
            seq = self._seq * 10
        self._used.add((key, seq))
        delete = self._rng.random() < 0.2
        values = {f.name: None if delete else self._value(key, f) for f in fields}
        return Change(key, seq, delete, values)

    def _value(self, key: str, field: StructField) -> Any:
        """Mostly the value that the key has had: an update without effect."""
        of = key, field.name, field.dataType.json()
        if of not in self._values or self._rng.random() < 0.2:
            self._values[of] = value(self._rng, field.dataType)
        return self._values[of]


def value(rng: random.Random, kind: DataType) -> Any:
    """A random value of a type, from few."""
    if isinstance(kind, NullType) or rng.random() < 0.2:
        return None
    if isinstance(kind, StructType):
        return {field.name: value(rng, field.dataType) for field in kind.fields}
    if isinstance(kind, ArrayType):
        return [value(rng, kind.elementType) for _ in range(rng.randrange(2))]
    if isinstance(kind, MapType):
        return {"k": value(rng, kind.valueType)}
    if isinstance(kind, (DoubleType, FloatType)):
        return rng.choice([0.5, -2.0])
    if isinstance(kind, StringType):
        return rng.choice(["x", "y"])
    if isinstance(kind, TimestampNTZType):
        return STREAM_CREATED.replace(tzinfo=None)
    if isinstance(kind, DateType):
        return STREAM_CREATED.date()
    if isinstance(kind, DecimalType):
        return Decimal(rng.choice([1, 2]))
    return rng.choice([1, 2])


def normalized(value: Any) -> Any:
    """A value in which fields that are null and missing ones are the same, and a date is a time."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        value = dict(value)  # a map as Arrow has it
    if isinstance(value, dict):
        fields = ((name, normalized(field)) for name, field in sorted(value.items()))
        return ("struct", *(field for field in fields if field[1] is not None))
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day)
    return [normalized(one) for one in value] if isinstance(value, list) else value


def _struct(rng: random.Random, *, wide: bool = False) -> DataType:
    """A struct with some of its fields, in any order."""
    fields = [
        StructField(name, kinds[0] if wide else rng.choice(kinds))
        for name, kinds in _FIELDS.items()
    ]
    chosen = [fields[0], *(field for field in fields[1:] if rng.random() < 0.5)]
    rng.shuffle(chosen)
    return StructType(chosen)


def _map(rng: random.Random, *, wide: bool = False) -> DataType:
    """A map whose values are structs, with a field or two."""
    fields = [StructField("x", LongType() if wide else rng.choice([IntegerType(), LongType()]))]
    more = [StructField("y", StringType())] if wide or rng.random() < 0.3 else []
    return MapType(StringType(), StructType([*fields, *more]))


_FIELDS: dict[str, list[DataType]] = {
    "x": [LongType(), IntegerType()],
    "y": [StringType()],
    "z": [StructType([StructField("deep", LongType())])],
    "when": [TimestampNTZType()],
}
COLUMNS: dict[str, list[Kind]] = {
    "number": [lambda rng: LongType(), lambda rng: IntegerType(), lambda rng: ShortType()],
    "text": [lambda rng: StringType(), lambda rng: NullType()],
    "real": [lambda rng: DoubleType(), lambda rng: FloatType()],
    "amount": [
        lambda rng: DecimalType(12, 4),
        lambda rng: DecimalType(6, 2),
        lambda rng: IntegerType(),
    ],
    "ratio": [lambda rng: DoubleType(), lambda rng: IntegerType(), lambda rng: ShortType()],
    "when": [lambda rng: TimestampNTZType(), lambda rng: DateType()],
    "object": [lambda rng: _struct(rng, wide=True), _struct],
    "list": [lambda rng: ArrayType(_struct(rng, wide=True)), lambda rng: ArrayType(_struct(rng))],
    "map": [lambda rng: _map(rng, wide=True), _map],
    "Mixed-1": [lambda rng: StringType()],
}
"""Columns and their types in a batch, the widest first."""


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
