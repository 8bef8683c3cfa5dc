"""Merge batches of entries into the Delta table that follows their bucket.

**Order.** Of two entries of a key, the newer one has the greater ``(stream_created, revision)``.
The revisions of a re-created bucket start at 1 again, so only ``stream_created`` distinguishes its
entries from those of the earlier bucket. Every step of both engines compares by this order only,
not by the position of a row in the batch nor by the number of the batch. Therefore a batch can be
merged any number of times, batches can overlap, and the engines can alternate: an entry that the
table already contains is not newer than itself.

**Steps.** 1. Select the newest entry of each key in the batch. 2. In one commit, insert, update or
delete the rows whose entry is newer. :mod:`engine` selects the engine: :mod:`driver` or
:mod:`spark`.

**Removed or marked.** A removed row leaves no record of its revision. If an older PUT of the same
key is merged later (a replay from an earlier sequence), no row of the key is found and the PUT is
inserted. The replay corrects this when it reaches the marker, if the bucket still has the marker. A
marked row keeps the marker's revision, so older entries are not merged over it. For the same reason
a marker whose key is not in the table inserts a marked row with ``deletes="mark"``, and inserts
nothing with ``deletes="remove"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.delta.cdc.events import (
    Events,
    entry_order,
    events_of,
    keeps_newest_entries,
    selected_columns,
    validate_columns,
)
from nats_stream_source.delta.cdc.layout import other_rules_error
from nats_stream_source.delta.cdc.rules import ChangeRules, ScdType, SequenceBy
from nats_stream_source.delta.cdc.tables import EventEngine
from nats_stream_source.delta.engine import EngineSelector
from nats_stream_source.delta.limits import AutoLimits
from nats_stream_source.delta.location import Engine, TableArgument, TableLocation
from nats_stream_source.delta.merge_result import MergeResult, report_merge
from nats_stream_source.delta.stored_columns import validate_entry_types
from nats_stream_source.delta.table import Deletes, quote, validate_batch, validate_names
from nats_stream_source.delta.upkeep import DEFAULT_UPKEEP, Upkeep
from nats_stream_source.logs import field_logger
from nats_stream_source.spark.session import warn_of_missing_settings

_log = field_logger(__name__)


def merge_changes(
    table: TableArgument,
    *,
    keys: Sequence[str] | str | None = None,
    sequence_by: SequenceBy | None = None,
    apply_as_deletes: str | Column | None = None,
    column_list: Sequence[str] | None = None,
    except_column_list: Sequence[str] | None = None,
    stored_as_scd_type: ScdType = 1,
    track_history_column_list: Sequence[str] | None = None,
    track_history_except_column_list: Sequence[str] | None = None,
    unavailable_columns: str | None = None,
    deletes: Deletes = "remove",
    engine: Engine = "auto",
    storage_options: Mapping[str, str] | None = None,
    limits: AutoLimits | None = None,
    deletion_vectors: bool | None = None,
    upkeep: Upkeep | None = DEFAULT_UPKEEP,
) -> TableMerger:
    """Return a function for ``foreachBatch`` that merges change data into a Delta table.

    ``df.writeStream.foreachBatch(merge_changes("/lake/fleet")).start()`` keeps the table equal to a
    bucket. With ``keys`` and ``sequence_by`` it merges rows of any kind.

    Args:
        table: path, URI or name of the table, see :func:`merge`.
        keys: see :func:`merge`, as the arguments that follow.
        sequence_by: see :func:`merge`.
        apply_as_deletes: see :func:`merge`.
        column_list: see :func:`merge`.
        except_column_list: see :func:`merge`.
        stored_as_scd_type: see :func:`merge`.
        track_history_column_list: see :func:`merge`.
        track_history_except_column_list: see :func:`merge`.
        unavailable_columns: see :func:`merge`.
        deletes: ``"remove"`` or ``"mark"``, see :func:`merge`.
        engine: ``"auto"``, ``"delta-rs"`` or ``"spark"``, see :func:`merge`.
        storage_options: see :func:`merge`.
        limits: see :func:`merge`.
        deletion_vectors: see :func:`merge`.
        upkeep: see :func:`merge`.

    Raises:
        ConfigurationError: an argument is invalid, or the active session lacks Delta's jar or a
            setting that the engine requires. The errors of the returned function, which end the
            query, are those of :func:`merge`.
        MissingPackageError: the engine's package is not installed.
    """
    rules = ChangeRules.of(
        deletes=deletes,
        keys=keys,
        sequence_by=sequence_by,
        apply_as_deletes=apply_as_deletes,
        column_list=column_list,
        except_column_list=except_column_list,
        stored_as_scd_type=stored_as_scd_type,
        track_history_column_list=track_history_column_list,
        track_history_except_column_list=track_history_except_column_list,
        unavailable_columns=unavailable_columns,
    )
    location = TableLocation(table, engine, storage_options)
    location.require_engine(SparkSession.getActiveSession())
    return TableMerger(EngineSelector(location, limits, deletion_vectors), rules, upkeep)


def merge(
    batch: DataFrame,
    table: TableArgument,
    *,
    keys: Sequence[str] | str | None = None,
    sequence_by: SequenceBy | None = None,
    apply_as_deletes: str | Column | None = None,
    column_list: Sequence[str] | None = None,
    except_column_list: Sequence[str] | None = None,
    stored_as_scd_type: ScdType = 1,
    track_history_column_list: Sequence[str] | None = None,
    track_history_except_column_list: Sequence[str] | None = None,
    unavailable_columns: str | None = None,
    deletes: Deletes = "remove",
    engine: Engine = "auto",
    storage_options: Mapping[str, str] | None = None,
    limits: AutoLimits | None = None,
    deletion_vectors: bool | None = None,
    upkeep: Upkeep | None = DEFAULT_UPKEEP,
) -> None:
    """Merge one batch of change data into a Delta table.

    Without ``keys`` and ``sequence_by``, the batch has entries of a bucket, and the table one row
    per key. The first batch creates the table, even if the batch is empty. Merging a batch again
    changes nothing and does not create a new table version. A commit that conflicts with that of
    another writer is merged again, ten times at most. Columns and fields of structs that the table
    lacks are added to it; those that the batch lacks keep their values.

    Args:
        batch: entries as ``nats_kv`` delivers them, or any rows with ``keys`` and ``sequence_by``.
            Columns of entries may be added, parsed or dropped, except ``key``, ``revision``,
            ``operation`` and ``stream_created``, which must be unchanged.
        table: a ``pathlib.Path``; a path or URI if it contains a slash or backslash
            (``./fleet``); else a name in the catalog of the batch's session.
        keys: columns that identify a key. Default for entries: ``key``, and ``bucket`` if the
            batch has that column.
        sequence_by: the order of a key's events: a column, an SQL expression, a Column, or a list
            of these, which is compared one by one. Default for entries: ``stream_created`` and
            ``revision``. With another one, late events are recognized by a state table beside the
            table (its name with ``__cdc_state``), and the table has the sequence in ``__SEQUENCE``
            unless each part of it is the name of a selected column.
        apply_as_deletes: condition, as SQL or Column, of an event that deletes its key. Default for
            entries: ``operation <> 'PUT'``; for other rows no event does.
        column_list: the columns that the table gets; the expressions above see all.
        except_column_list: the columns that it does not get; not with ``column_list``.
        stored_as_scd_type: 1 for one row per key. 2 for one row per version, with the sequences of
            the events that opened and closed it in ``__START_AT`` and ``__END_AT``, and for entries
            their times in ``valid_from`` and ``valid_to``.
        track_history_column_list: with type 2, the columns whose changes make a version. Default:
            all selected columns but keys and those of ``sequence_by``; of an entry also not
            ``created``, ``operation``, ``revision`` and ``stream_created``.
        track_history_except_column_list: with type 2, further columns that do not make a version.
        unavailable_columns: a column ``ARRAY<STRING>`` with the names of the columns whose value an
            event does not have and its row keeps; null or empty for an event that has all. The
            table does not get this column. With type 1 only, and for events of a key that reach the
            table in their order; a value that neither the batch nor the table has is null.
        deletes: the effect of a delete (DEL and PURGE) on the key's row. ``"remove"`` deletes the
            row; ``"mark"`` keeps it with the marker's own columns, null in the others of the batch,
            and ``deleted`` true. Not with type 2, where a delete closes the version.
        engine: what changes the table: ``"delta-rs"`` in the driver's process, ``"spark"`` with
            Delta Lake's MERGE, or ``"auto"``, which decides for each batch (see :mod:`engine`).
        storage_options: the object store's options for delta-rs, by its names
            (``{"AWS_REGION": "eu-west-1"}``); not with ``engine="spark"``.
        limits: up to which sizes ``engine="auto"`` takes delta-rs.
        deletion_vectors: None: a table that is created in the driver has deletion vectors, and an
            existing one is changed as its properties say. False: a table that is created does not
            have them, and the driver rewrites the data files of any table (copy-on-write). True: a
            table without them is an error. Only for the driver's engine.
        upkeep: when the table is compacted and vacuumed after the merge, and the log's properties
            of a table that is created; None for no upkeep and Delta's own properties. A failure of
            upkeep is logged and does not fail the merge.

    Raises:
        ConfigurationError: an argument is invalid, a required column is missing in the batch or the
            table, the table has a column with another type or was created for other ``deletes``,
            the key, revision, operation or ``stream_created`` of an entry is null, a key or a
            sequence is null, the table was created for other keys or another sequence or type, the
            path has files that are not a Delta table, or neither engine can change the table.
        MissingPackageError: the engine's package is not installed.
        TableConflictError: other writers changed the table during each attempt.
        TableError: delta-rs or its storage failed; the table is unchanged.
    """
    rules = ChangeRules.of(
        deletes=deletes,
        keys=keys,
        sequence_by=sequence_by,
        apply_as_deletes=apply_as_deletes,
        column_list=column_list,
        except_column_list=except_column_list,
        stored_as_scd_type=stored_as_scd_type,
        track_history_column_list=track_history_column_list,
        track_history_except_column_list=track_history_except_column_list,
        unavailable_columns=unavailable_columns,
    )
    location = TableLocation(table, engine, storage_options)
    selector = EngineSelector(location, limits, deletion_vectors)
    TableMerger(selector, rules, upkeep)(batch)
    selector.finish()


class TableMerger:
    """The function for ``foreachBatch`` that merges each batch into one table.

    Attributes:
        contradictions: how many sequences had events with different values, in all batches.
    """

    def __init__(
        self, selector: EngineSelector, rules: ChangeRules, upkeep: Upkeep | None = DEFAULT_UPKEEP
    ) -> None:
        self._selector = selector
        self._rules = rules
        self._upkeep = upkeep
        self._selects = rules.column_list is not None or rules.except_column_list is not None
        self.contradictions = 0

    def __repr__(self) -> str:
        return f"<TableMerger {self._selector.location!r} rules={self._rules!r}>"

    def validate(self, schema: StructType) -> None:
        """Raise ConfigurationError if a batch with these columns cannot be merged."""
        columns = schema.names
        validate_columns(self._rules, columns)
        validate_names(columns)
        if keeps_newest_entries(self._rules, columns):
            validate_batch(selected_columns(self._rules, columns), self._rules.deletes)
        validate_entry_types(schema, entry_order(self._rules, columns))

    def __call__(self, batch: DataFrame, batch_id: int = 0) -> None:
        """Merge a batch; see :func:`merge`."""
        schema = batch.schema
        self.validate(schema)
        warn_of_missing_settings(batch.sparkSession)
        if keeps_newest_entries(self._rules, schema.names):
            selected = selected_columns(self._rules, schema.names)
            self._merge_entries(batch.select(*map(quote, selected)) if self._selects else batch)
        else:
            self._merge_events(events_of(batch, self._rules))

    def _merge_entries(self, batch: DataFrame) -> None:
        deletes = self._rules.deletes

        def work(engine: EventEngine) -> MergeResult:
            table = engine.find_or_create(batch.schema, deletes, self._upkeep)
            if table.layout is not None:
                raise other_rules_error(self._selector.location.name, table.layout)
            return table.merge(batch, deletes, self._upkeep)

        result = self._selector.run(batch.sparkSession, work)
        report_merge(batch.sparkSession, self._selector.location.name, result)

    def _merge_events(self, events: Events) -> None:
        result = self._selector.run(
            events.rows.sparkSession, lambda engine: engine.merge_events(events, self._upkeep)
        )
        report_merge(events.rows.sparkSession, self._selector.location.name, result)
        found = result.contradictions
        if found and not self.contradictions:
            _log.warning(
                "events of one key and sequence have different values",
                table=self._selector.location.name,
                count=found,
                counts="a delete, else the event with the greatest values",
            )
        self.contradictions += found

    def finish(self) -> None:
        """Wait for upkeep that still runs; a query's last batch can have started some."""
        self._selector.finish()
