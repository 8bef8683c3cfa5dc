"""Merges of events by Spark, of any size: the state table first, then the table.

**Steps.** 1. Persist the batch, so that it is read once, and validate it. 2. Read the rows and the
state of its keys; of a bucket's entries, only their keys and order. 3. Send all that belongs to a
key to one partition, where the rule computes the changes (:mod:`partition`), and keep these (a
local checkpoint). 4. MERGE the state, then the table. A MERGE without changes is left out; if only
the state has changed, that of the table commits a version without changes.

**Other writers.** Delta's MERGE does not compare with the version that step 2 has read. So each
change carries what was read of its row, and the MERGE fails if the table has another one meanwhile.
Then all is computed again from the newest version; with a state table after any other commit in
between, too: the rows and the state have the events of both writers, so the second time is right. A
part of the changes would not do: a row of this writer can begin where one of the other's ends, by a
delete that only this end shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import pyarrow as pa
from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from nats_stream_source.delta.merge_result import CREATED_COLUMN, MergeResult, created_time
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import DELETED_COLUMN
from nats_stream_source.delta.schema import OWN_PREFIX, stored_type, type_parts
from nats_stream_source.delta.spark.columns import arrow_schema, nullable, quote, spark_schema
from nats_stream_source.delta.spark.partition import (
    A_ROW,
    A_STATE,
    AN_EVENT,
    CONTRADICTIONS,
    COUNT,
    EVENT,
    KIND,
    READ,
    REMOVED,
    ROW,
    STATE,
    STATE_READ,
    partition_work,
)
from nats_stream_source.delta.spark.rows import key_columns
from nats_stream_source.delta.spark.session import SKIPS_EMPTY_COMMITS, temporary_settings
from nats_stream_source.delta.spark.table import SparkTable
from nats_stream_source.errors import ConfigurationError

_CHANGED = "another writer has changed the rows meanwhile"
_REFUSED = "ConfigurationError: "  # in the traceback of an executor


class CommittedMeanwhileError(Exception):
    """Another writer has changed the table since its rows were read."""


class Merge:
    """A merge of a batch, as often as it is run.

    Args:
        name: path or name of the table, for errors.
        frame: the rows of the batch, valid and persisted.
        shape: of their events, with the columns of the tables.
        table: the table.
        state: its state table, if its layout has one.
    """

    def __init__(
        self,
        name: str,
        frame: DataFrame,
        shape: EventShape,
        table: SparkTable,
        state: SparkTable | None,
    ) -> None:
        assert shape.target is not None
        self._name = name
        self._frame = frame
        self._shape = shape
        self._layout = shape.layout
        self._table = table
        self._state = state
        columns = self._layout.table_schema(shape.target).names
        self._written = StructType([table.columns[name] for name in columns])
        # A tie of other events is decided by all values.
        known = [*self._layout.identified, DELETED_COLUMN] if self._layout.entries else columns
        self._known = StructType([one for one in self._written.fields if one.name in known])
        names = [] if state is None else self._layout.state_schema(shape.target).names
        self._recorded = StructType([state.columns[name] for name in names] if state else [])

    def run(self) -> tuple[MergeResult, bool]:
        """What has changed in the table, and whether the state table has changed."""
        layout, table, state = self._layout, self._table, self._state
        version = None if state is None else table.version()
        changes = self._changes()
        timed = (CREATED_COLUMN, "timestamp") in changes.select(f"{A_ROW}.*").dtypes
        created = F.col(f"{A_ROW}.{CREATED_COLUMN}") if timed else F.lit(None).cast("timestamp")
        kinds = changes.groupBy(KIND).agg(
            F.count(F.lit(1)).alias("rows"),
            F.sum(COUNT).alias("contradictions"),
            F.unix_micros(F.max(created)).alias("newest"),
        )
        counts = {row[KIND]: row for row in kinds.collect()}
        recorded = STATE in counts and state is not None
        if recorded and state is not None:
            rows = changes.where(F.col(KIND) == STATE)
            rows = rows.select(KIND, f"{A_STATE}.*", F.col(STATE_READ).alias(READ))
            _merge_as_read(state.target, rows, layout.state("state").identity)
        contradictions = counts[CONTRADICTIONS].contradictions if CONTRADICTIONS in counts else 0
        if not (recorded or ROW in counts or REMOVED in counts):
            return MergeResult("spark", contradictions=contradictions), False
        rows = changes.where(F.col(KIND).isin(ROW, REMOVED)).select(KIND, f"{A_ROW}.*", READ)
        # A MERGE without changes commits, too: so the state's change is a conflict for others, and
        # the next version is this writer's own.
        with temporary_settings(self._frame.sparkSession, {SKIPS_EMPTY_COMMITS: "false"}):
            merged = _merge_as_read(table.target, rows, layout.identity)
        written = counts[ROW].rows if ROW in counts else 0
        vanished = merged.num_inserted_rows + merged.num_updated_rows != written
        if vanished or (version is not None and table.version() != version + 1):
            raise CommittedMeanwhileError(_CHANGED)
        return MergeResult(
            "spark",
            merged.num_inserted_rows,
            merged.num_updated_rows,
            merged.num_deleted_rows,
            newest=created_time(counts[ROW].newest if ROW in counts else None),
            contradictions=contradictions,
        ), recorded

    def _changes(self) -> DataFrame:
        """The changes: of each kind, with its columns in the struct of a row or of a state.

        The structs ``READ`` and ``STATE_READ`` have the row that such a row replaces, as it was
        read.
        """
        table, shape, layout = self._table, self._shape, self._layout
        keys = [f"{OWN_PREFIX}key_{number}" for number in range(len(layout.keys))]
        own = key_columns(table.columns, layout.keys)
        named = [column.alias(name) for column, name in zip(own, keys, strict=True)]
        of_batch = self._frame.select(*named)

        def of_keys(frame: DataFrame, columns: StructType) -> DataFrame:
            rows = frame.select(*map(quote, columns.names), *named)
            return rows.join(of_batch, keys, "left_semi")

        kinds = {AN_EVENT: self._frame.schema, A_ROW: self._known, A_STATE: self._recorded}
        parts = {
            AN_EVENT: (EVENT, self._frame.select("*", *named)),
            A_ROW: (ROW, of_keys(table.target.toDF(), self._known)),
        }
        if self._state is None:
            del kinds[A_STATE]
        else:
            parts[A_STATE] = STATE, of_keys(self._state.target.toDF(), self._recorded)
        frames = []
        for of, (kind, frame) in parts.items():
            structs = [
                (F.struct(*map(quote, columns.names)) if name == of else F.lit(None))
                .cast(nullable(columns))
                .alias(name)
                for name, columns in kinds.items()
            ]
            frames.append(frame.select(*keys, F.lit(kind).alias(KIND), *structs))
        united = reduce(DataFrame.unionByName, frames).repartition(*keys)
        output = StructType(
            [
                StructField(KIND, IntegerType()),
                StructField(COUNT, LongType()),
                StructField(A_ROW, nullable(self._written)),
                StructField(A_STATE, nullable(self._recorded)),
                # A row that the table lacks is null, also in fields that the table's rows have.
                StructField(READ, _stored(self._known)),
                StructField(STATE_READ, _stored(self._recorded)),
            ]
        )
        if self._state is None:
            output = StructType([f for f in output.fields if f.name not in (A_STATE, STATE_READ)])
        work = partition_work(shape, self._name, keys, arrow_schema(output))
        changes = united.sortWithinPartitions(*keys).mapInArrow(work, output)
        try:
            # A persisted DataFrame would be computed again once the state table has changed.
            return changes.localCheckpoint()
        except PySparkException as error:
            text = str(error)
            if _REFUSED not in text:
                raise
            line = text.rpartition(_REFUSED)[2].partition("\n")[0]
            raise ConfigurationError(line) from error


def _merge_as_read(target: DeltaTable, rows: DataFrame, identity: Sequence[str]) -> Row:
    """Upsert and remove rows in one MERGE; returns its counts.

    Args:
        target: the table, or its state table.
        rows: with their kind, and the row that each replaces as it was read.
        identity: the columns that identify a row.

    Raises:
        CommittedMeanwhileError: a row is another one meanwhile; nothing is changed.
    """
    columns: dict[str, str | Column] = {
        quote(name): F.col(f"s.{quote(name)}") for name in rows.columns if name not in (KIND, READ)
    }
    read, key = rows.schema[READ].dataType, quote(identity[0])
    assert isinstance(read, StructType)
    removed = F.col(f"s.{KIND}") == REMOVED
    same = reduce(and_, (_as_read(field) for field in read.fields))
    new = F.col(f"s.{READ}.{key}").isNull()
    # Delta evaluates a condition for all rows, also for those of one side only.
    matched = F.col(f"t.{key}").isNotNull() & F.col(f"s.{key}").isNotNull()
    fails = F.raise_error(F.lit(_CHANGED)).cast("boolean")
    as_read = F.when(same, F.lit(True)).when(matched, fails).otherwise(F.lit(False))
    merger = (
        target.alias("t")
        .merge(rows.alias("s"), reduce(and_, (_equal(f"{quote(name)}") for name in identity)))
        .whenMatchedDelete(removed & as_read)
        .whenMatchedUpdate(~removed & as_read, columns)
        .whenNotMatchedInsert(~removed & new, columns)
    )
    try:
        counts = merger.execute().first()
    except (PySparkException, Py4JJavaError) as error:
        # Other errors show the plan, which has the text, too.
        if f"[USER_RAISED_EXCEPTION] {_CHANGED}" in str(error):
            raise CommittedMeanwhileError(_CHANGED) from error
        raise
    assert counts is not None  # Delta's MERGE returns one row of counts
    return counts


def _equal(column: str) -> Column:
    return F.col(f"t.{column}") == F.col(f"s.{column}")


def _as_read(field: StructField) -> Column:
    """Whether a column of the row has the value that was read; null equals null."""
    now, before = F.col(f"t.{quote(field.name)}"), F.col(f"s.{READ}.{quote(field.name)}")
    kinds = type_parts(arrow_schema(StructType([field])).field(0).type)
    if any(pa.types.is_map(kind) for kind in kinds):  # two maps cannot be compared
        now, before = F.to_json(F.struct(now)), F.to_json(F.struct(before.alias(field.name)))
    return now.eqNullSafe(before)


def _stored(columns: StructType) -> StructType:
    """Columns of which each part can be null."""
    fields = [field.with_type(stored_type(field.type)) for field in arrow_schema(columns)]
    return nullable(spark_schema(pa.schema(fields)))
