"""The batches of a query of Spark: their events, and how these reach the rule.

**Columns.** Expressions in ``sequence_by`` and ``apply_as_deletes`` see all columns of the batch.
For rows of a bucket in their own order, the event columns are computed in Arrow, see
:mod:`nats_stream_source.delta.rules.events`: as expressions of Spark they would be analysed and
compiled again for each batch. Else Spark computes them in one select.

**A small batch** is collected as it is, up to a limit of rows, if the last one was small: a
reduction by the executors is a second Python step of each task, which takes as long as all the rest
of a batch of some hundred rows. The limit follows the size of the rows. A batch that exceeds it is
read again, and the rows of the first attempt, which can be a part of the batch, are dropped.

**A batch** is reduced by the executors to the events that decide (``mapInArrow``), without a
shuffle, and read once. A partition stops at its share of what is collected at once.

**A larger batch** is reduced, persisted, measured and, if no event is invalid, collected part by
part. A hash of the key decides on the part: all events of a key are merged together, since a PUT
that is merged after its key's delete would revive the row. A part is collected in steps, since the
driver's JVM holds what is on its way to this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, functions as F
from pyspark.sql.types import LongType, StructField, StructType

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.rules.changes import invalid_events, require_valid
from nats_stream_source.delta.rules.events import (
    PUT,
    ChangeRules,
    EventBatch,
    EventShape,
    event_shape,
    is_entries,
)
from nats_stream_source.delta.rules.layout import (
    DELETE,
    ORDER_COLUMNS,
    SEQUENCE,
    TIME,
    UNAVAILABLE,
    Layout,
)
from nats_stream_source.delta.rules.rows import DecidingEvents
from nats_stream_source.delta.schema import OWN_PREFIX, validate_names
from nats_stream_source.delta.spark.columns import arrow_schema, nullable, quote
from nats_stream_source.errors import ConfigurationError

# Up to here the rows of a batch reach the driver faster than the executors start to reduce them.
_FEW_ROWS = 10_000
_FEW_BYTES = 8 << 20

MAX_ROWS = 1_000_000
MAX_BYTES = 256 << 20
"""The bound of a part, in rows and in bytes of Arrow."""

ONCE_BYTES = 64 << 20
"""What the JVM of the driver holds at once, twice, while rows are collected."""

_GROUP_BYTES = 64 << 20  # an executor holds twice as much
_MANY_PARTITIONS = 32  # assumed of a query's first batch

# Columns that user tables do not have. The first row of each group has the rows that were read for
# it, or _EXCEEDED, its bytes, and how many of its events are invalid.
_READ, _BYTES, _INVALID = (OWN_PREFIX + name for name in ("read", "bytes", "invalid"))
_SLOT = OWN_PREFIX + "slot"  # of the key, by its hash
_SLOTS = 4096
_OWN = (_READ, _BYTES, _INVALID, _SLOT)
_EXCEEDED = -1

_Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def batch_of(frame: DataFrame, rules: ChangeRules, collector: Collector) -> EventBatch:
    """The events of a batch; ConfigurationError if the rules do not fit it."""
    columns = frame.columns
    rules.validate_columns(columns)
    validate_names(columns)
    selected, entries = rules.selected(columns), is_entries(columns)
    times = rules.has_times(columns)
    computed = (
        entries
        and rules.default_order
        and {*ORDER_COLUMNS, "operation", *(("created",) if times else ())} <= {*selected}
        and rules.unavailable_columns is None
    )
    if computed:
        # A drop is a call of the JVM, where every named column would be one.
        rows = frame.drop(*(name for name in columns if name not in selected))
    else:
        own = _event_columns(rules, columns)
        try:
            rows = frame.select(*(F.col(quote(name)) for name in selected), *own)
        except AnalysisException as error:
            raise ConfigurationError(
                f"could not merge the batch: sequence_by or apply_as_deletes is invalid "
                f"({first_line(error)}); the columns are {', '.join(columns)}"
            ) from error
    tracks_all = rules.stored_as_scd_type == 2 and not rules.track_history_column_list
    parts = rules.sequence_by or ORDER_COLUMNS
    in_sequence = _in_sequence(frame, parts) if tracks_all else ()
    shape = event_shape(arrow_schema(rows.schema), rules, columns, in_sequence, computed=computed)
    return EventBatch(shape, partial(collector.parts, rows))


def _event_columns(rules: ChangeRules, columns: Sequence[str]) -> list[Column]:
    own = []
    if SEQUENCE in rules.order(columns):
        own.append(_sequence_column(rules.sequence_by or ORDER_COLUMNS, columns).alias(SEQUENCE))
    deletes = rules.apply_as_deletes
    if deletes is None and is_entries(columns):
        deletes = PUT
    deleting = F.lit(False) if deletes is None else _expression(deletes, columns)
    own.append(F.coalesce(deleting, F.lit(False)).alias(DELETE))
    if rules.has_times(columns):
        own.append(F.col("created").alias(TIME))
    if rules.unavailable_columns is not None:
        own.append(F.col(quote(rules.unavailable_columns)).alias(UNAVAILABLE))
    return own


def _expression(part: str | Column, columns: Sequence[str]) -> Column:
    """A column by its name, else an SQL expression."""
    if isinstance(part, Column):
        return part
    return F.col(quote(part)) if part in columns else F.expr(part)


def _sequence_column(parts: Sequence[str | Column], columns: Sequence[str]) -> Column:
    """The sequence: a struct if it has several parts."""
    if len(parts) == 1:
        return _expression(parts[0], columns)
    named = [
        part if isinstance(part, str) and part in columns else f"_{number}"
        for number, part in enumerate(parts, start=1)
    ]
    return F.struct(
        *(_expression(part, columns).alias(name) for part, name in zip(parts, named, strict=True))
    )


def _in_sequence(batch: DataFrame, parts: Sequence[str | Column]) -> frozenset[str]:
    """The columns of a batch that are a part of its sequence as they are or cast, or in a struct.

    A column that an expression computes a part from is not one of them: a payload can have the
    sequence and the values. Of a client of Spark Connect, only names are known.
    """
    columns = batch.columns
    found = {part for part in parts if isinstance(part, str) and part in columns}
    others = [part for part in parts if not isinstance(part, str) or part not in columns]
    if others and hasattr(batch, "_jdf"):
        selected = batch.select(*(_expression(part, columns) for part in others))
        plan = selected._jdf.queryExecution().analyzed()
        # As an expression has named them; names that differ in case only are refused.
        own = {name.lower(): name for name in columns}
        found.update(own[name.lower()] for name in _attributes(plan.projectList()))
    return frozenset(found)


def _attributes(expressions: Any) -> Iterator[str]:
    """The names of the attributes that Catalyst's expressions are, or that their structs have."""
    for number in range(expressions.length()):
        one = expressions.apply(number)
        while (kind := one.getClass().getSimpleName()) in ("Alias", "Cast"):
            one = one.child()
        if kind == "AttributeReference":
            yield one.name()
        elif kind == "CreateNamedStruct":
            yield from _attributes(one.valExprs())


