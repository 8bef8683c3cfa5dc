"""Change a Delta table by batches, compare it with its bucket, maintain it: the public functions.

**Order.** Of two entries of a key, the newer one has the greater ``(stream_created, revision)``.
The revisions of a re-created bucket start at 1 again, so only ``stream_created`` distinguishes its
entries from those of the earlier bucket. The rule compares by this order only, not by the position
of a row in the batch nor by the number of the batch. Therefore a batch can be merged any number of
times, batches can overlap, and the executors can alternate from query to query: an entry that the
table already contains is not newer than itself.

**Steps.** 1. The batch becomes events (:mod:`batch`). 2. The executor, which the first batch has
chosen (:mod:`choice`), reads the rows of their keys, and the rule
(:mod:`nats_stream_source.delta.rules`) returns what changes. 3. The executor commits it.

**Removed or marked.** A removed row leaves no record of its revision. If an older PUT of the same
key is merged later (a replay from an earlier sequence), no row of the key is found and the PUT is
inserted. The replay corrects this when it reaches the marker, if the bucket still has the marker. A
marked row keeps the marker's revision, so older entries are not merged over it. For the same reason
a marker whose key is not in the table inserts a marked row with ``deletes="mark"``, and inserts
nothing with ``deletes="remove"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from pyspark.sql import Column, DataFrame, SparkSession

from nats_stream_source.delta.compare_with_bucket import ReconcileResult, compare_with_bucket
from nats_stream_source.delta.location import AutoLimits, Engine, TableArgument, TableLocation
from nats_stream_source.delta.merge_result import MergeResult, merge_metrics
from nats_stream_source.delta.rules.events import ChangeRules, EventBatch, ScdType
from nats_stream_source.delta.rules.layout import Deletes, validate_deletes
from nats_stream_source.delta.spark.batch import Collector, batch_of
from nats_stream_source.delta.spark.choice import EngineChoice, require_engine
from nats_stream_source.delta.tables import Table
from nats_stream_source.delta.upkeep import DEFAULT_UPKEEP, MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.kv.codec import kv_codec
from nats_stream_source.jetstream.subjects import validate_bucket
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics import active_recorder
from nats_stream_source.options import CONNECTION, connection_settings, parse
from nats_stream_source.spark.session import warn_of_missing_settings
from nats_stream_source.spark.task_counts import QUERY_ID

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = field_logger(__name__)


class MergeArguments(TypedDict, total=False):
    """The keyword arguments of :func:`merge`, :func:`merge_changes` and :func:`follow`.

    Without ``keys`` and ``sequence_by``, a batch has entries of a bucket, and the table one row per
    key.

    Attributes:
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
        deletes: the effect of a delete (DEL and PURGE) on the key's row. ``"remove"`` (the default)
            deletes the row; ``"mark"`` keeps it with the marker's own columns, null in the others
            of the batch, and ``deleted`` true. Columns that the batch lacks keep their values. Not
            with type 2, where a delete closes the version.
        engine: what changes the table: ``"driver"`` for the driver's process, ``"spark"`` for Delta
            Lake's MERGE, or ``"auto"`` (the default), which the first batch decides, see
            :mod:`choice`.
        storage_options: the object store's options for the driver, by delta-rs's names
            (``{"AWS_REGION": "eu-west-1"}``); not with ``engine="spark"``.
        limits: up to which size of its index ``engine="auto"`` takes the driver.
        deletion_vectors: None (the default): a table that is created in the driver has deletion
            vectors, and an existing one is changed as its properties say. False: a table that is
            created does not have them; an error for a table that has. True: a table without them is
            an error. Only for the driver.
        upkeep: when the table is compacted and vacuumed after the merge, and the log's properties
            of a table that is created; None for no upkeep and Delta's own properties. A failure of
            upkeep is logged and does not fail the merge.
    """

    keys: Sequence[str] | str | None
    sequence_by: str | Column | list[str | Column] | tuple[str | Column, ...] | None
    apply_as_deletes: str | Column | None
    column_list: Sequence[str] | None
    except_column_list: Sequence[str] | None
    stored_as_scd_type: ScdType
    track_history_column_list: Sequence[str] | None
    track_history_except_column_list: Sequence[str] | None
    unavailable_columns: str | None
    deletes: Deletes
    engine: Engine
    storage_options: Mapping[str, str] | None
    limits: AutoLimits | None
    deletion_vectors: bool | None
    upkeep: Upkeep | None


def merge_changes(table: TableArgument, **arguments: Unpack[MergeArguments]) -> TableMerger:
    """Return a function for ``foreachBatch`` that merges change data into a Delta table.

    ``df.writeStream.foreachBatch(merge_changes("/lake/fleet")).start()`` keeps the table equal to a
    bucket. With ``keys`` and ``sequence_by`` it merges rows of any kind.

    Args:
        table: path, URI or name of the table, see :func:`merge`.
        arguments: see :class:`MergeArguments`.

    Raises:
        ConfigurationError: an argument is invalid, or the active session lacks Delta's jar or a
            setting that the engine requires. The errors of the returned function, which end the
            query, are those of :func:`merge`.
        MissingPackageError: the engine's package is not installed.
    """
    merger = TableMerger(table, **arguments)
    require_engine(merger.location, SparkSession.getActiveSession())
    return merger


def merge(batch: DataFrame, table: TableArgument, **arguments: Unpack[MergeArguments]) -> None:
    """Merge one batch of change data into a Delta table.

    The first batch creates the table, even if the batch is empty. Merging a batch again changes
    nothing and does not create a new table version. A commit that conflicts with that of another
    writer is merged again, ten times at most. Columns and fields of structs that the table lacks
    are added to it; those that the batch lacks keep their values. The driver merges a large batch
    in parts, each a commit.

    Args:
        batch: entries as ``nats_kv`` delivers them, or any rows with ``keys`` and ``sequence_by``.
            Columns of entries may be added, parsed or dropped, except ``key``, ``revision``,
            ``operation`` and ``stream_created``, which must be unchanged.
        table: a ``pathlib.Path``; a path or URI if it contains a slash or backslash
            (``./fleet``); else a name in the catalog of the batch's session.
        arguments: see :class:`MergeArguments`.

    Raises:
        ConfigurationError: an argument is invalid, a required column is missing in the batch or the
            table, the table has a column with another type or was created for other ``deletes``,
            the key, revision, operation or ``stream_created`` of an entry is null, a key or a
            sequence is null, the table was created for other keys or another sequence or type, the
            path has files that are not a Delta table, or neither engine can change the table.
        MissingPackageError: the engine's package is not installed.
        TableConflictError: other writers changed the table during each attempt.
        TableError: the engine or its storage failed; the table is unchanged.
    """
    merger = TableMerger(table, **arguments)
    merger(batch)
    merger.finish()


def reconcile(
    spark: SparkSession,
    table: TableArgument,
    *,
    bucket: str,
    servers: str,
    deletes: Deletes = "remove",
    engine: Engine = "auto",
    storage_options: Mapping[str, str] | None = None,
    limits: AutoLimits | None = None,
    key_codec: str | None = None,
    value_codec: str | None = None,
    **options: str | float | bool,
) -> ReconcileResult:
    """Remove, mark or close the rows of a table whose keys the bucket no longer has.

    In a history table (``stored_as_scd_type=2``) the open row of such a key is closed. A marked row
    has null in the columns that ``nats_kv`` delivers, and keeps all others: here the columns of the
    query are not known.

    A row whose revision has expired while the bucket has an older one of its key gets the older
    value; in a history table the open row is closed, and another one is opened. The table must have
    columns of ``nats_kv`` only, with their types; else a warning has the number of such rows.

    Rows of an earlier bucket of this name are included. A row is changed only if its key had no
    value, or an older one, when the bucket's leader responded, and the row was not changed since.
    The driver holds the table's keys in memory and sends one request for each key.

    Args:
        spark: a session; with Delta Lake if Spark changes the table.
        table: as in :func:`merge`. In a table with a column ``bucket``, only this bucket's rows are
            compared.
        bucket: the bucket that the table follows.
        servers: the server list, as the source's option ``servers``.
        deletes: the same value as for the table's :func:`merge`.
        engine: what changes the table, see :func:`merge`.
        storage_options: the object store's options for the driver, see :func:`merge`.
        limits: up to which size of its index ``engine="auto"`` takes the driver.
        key_codec: the option ``keyCodec`` of the query that filled the table.
        value_codec: likewise, ``valueCodec``.
        options: other connection options of the source, by their names (``user="…"``).

    Raises:
        OptionError: a connection option is unknown or has an invalid value.
        UndecodableError: ``value_codec`` does not decode an older value of the bucket.
        KeyNotEncodableError: the table has a key that ``key_codec`` does not decode.
        ConfigurationError: the table does not exist, was not created from a bucket, was created for
            other ``deletes``, or follows a bucket that was created later than this one.
        BucketNotFoundError: the bucket does not exist.
        DataLossError: the table has revisions beyond the bucket's last sequence: the bucket was
            rolled back.
        ConnectError, RequestTimeoutError, PermissionDeniedError: a request to the bucket failed.
        TableConflictError: a query changed the table during each attempt; reconcile again.
        TableError: the engine or its storage failed; the table is unchanged.
    """
    validate_deletes(deletes)
    validate_bucket(bucket)
    codec = kv_codec(key_codec, value_codec)
    settings = connection_settings(parse({"servers": servers, **options}, CONNECTION))
    location = TableLocation(table, engine, storage_options)

    def work(target: Table) -> ReconcileResult:
        return compare_with_bucket(target, bucket, settings, codec, deletes)

    return EngineChoice(location, limits).run(spark, work)


def maintain(
    spark: SparkSession,
    table: TableArgument,
    *,
    engine: Engine = "auto",
    storage_options: Mapping[str, str] | None = None,
    upkeep: Upkeep = DEFAULT_UPKEEP,
) -> MaintenanceResult:
    """Compact and VACUUM a table, and shorten its log, whether that is due or not.

    A state table beside it is maintained too; the result is the sum of both.

    For tables that were never maintained, and for a scheduled job in place of the upkeep of
    ``merge_changes(…, upkeep=None)``. A query can merge into the table meanwhile.

    Args:
        spark: a session; with Delta Lake if Spark changes the table.
        table: as in :func:`merge`.
        engine: what changes the table, see :func:`merge`.
        storage_options: the object store's options for the driver, see :func:`merge`.
        upkeep: its ``target_file_bytes`` and ``retention_hours``.

    Raises:
        ConfigurationError: the table does not exist, or the engine cannot change it.
        TableError: the engine or its storage failed; the rows are unchanged.
    """
    location = TableLocation(table, engine, storage_options)
    choice = EngineChoice(location)

    def work(target: Table) -> MaintenanceResult:
        if not target.exists():
            raise ConfigurationError(
                f"could not maintain table {location.name!r}: no Delta table found; check the "
                f"path or name"
            )
        result = target.maintain(upkeep)
        if target.layout is not None and target.layout.has_state:
            state = target.state()
            result += state.maintain(upkeep) if state.exists() else MaintenanceResult()
        return result

    return choice.run(spark, work)


class TableMerger:
    """The function for ``foreachBatch`` that merges each batch into one table.

    Attributes:
        location: of the table.
        contradictions: how many sequences had events with different values, in all batches.
    """

    def __init__(
        self,
        table: TableArgument,
        *,
        engine: Engine = "auto",
        storage_options: Mapping[str, str] | None = None,
        limits: AutoLimits | None = None,
        deletion_vectors: bool | None = None,
        upkeep: Upkeep | None = DEFAULT_UPKEEP,
        **rules: object,
    ) -> None:
        self._rules = ChangeRules.of(**rules)
        self.location = TableLocation(table, engine, storage_options)
        self._choice = EngineChoice(self.location, limits, deletion_vectors)
        self._collector = Collector()
        self._upkeep = upkeep
        self.contradictions = 0

    def __repr__(self) -> str:
        return f"<TableMerger {self.location!r} rules={self._rules!r}>"

    def events(self, batch: DataFrame) -> EventBatch:
        """The events of a batch, or of a stream; ConfigurationError if the rules do not fit it."""
        return batch_of(batch, self._rules, self._collector)

    def __call__(self, batch: DataFrame, batch_id: int = 0) -> None:
        """Merge a batch; see :func:`merge`."""
        spark, name = batch.sparkSession, self.location.name
        warn_of_missing_settings(spark)
        events = self.events(batch)
        result = self._choice.run(spark, lambda target: target.merge(events, self._upkeep))
        _report_merge(spark, name, result)
        found = result.contradictions
        if found and not self.contradictions:
            _log.warning(
                "events of one key and sequence have different values",
                table=name,
                count=found,
                counts="a delete, else the event with the greatest values",
            )
        self.contradictions += found

    def finish(self) -> None:
        """Wait for upkeep that still runs; a query's last batch can have started some."""
        self._choice.finish()


def _report_merge(spark: SparkSession, table: str, result: MergeResult) -> None:
    """Record a merge of a streaming query, if its metrics are watched."""
    active = active_recorder()
    if active is None:
        return
    with active.guarded():
        # The thread that runs the micro-batch has its query's id.
        query = spark.sparkContext.getLocalProperty(QUERY_ID)
        if query is not None:
            active.when_watched(query, merge_metrics(active, table, result))
