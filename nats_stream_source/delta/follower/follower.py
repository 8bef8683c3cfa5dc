"""Keeps a Delta table equal to a bucket: one process, asyncio, without Spark.

A follower is a sequence of runs (:mod:`nats_stream_source.delta.follower.run`), most often of one.
If a version of the table was restored, or the stream was re-created, rolled back or restored while
it was read, the next run starts as a new process would.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from nats_stream_source.connection.connection import Connection
from nats_stream_source.delta.driver.position import PositionLog, PositionVoidError
from nats_stream_source.delta.follower.pace import FollowProgress, Pace
from nats_stream_source.delta.follower.run import Run
from nats_stream_source.delta.follower.table import FollowedTable
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import ChangeRules
from nats_stream_source.delta.rules.layout import Deletes
from nats_stream_source.delta.upkeep import COMMIT_INTERVAL, DEFAULT_UPKEEP, Upkeep
from nats_stream_source.errors import ConfigurationError, OptionError, TableConflictError
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import StreamChangedError
from nats_stream_source.jetstream.subjects import stream_of
from nats_stream_source.logs import field_logger
from nats_stream_source.options import KvOptions, Mode, kv_options
from nats_stream_source.rows.formats import KvFormat

_log = field_logger(__name__)

_LONGEST_INTERVAL = 3600
_RESTARTS = 10  # in a row without progress
_NOT_OF_A_FOLLOWER = {
    "buckets": "a follower has one bucket; start one for each, or use Spark",
    "bucketPattern": "a follower has one bucket; start one for each, or use Spark",
    "ignoreDeletes": "rows of deleted keys would stay; use deletes='mark' to keep them",
    "minRowsPerTrigger": "use the commit interval",
    "maxTriggerDelay": "use the commit interval",
    "minPartitions": "a follower reads with one consumer",
    "discoveryInterval": "a follower has one bucket",
    "asOfSequence": "read_bucket reads a bucket as it was",
    "asOfTime": "read_bucket reads a bucket as it was",
}


class Follower:
    """Keeps a Delta table equal to a bucket, without Spark.

    ``await Follower("fleet", "lake/fleet", servers="nats://127.0.0.1:4222").run()``

    Args:
        bucket: name of the key-value bucket.
        table: path or URI of the Delta table, which is created if it does not exist.
        deletes: ``"remove"`` removes the row of a deleted key, ``"mark"`` keeps it with ``deleted``
            true.
        history: whether the table has one row per revision, with ``valid_from`` and ``valid_to``
            (SCD type 2). The read begins with all revisions that the bucket has.
        storage_options: options of delta-rs for an object store.
        commit_interval: the shortest time between two commits, in seconds.
        upkeep: when the table is compacted and vacuumed; None for no upkeep.
        reconcile: whether a run first compares all rows with the bucket, by a request for each:
            keys can be removed without a marker, see :func:`nats_stream_source.delta.reconcile`.
        on_merge: called with the result of each merge, in the thread of the event loop.
        options: options of ``nats_kv`` by their names, as ``servers`` and ``keys``. Those of a
            micro-batch's size limit a commit.

    Attributes:
        location: of the table.
        bucket, stream: the names of the bucket and of its stream.
        history: whether the table has one row per revision.

    Raises:
        OptionError: an option is unknown, invalid, or not one of a follower.
        ConfigurationError: an argument is invalid.
        MissingPackageError: a package of the extra ``follow`` is not installed.
    """

    def __init__(
        self,
        bucket: str,
        table: str | os.PathLike[str],
        *,
        deletes: Deletes = "remove",
        history: bool = False,
        storage_options: Mapping[str, str] | None = None,
        commit_interval: float = COMMIT_INTERVAL,
        upkeep: Upkeep | None = DEFAULT_UPKEEP,
        reconcile: bool = False,
        on_merge: Callable[[MergeResult], None] | None = None,
        **options: str | float | bool,
    ) -> None:
        self._options = _parsed({**options, "bucket": bucket}, history=history)
        self._adapter = KvFormat(self._options)
        self._adapter.terms = replace(KvFormat.terms, start_anew="follow into a new table")
        self.location = TableLocation(table, "driver", storage_options)
        self.history = history
        self._rules = ChangeRules.of(deletes=deletes, stored_as_scd_type=2 if history else 1)
        assert self._options.bucket is not None
        self.bucket = self._options.bucket
        self.stream = stream_of(self.bucket)
        # What the position depends on beside the stream.
        parts = [self._options.keys, self._options.codec.key, self._options.codec.value, history]
        parts += ["metaOnly"] if self._options.meta_only else []
        self._query = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
        self._upkeep, self._reconcile = upkeep, reconcile
        if not 0 <= commit_interval <= _LONGEST_INTERVAL:
            raise ConfigurationError(
                f"invalid argument: commit_interval is {commit_interval!r}, expected seconds from "
                f"0 to {_LONGEST_INTERVAL:,}"
            )
        self._pace = Pace(commit_interval)
        self._on_merge = on_merge
        self._stop = asyncio.Event()
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"<Follower of {self.bucket} into {self.location.name!r} {self.progress}>"

    @property
    def progress(self) -> FollowProgress:
        """How far the follower is."""
        return FollowProgress() if self._run is None else self._run.progress

    def stop(self) -> None:
        """Make :meth:`run` commit the position and return."""
        self._stop.set()

    async def run(self, *, once: bool = False) -> FollowProgress:
        """Follow the bucket until :meth:`stop` is called, or the task is cancelled.

        Args:
            once: return when the table has what the bucket had at the start.

        Returns:
            the progress at the end.

        Raises:
            BucketNotFoundError: the bucket does not exist.
            ConnectError: the server did not accept the first connection, or servers were away for
                longer than ``outageTimeout``.
            DataLossError: messages were removed before they were read, with ``failOnDataLoss``.
            ConfigurationError: the table is one of other rows, keys or deletes.
            TableConflictError, TableError: the table could not be changed; it is unchanged.
        """
        async with await Connection.open(self._options.connection, retry=False) as opened:
            connection = SharedConnection(opened)
            with ThreadPoolExecutor(1, "follower") as thread:
                restarts = 0
                try:
                    while True:
                        before = self.progress
                        try:
                            await self._run_once(connection, thread, once=once)
                            return self.progress
                        except (PositionVoidError, StreamChangedError) as change:
                            restarts = restarts + 1 if self.progress.rows == before.rows else 0
                            if restarts > _RESTARTS:
                                raise TableConflictError(
                                    f"could not follow into table {self.location.name!r}: it or "
                                    f"the stream changed at each of {_RESTARTS} starts ({change}); "
                                    f"start the follower again once they are settled"
                                ) from change
                            _log.warning("the follower starts again", reason=change)
                finally:
                    self._stop.clear()
                    self._adapter.finish()

    async def _run_once(
        self, connection: SharedConnection, thread: ThreadPoolExecutor, *, once: bool
    ) -> None:
        position = PositionLog(self.stream, self._query)
        table = FollowedTable(self.location, self._rules, self._options, position, self._upkeep)
        self._run = Run(
            self._adapter,
            table,
            connection,
            thread,
            self._stop,
            self._pace,
            once=once,
            reconcile=self._reconcile,
            progress=self.progress,
            on_merge=self._on_merge,
        )
        try:
            await self._run.run()
        finally:
            await asyncio.to_thread(table.close)


def _parsed(options: dict[str, object], *, history: bool) -> KvOptions:
    starts = {"startsequence", "starttime", "updatesonly", "includehistory"}
    if history and not starts & {name.lower() for name in options}:
        options = {**options, "includeHistory": "true"}
    given = {name.lower() for name in options}
    for name, reason in _NOT_OF_A_FOLLOWER.items():
        if name.lower() in given:
            raise OptionError(f"option {name!r} is not one of a follower: {reason}")
    return kv_options(options, Mode.STREAMING)
