"""Follow a bucket into a Delta table: one call from a streaming DataFrame to the running query.

**Two logs.** Before each micro-batch Spark writes its end to the checkpoint (``offsets``), after it
a second file (``commits``), and waits for both: 80 to 130 ms, as long as a small merge. With
*asynchronous progress tracking* Spark writes them in a thread beside the micro-batches. After a
crash, the micro-batches whose files were not written are read and merged again. For this package
that is right: a range is read again exactly, and a merge ignores the entries that its table already
has.

**Every micro-batch is written.** By default Spark's asynchronous logs skip the micro-batches of
each second. A query that then resumes with synchronous logs fails ("batch … doesn't exist"), since
these require the last two. :func:`follow` has all of them written, in order. Therefore any query
can resume from the checkpoint, and at most two micro-batches wait to be written.

**A write that fails** ends the query before its next micro-batch. If it was that of the offsets,
the commit of the same micro-batch is written nevertheless (measured with Spark 4.2.0), and
Spark then refuses to resume: it runs the last micro-batch that has offsets again, and finds it
committed. :func:`follow` removes commits without offsets from the checkpoint, so that their
micro-batches are repeated.

**When Spark's own logs are used.** Spark accepts no asynchronous logs for ``availableNow`` and for
queries with state. It has a list of sinks that may have them: ``foreachBatch`` requires an option
that Spark's source describes as one for tests (Spark 3.4 to 4.3).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.delta.location import TableArgument
from nats_stream_source.delta.spark.merge import MergeArguments, merge_changes
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.logs import field_logger
from nats_stream_source.spark.progress import add_listener, start_metrics
from nats_stream_source.spark.session import is_connect

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = field_logger(__name__)

ASYNC_PROGRESS = {
    "asyncProgressTrackingEnabled": "true",
    "_asyncProgressTrackingOverrideSinkSupportCheck": "true",
    "asyncProgressTrackingCheckpointIntervalMs": "0",
}
"""The options of a query with asynchronous logs."""

# A part of each stateful operator in the text of a physical plan.
_STATE = "state info ["


def follow(
    changes: DataFrame,
    table: TableArgument,
    *,
    checkpoint: str | os.PathLike[str],
    once: bool = False,
    async_progress: bool = True,
    prometheus: int | str | None = None,
    opentelemetry: bool = False,
    **arguments: Unpack[MergeArguments],
) -> StreamingQuery:
    """Start a query that keeps a Delta table equal to a bucket.

    ``follow(changes, "/lake/fleet", checkpoint="/lake/fleet-checkpoint").awaitTermination()``

    Args:
        changes: a streaming DataFrame of ``nats_kv``, as ``spark.readStream`` loads it or with
            columns added, parsed or dropped; see :func:`merge` for the columns that it must have.
        table: path, URI or name of the table, see :func:`merge`.
        checkpoint: directory of the query's offsets. The query resumes there, whichever logs wrote
            it.
        once: True to read all that the bucket has at the start, and end (``availableNow``).
        async_progress: False to wait for the checkpoint's files in each micro-batch.
        prometheus: port, or ``"host:port"``, of an HTTP endpoint with the query's metrics, see
            :func:`nats_stream_source.watch_progress`.
        opentelemetry: also report them to the global meter provider of OpenTelemetry.
        arguments: see :class:`nats_stream_source.delta.spark.merge.MergeArguments`.

    Returns:
        The running query. Its later errors, in ``exception()`` and ``awaitTermination()``, are
        those of the source and of :func:`merge`.

    Raises:
        ConfigurationError: an argument is invalid, ``changes`` is a batch or lacks a column that
            the merge requires, the session lacks what the engine requires, or the checkpoint has
            a commit without offsets that cannot be removed.
        MissingPackageError: the engine's package is not installed, or one of the extra ``metrics``.
    """
    if not changes.isStreaming:
        raise ConfigurationError(
            "could not follow: the DataFrame is a batch, expected a streaming one; load it with "
            "`spark.readStream`, or merge a batch with nats_stream_source.delta.merge"
        )
    merge = merge_changes(table, **arguments)
    merge.events(changes)  # an error before the query starts
    if not is_connect(changes.sparkSession):
        _remove_commits_without_offsets(changes.sparkSession, os.fspath(checkpoint))
    # Before the query starts: its first merge is recorded, too.
    metrics = start_metrics(prometheus, opentelemetry)
    writer = changes.writeStream.foreachBatch(merge).option(
        "checkpointLocation", os.fspath(checkpoint)
    )
    if once:
        writer = writer.trigger(availableNow=True)
    reason = _problem(changes, once=once, async_progress=async_progress)
    if reason is None:
        writer = writer.options(**ASYNC_PROGRESS)
    query = writer.start()
    if metrics is not None:
        add_listener(query, None, metrics, lines=False)
    logs = "asynchronous" if reason is None else "synchronous"
    _log.info("query follows into the table", table=os.fspath(table), logs=logs, reason=reason)
    return query


def _remove_commits_without_offsets(spark: SparkSession, checkpoint: str) -> None:
    """Remove the commits of a checkpoint that follow its last offsets; see the module."""
    jvm = spark._jvm
    assert jvm is not None
    hadoop = jvm.org.apache.hadoop.fs
    root = hadoop.Path(checkpoint)
    try:
        files = root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

        def batches(log: str) -> set[int]:
            directory = hadoop.Path(root, log)
            if not files.exists(directory):
                return set()
            # As one text: a call of the JVM for each file takes longer than the start of a query.
            paths = hadoop.FileUtil.stat2Paths(files.listStatus(directory))
            text = jvm.scala.runtime.ScalaRunTime.stringOf(paths)
            return set(map(int, re.findall(rf"/{log}/(\d+)[,)]", text)))

        commits = batches("commits")  # first: a query that runs writes a commit after its offsets
        end = max(batches("offsets"), default=-1)
    except Py4JJavaError:
        return  # Spark cannot list them either, and reports it at the start of the query
    orphans = sorted(batch for batch in commits if batch > end)
    for batch in orphans:
        path, reason = hadoop.Path(root, f"commits/{batch}"), ""
        try:
            removed = files.delete(path, False)
        except Py4JJavaError as error:
            removed, reason = False, f" ({error.java_exception.toString()})"
        if not removed:
            raise ConfigurationError(
                f"could not follow: {path.toString()} of the checkpoint is a commit without "
                f"offsets, and could not be removed{reason}; make the directory writable, or "
                f"remove the file"
            )
    if orphans:
        _log.warning(
            "commits of the checkpoint lacked their offsets, the micro-batches are repeated",
            checkpoint=checkpoint,
            removed=orphans,
        )


def _problem(changes: DataFrame, *, once: bool, async_progress: bool) -> str | None:
    """Why the query runs with Spark's own logs; None if it does not."""
    if once:
        return "once=True"
    if not async_progress:
        return "async_progress=False"
    if _STATE in _physical_plan(changes):
        return "the query has state"
    return None


def _physical_plan(changes: DataFrame) -> str:
    spark = changes.sparkSession
    if is_connect(spark):
        return str(changes._explain_string())  # type: ignore[operator]  # of Connect only
    jvm = spark._jvm
    assert jvm is not None
    return str(jvm.PythonSQLUtils.explainString(changes._jdf.queryExecution(), "simple"))
