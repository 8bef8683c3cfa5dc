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

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta.engine import EngineSelector
from nats_stream_source.delta.limits import AutoLimits
from nats_stream_source.delta.location import Engine, TableLocation
from nats_stream_source.delta.merge_result import MergeResult, report_merge
from nats_stream_source.delta.table import Deletes, TableEngine, validate_batch, validate_deletes
from nats_stream_source.delta.upkeep import DEFAULT_UPKEEP, Upkeep
from nats_stream_source.spark.session import warn_of_missing_settings


def merge_changes(
    table: str,
    *,
    deletes: Deletes = "remove",
    engine: Engine = "auto",
    storage_options: Mapping[str, str] | None = None,
    limits: AutoLimits | None = None,
    deletion_vectors: bool | None = None,
    upkeep: Upkeep | None = DEFAULT_UPKEEP,
) -> TableMerger:
    """Return a function for ``foreachBatch`` that keeps a Delta table equal to a bucket.

    ``df.writeStream.foreachBatch(merge_changes("/lake/fleet")).start()``

    Args:
        table: path, URI or name of the table, see :func:`merge`.
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
    validate_deletes(deletes)
    location = TableLocation(table, engine, storage_options)
    location.require_engine(SparkSession.getActiveSession())
    return TableMerger(EngineSelector(location, limits, deletion_vectors), deletes, upkeep)


def merge(
    batch: DataFrame,
    table: str,
    *,
    deletes: Deletes = "remove",
    engine: Engine = "auto",
    storage_options: Mapping[str, str] | None = None,
    limits: AutoLimits | None = None,
    deletion_vectors: bool | None = None,
    upkeep: Upkeep | None = DEFAULT_UPKEEP,
) -> None:
    """Merge one batch of entries into a Delta table with one row per key.

    The first batch creates the table, even if the batch is empty. Merging a batch again changes
    nothing and does not create a new table version. A commit that conflicts with that of another
    writer is merged again, ten times at most.

    Args:
        batch: entries as ``nats_kv`` delivers them. Columns may be added, parsed or dropped, except
            ``key``, ``revision``, ``operation`` and ``stream_created``, which must be unchanged.
        table: a path or URI if it contains a slash or backslash (``./fleet``), else a name in the
            catalog of the batch's session.
        deletes: the effect of DEL and PURGE on the key's row. ``"remove"`` deletes the row;
            ``"mark"`` replaces it by the marker's own columns with ``deleted`` true.
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
            table, the table lacks a column of the batch, has it with another type or was created
            for other ``deletes``, the key, revision, operation or ``stream_created`` of an entry is
            null, the path has files that are not a Delta table, or neither engine can change the
            table.
        MissingPackageError: the engine's package is not installed.
        TableConflictError: other writers changed the table during each attempt.
        TableError: delta-rs or its storage failed; the table is unchanged.
    """
    validate_deletes(deletes)
    location = TableLocation(table, engine, storage_options)
    selector = EngineSelector(location, limits, deletion_vectors)
    TableMerger(selector, deletes, upkeep)(batch)
    selector.finish()


class TableMerger:
    """The function for ``foreachBatch`` that merges each batch into one table."""

    def __init__(
        self, selector: EngineSelector, deletes: Deletes, upkeep: Upkeep | None = DEFAULT_UPKEEP
    ) -> None:
        self._selector = selector
        self._deletes: Deletes = deletes
        self._upkeep = upkeep

    def __repr__(self) -> str:
        return f"<TableMerger {self._selector.location!r} deletes={self._deletes!r}>"

    def validate(self, columns: list[str]) -> None:
        """Raise ConfigurationError if a batch with these columns cannot be merged."""
        validate_batch(columns, self._deletes)

    def __call__(self, batch: DataFrame, batch_id: int = 0) -> None:
        """Merge a batch; see :func:`merge`."""
        self.validate(batch.columns)
        warn_of_missing_settings(batch.sparkSession)

        def work(engine: TableEngine) -> MergeResult:
            table = engine.find_or_create(batch.schema, self._deletes, self._upkeep)
            return table.merge(batch, self._deletes, self._upkeep)

        result = self._selector.run(batch.sparkSession, work)
        report_merge(batch.sparkSession, self._selector.location.name, result)

    def finish(self) -> None:
        """Wait for upkeep that still runs; a query's last batch can have started some."""
        self._selector.finish()