class Collector:
    """Collects the batches of one query, one after the other: what it has learned of the last ones.

    Attributes:
        few: rows up to which the next batch is collected as it is.
        partitions: into how many partitions the last batch was divided; 0 before the first.
        large: whether the last batch was more than what is collected at once.
    """

    def __init__(self) -> None:
        self.few = 0
        self.partitions = 0
        self.large = False

    def parts(self, frame: DataFrame, shape: EventShape) -> Iterator[pa.Table]:
        """The rows whose events decide; they are read twice if they are many more than before."""
        if self.few:
            rows = frame.limit(self.few + 1).toArrow()
            if rows.num_rows <= self.few:
                self._learn(rows, rows.num_rows)
                yield rows
                return
        if not self.large:
            reduced = self._reduced(frame, shape)
            if reduced is not None:
                yield reduced
                return
        yield from self._parts(frame, shape)

    def _reduced(self, frame: DataFrame, shape: EventShape) -> pa.Table | None:
        """All events that decide; None if they exceed the bound."""
        partitions = self.partitions
        if not partitions:
            shuffled = frame.sparkSession.conf.get("spark.sql.shuffle.partitions", None)
            partitions = max(_MANY_PARTITIONS, int(shuffled or 0))
        share = MAX_ROWS // partitions, ONCE_BYTES // partitions
        collected = _reducing(frame, shape, share).toArrow()
        read = collected[_READ]
        if pc.any(pc.equal(read, _EXCEEDED)).as_py():
            return None
        self.partitions = max(1, len(read) - read.null_count)
        rows = collected.drop_columns([_READ, _BYTES, _INVALID])
        self._learn(rows, pc.sum(read).as_py() or 0)
        return rows

    def _parts(self, frame: DataFrame, shape: EventShape) -> Iterator[pa.Table]:
        """The events that decide, of a batch of any size."""
        layout, reduced = shape.layout, _reducing(frame, shape, None)
        keys = [
            # One value for equal keys: 0.0 in place of -0.0.
            F.col(quote(key)) + F.lit(0.0) if kind in ("float", "double") else F.col(quote(key))
            for key, kind in reduced.dtypes
            if key in layout.keys
        ]
        slot = F.pmod(F.xxhash64(*keys), F.lit(_SLOTS)).cast("int").alias(_SLOT)
        # Sorted, so that a part is read from its own blocks of the cache only. On disk: cached rows
        # would leave the driver of a small machine, whose JVM has them too, no room for a merge.
        cached = reduced.select("*", slot).sortWithinPartitions(_SLOT)
        persisted = cached.persist(StorageLevel.DISK_ONLY)
        try:
            measured = persisted.agg(
                F.count(F.lit(1)).alias("rows"),
                F.coalesce(F.sum(_BYTES), F.lit(0)).alias("bytes"),
                F.coalesce(F.sum(_READ), F.lit(0)).alias("read"),
                F.count(_READ).alias("partitions"),
                F.coalesce(F.sum(_INVALID), F.lit(0)).alias("invalid"),
            ).first()
            assert measured is not None  # an aggregate without GROUP BY has one row
            count = max(1, -(-measured.rows // MAX_ROWS), -(-measured.bytes // MAX_BYTES))
            steps = -(-measured.bytes // (count * ONCE_BYTES)) or 1  # of a part
            edges = np.linspace(0, _SLOTS, min(count, _SLOTS) * steps + 1).astype(int).tolist()
            slices = [
                persisted.where(F.col(_SLOT).between(start, end - 1)).drop(*_OWN)
                for start, end in pairwise(edges)
            ]
            for one in slices if measured.invalid else ():  # before a part is merged
                events = replace(shape, target=None).events(one.toArrow(), "")
                require_valid(events, layout, measured.invalid)
            self.large = len(slices) > 1
            self.partitions = max(1, measured.partitions)
            self.few = 0
            for first in range(0, len(slices), steps):
                part = pa.concat_tables([one.toArrow() for one in slices[first : first + steps]])
                if not self.large:
                    self._learn(part, measured.read)
                yield part
        finally:
            persisted.unpersist()

    def _learn(self, rows: pa.Table, read: int) -> None:
        if rows.num_rows:
            few = min(_FEW_ROWS, _FEW_BYTES * rows.num_rows // max(1, rows.nbytes))
            self.few = few if read <= few else 0


def _reducing(frame: DataFrame, shape: EventShape, share: tuple[int, int] | None) -> DataFrame:
    """The events that decide, as each executor finds them, with the columns of a group's size.

    A partition stops after its share of rows and bytes, if there is one.
    """
    names = frame.columns
    own = [StructField(name, LongType()) for name in (_READ, _BYTES, _INVALID)]
    output = StructType([*nullable(frame.schema).fields, *own])
    # `mapInArrow` resolves names as expressions: a dot is a field, a backquote an error.
    plain = frame.toDF(*(f"{OWN_PREFIX}{number}" for number in range(len(names))))
    return plain.mapInArrow(_work(names, shape, share), output)


def _work(names: list[str], shape: EventShape, share: tuple[int, int] | None) -> _Work:
    layout = shape.layout
    order = ORDER_COLUMNS if shape.computed else layout.order

    def reduce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = size = 0
        named = (batch.rename_columns(names) for batch in batches)
        for group, read in _groups(named, layout):
            rows, size = rows + group.num_rows, size + group.nbytes
            exceeded = share is not None and (rows > share[0] or size > share[1])
            group = group[:1] if exceeded else group
            # What is collected at once is verified by the driver.
            invalid = 0 if share else int(invalid_events(group, layout, order).sum())
            own = {_READ: _EXCEEDED if exceeded else read, _BYTES: group.nbytes, _INVALID: invalid}
            for name, value in own.items():
                column = pa.array([value, *([None] * (len(group) - 1))], pa.int64())
                group = group.append_column(name, column)
            yield from group.to_batches()
            if exceeded:
                return

    return reduce


def _groups(batches: Iterator[pa.RecordBatch], layout: Layout) -> Iterator[tuple[pa.Table, int]]:
    """The events that decide of each group of batches, and how many rows it had."""
    deciding: DecidingEvents | None = None
    read = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        deciding = deciding or DecidingEvents(batch.schema, layout)
        deciding.add(batch)
        read, size = read + batch.num_rows, size + batch.nbytes
        if size >= _GROUP_BYTES:
            yield deciding.table(), read
            deciding, read, size = None, 0, 0
    if deciding is not None:
        yield deciding.table(), read
