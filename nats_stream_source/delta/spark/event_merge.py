"""Merges of events by Spark, of any size: the state table first, then the table.

**Steps.** 1. Persist the events, so that the batch is read once. 2. Read the rows and the state of
their keys. 3. Send all that belongs to a key to one partition, where
:mod:`nats_stream_source.delta.cdc` computes the changes (``mapInArrow``), and keep these
(a local checkpoint).
4. MERGE the state, then the table. A MERGE without changes is left out; if only the state has
changed, that of the table commits a version without changes.

**Other writers.** Delta's MERGE does not compare with the version that step 2 has read. So each
change carries the row that was read, and the MERGE fails if the table has another one meanwhile.
Then, and after any other commit in between, all is computed again from the newest version: the rows
and the state have the events of both writers, so the second time is right. A part of the changes
would not do: a row of this writer can begin where one of the other's ends, by a delete that only
this end shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_

import numpy as np
import pyarrow as pa
from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    IntegerType,
    LongType,
    MapType,
    StructField,
    StructType,
    VariantType,
)

from nats_stream_source.delta.cdc.comparison import positions_in
from nats_stream_source.delta.cdc.events import Events, require_valid_frame
from nats_stream_source.delta.cdc.layout import Layout
from nats_stream_source.delta.cdc.merge_events import changes_of
from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.spark.conflicts import CONFLICTS
from nats_stream_source.delta.spark.merge_into import SparkTable, max_created, merge_result
from nats_stream_source.delta.spark.settings import temporary_setting
from nats_stream_source.delta.spark.upkeep import upkeep_after_spark_commit
from nats_stream_source.delta.stored_columns import stored_type, type_parts
from nats_stream_source.delta.table import OWN_PREFIX, quote
from nats_stream_source.delta.upkeep import Upkeep

# What a row that goes to a partition, or comes from it, is.
_KIND, _COUNT = OWN_PREFIX + "kind", OWN_PREFIX + "count"
_EVENT, _ROW, _STATE, _REMOVED, _CONTRADICTIONS = range(5)
_AN_EVENT, _A_ROW, _A_STATE = (OWN_PREFIX + name for name in ("event", "row", "state"))
_READ, _STATE_READ = OWN_PREFIX + "read", OWN_PREFIX + "state_read"

# A MERGE without changes commits, too: so the state's change is a conflict for others, and the next
# version is this writer's own.
_SKIPS_EMPTY_COMMITS = "spark.databricks.delta.skipRecordingEmptyCommits"

_CHANGED = "another writer has changed the rows meanwhile"


class _CommittedMeanwhileError(Exception):
    """Another writer has committed since the rows were read."""


def merge_by_spark(
    spark: SparkSession,
    name: str,
    events: Events,
    prepare: Callable[[], tuple[SparkTable, SparkTable | None]],
    upkeep: Upkeep | None,
) -> MergeResult:
    """Merge events; returns what has changed in the table.

    Args:
        spark: the session of the tables.
        name: path or name of the table.
        events: they are read once.
        prepare: returns the table, and its state table if its layout has one; called if the events
            are valid.
        upkeep: of the table.
    """
    frame = events.frame.persist()
    try:
        require_valid_frame(frame, events.layout)
        table, state = prepare()
        if state is not None:
            state.add_columns(events.layout.state_schema(events.schema).fields, table)
        table.add_columns(events.columns)
        merge = _Merge(frame, events, table, state)
        conflicts = (*CONFLICTS, _CommittedMeanwhileError)
        result, recorded = retry_conflicts(merge.run, name, conflicts)
    finally:
        frame.unpersist()
    if upkeep and recorded and state is not None:
        upkeep_after_spark_commit(spark, state.target, upkeep, name)
    if not (upkeep and result.changed):
        return result
    maintained = upkeep_after_spark_commit(spark, table.target, upkeep, name)
    return replace(result, maintained=maintained)


class _Merge:
    def __init__(
        self, frame: DataFrame, events: Events, table: SparkTable, state: SparkTable | None
    ) -> None:
        self._frame = frame
        self._events = events
        self._table = table
        self._state = state

    def run(self) -> tuple[MergeResult, bool]:
        """What has changed in the table, and whether the state table has changed."""
        version, layout = self._table.version(), self._events.layout
        # A persisted DataFrame would be computed again once the state table has changed.
        changes = self._changes().localCheckpoint()
        created = max_created(changes.select(f"{_A_ROW}.*").dtypes, f"{_A_ROW}.")
        kinds = changes.groupBy(_KIND).agg(
            F.count(F.lit(1)).alias("rows"),
            F.sum(_COUNT).alias("contradictions"),
            created.alias("newest"),
        )
        counts = {row[_KIND]: row for row in kinds.collect()}
        recorded = _STATE in counts and self._state is not None
        if recorded and self._state is not None:
            rows = changes.where(F.col(_KIND) == _STATE)
            rows = rows.select(_KIND, f"{_A_STATE}.*", F.col(_STATE_READ).alias(_READ))
            _merge_as_read(self._state.target, rows, layout.state("state").identity)
        contradictions = counts[_CONTRADICTIONS].contradictions if _CONTRADICTIONS in counts else 0
        result = MergeResult("spark", contradictions=contradictions)
        changed = sum(counts[kind].rows for kind in (_ROW, _REMOVED) if kind in counts)
        if changed or recorded:
            rows = changes.where(F.col(_KIND).isin(_ROW, _REMOVED))
            with temporary_setting(self._frame.sparkSession, _SKIPS_EMPTY_COMMITS, "false"):
                rows = rows.select(_KIND, f"{_A_ROW}.*", _READ)
                merged = _merge_as_read(self._table.target, rows, layout.identity)
            if self._table.version() != version + 1:
                raise _CommittedMeanwhileError("another writer has committed meanwhile")
            newest = counts[_ROW].newest if _ROW in counts else None
            result = merge_result(merged, newest, contradictions)
        return result, recorded

    def _changes(self) -> DataFrame:
        """The changes: of each kind, with its columns in the struct ``row`` or ``state``.

        The structs ``read`` and ``state_read`` have the row that such a row replaces, as it was
        read.
        """
        layout, events = self._events.layout, self._frame
        table = self._table.schema
        columns = [f.name for f in layout.table_schema(self._events.schema).fields]
        rows = self._of_keys(self._table.target.toDF().select(*map(quote, columns)))
        state_schema = layout.state_schema(self._events.schema)
        parts = [(_EVENT, _AN_EVENT, events), (_ROW, _A_ROW, rows)]
        if self._state is not None:
            state = self._state.target.toDF().select(*map(quote, state_schema.names))
            parts.append((_STATE, _A_STATE, self._of_keys(state)))
        row_schema = StructType([table[name] for name in columns])
        kinds = {_AN_EVENT: events.schema, _A_ROW: row_schema, _A_STATE: state_schema}
        frames = []
        for kind, of, frame in parts:
            structs = [
                (F.struct(*map(quote, frame.columns)) if name == of else F.lit(None))
                .cast(_nullable(schema))
                .alias(name)
                for name, schema in kinds.items()
            ]
            keys = [F.col(quote(key)) for key in layout.keys]
            frames.append(frame.select(*keys, F.lit(kind).alias(_KIND), *structs))
        united = reduce(DataFrame.unionByName, frames).repartition(
            *(F.col(quote(key)) for key in layout.keys)
        )
        output = StructType(
            [
                StructField(_KIND, IntegerType()),
                StructField(_COUNT, LongType()),
                StructField(_A_ROW, _nullable(row_schema)),
                StructField(_A_STATE, _nullable(state_schema)),
                # A row that the table lacks is null, also in fields that the table's rows have.
                StructField(_READ, stored_type(row_schema)),
                StructField(_STATE_READ, stored_type(state_schema)),
            ]
        )
        # Spark's own conversion, whose function in Python differs between versions.
        arrow = united.sparkSession.createDataFrame([], output).toArrow().schema
        work = _partition_work(layout, self._events.tracked, arrow)
        return united.select(_KIND, *kinds).mapInArrow(work, output)

    def _of_keys(self, frame: DataFrame) -> DataFrame:
        keys = [*self._events.layout.keys]
        return frame.join(
            self._frame.select(*map(quote, keys)).distinct(), keys, "left_semi"
        ).select(*map(quote, frame.columns))


def _merge_as_read(target: DeltaTable, rows: DataFrame, identity: Sequence[str]) -> Row:
    """Upsert and remove rows in one MERGE; returns its counts.

    Args:
        target: the table, or its state table.
        rows: with their kind, and the row that each replaces as it was read.
        identity: the columns that identify a row.

    Raises:
        _CommittedMeanwhileError: a row is another one meanwhile; nothing is changed.
    """
    read, key = f"s.{quote(_READ)}", quote(identity[0])
    columns: dict[str, str | Column] = {
        quote(name): F.col(f"s.{quote(name)}")
        for name in rows.columns
        if name not in (_KIND, _READ)
    }
    removed = F.col(f"s.{_KIND}") == _REMOVED
    kind = rows.schema[_READ].dataType
    assert isinstance(kind, StructType)
    same = reduce(and_, (_as_read(field, read) for field in kind))
    new = F.col(f"{read}.{key}").isNull()
    # Delta evaluates a condition for all rows, also for those of one side only.
    matched = F.col(f"t.{key}").isNotNull() & F.col(f"s.{key}").isNotNull()
    fails = F.raise_error(F.lit(_CHANGED)).cast("boolean")
    as_read = F.when(same, F.lit(True)).when(matched, fails).otherwise(F.lit(False))
    merger = (
        target.alias("t")
        .merge(rows.alias("s"), _same(identity))
        .whenMatchedDelete(removed & as_read)
        .whenMatchedUpdate(~removed & as_read, columns)
        .whenNotMatchedInsert(~removed & new, columns)
    )
    try:
        counts = merger.execute().first()
    except (PySparkException, Py4JJavaError) as error:
        # Other errors show the plan, which has the text, too.
        if f"[USER_RAISED_EXCEPTION] {_CHANGED}" in str(error):
            raise _CommittedMeanwhileError(_CHANGED) from error
        raise
    assert counts is not None  # Delta's MERGE returns one row of counts
    return counts


def _same(columns: Sequence[str]) -> Column:
    return reduce(and_, (F.col(f"t.{quote(c)}") == F.col(f"s.{quote(c)}") for c in columns))


def _as_read(field: StructField, read: str) -> Column:
    """Whether a column of the row has the value that was read; null equals null."""
    now, before = (F.col(f"{of}.{quote(field.name)}") for of in ("t", read))
    if any(isinstance(part, (MapType, VariantType)) for part in type_parts(field.dataType)):
        now, before = F.to_json(F.struct(now)), F.to_json(F.struct(before.alias(field.name)))
    return now.eqNullSafe(before)


def _nullable(schema: StructType) -> StructType:
    return StructType([StructField(f.name, f.dataType, True) for f in schema.fields])


def _partition_work(
    layout: Layout, tracked: Sequence[str] | None, output: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = [batch for batch in batches if batch.num_rows]
        if not parts:
            return
        united = pa.Table.from_batches(parts)
        kinds = united[_KIND].to_numpy()
        of_kind = {
            kind: _unpacked(united.filter(pa.array(kinds == kind))[name])
            for kind, name in ((_EVENT, _AN_EVENT), (_ROW, _A_ROW), (_STATE, _A_STATE))
        }
        if not len(of_kind[_EVENT]):
            return

        def reader(table: pa.Table) -> Callable[[pa.Table, Sequence[str]], pa.Table]:
            def read(keys: pa.Table, columns: Sequence[str]) -> pa.Table:
                wanted = positions_in(table, keys, layout.keys) >= 0
                return table.filter(pa.array(wanted)).select(list(columns))

            return read

        changes = changes_of(
            of_kind[_EVENT], layout, tracked, reader(of_kind[_ROW]), reader(of_kind[_STATE])
        )
        row = (_A_ROW, _READ, of_kind[_ROW], layout.identity)
        state = (_A_STATE, _STATE_READ, of_kind[_STATE], layout.state("state").identity)
        for kind, rows, (field, read_field, table, identity) in (
            (_ROW, changes.upserts, row),
            (_REMOVED, changes.removed, row),
            (_STATE, changes.state, state),
        ):
            if len(rows):
                at = positions_in(rows, table, identity)
                read = table.take(pa.array(np.maximum(at, 0), mask=at < 0))
                yield from _packed(kind, {field: rows, read_field: read}, len(rows), 0, output)
        if changes.contradictions:
            yield from _packed(_CONTRADICTIONS, {}, 1, changes.contradictions, output)

    return work


def _unpacked(column: pa.ChunkedArray) -> pa.Table:
    names = [field.name for field in column.type]
    return pa.table(column.flatten(), names=names)


def _packed(
    kind: int, structs: dict[str, pa.Table], count: int, total: int, output: pa.Schema
) -> list[pa.RecordBatch]:
    columns = [pa.array(np.full(count, kind, np.int32)), pa.array(np.full(count, total, np.int64))]
    for field in list(output)[2:]:
        table = structs.get(field.name)
        if table is None:
            columns.append(pa.nulls(count, field.type))
            continue
        arrays = [
            table[inner.name].cast(inner.type).combine_chunks()
            if inner.name in table.column_names
            else pa.nulls(count, inner.type)
            for inner in field.type
        ]
        columns.append(pa.StructArray.from_arrays(arrays, fields=list(field.type)))
    return list(pa.table(columns, schema=output).to_batches())
