"""``follow``: keeps a Delta table equal to a bucket, by a query on a local Spark.

The command runs until SIGINT or SIGTERM, or with ``--once`` until the table has what the bucket
has. It prints a line about the query's progress every ten seconds, on a terminal every second in
place.

Exit status, for a scheduler: 0 if the query was stopped by a signal or is done; 1 if it failed in a
way that a restart may cure (a server, the network, the storage); 2 if the command line, an option,
the bucket or the table must be changed first; 3 for data loss, which ``--option
failOnDataLoss=false`` accepts.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nats_stream_source import errors
from nats_stream_source.cli.connection import connection
from nats_stream_source.cli.flags import add_connection
from nats_stream_source.cli.output import terminal_columns
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    MissingPackageError,
    NatsSourceError,
    OptionError,
)
from nats_stream_source.options import KV, Mode, kv_options

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from nats_stream_source.spark.progress import BatchProgress

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "FATAL",  # the command reports the error of the query
    "spark.sql.session.timeZone": "UTC",
}
_LINE_INTERVAL = 10.0  # seconds
_TERMINAL_INTERVAL = 1.0
_LAST_ERROR = re.compile(r".*\bnats_stream_source\.errors\.(\w+): ([^\n]+)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``follow``."""
    parser.usage = (
        "%(prog)s BUCKET TABLE [--once] [--checkpoint DIR]\n"
        "                                 [--option NAME=VALUE]... [options]"
    )
    parser.epilog = (
        "exit status: 0 stopped by SIGINT or SIGTERM, or done; 1 a failure that a restart may "
        "cure; 2 the command line, an option, the bucket or the table must be changed; 3 data loss"
    )
    parser.add_argument("bucket", metavar="BUCKET", help="name of the key-value bucket")
    parser.add_argument("table", metavar="TABLE", help="path or URI of the Delta table")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="directory in which the query resumes; default: the table's path and '-checkpoint'",
    )
    parser.add_argument(
        "--once", action="store_true", help="end when the table has what the bucket has"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=VALUE",
        dest="options",
        help="an option of nats_kv, such as keys='plane.>'; repeatable",
    )
    parser.add_argument(
        "--deletes",
        choices=("remove", "mark"),
        default="remove",
        help="remove the rows of deleted keys, or mark them; default: remove",
    )
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=VALUE",
        dest="storage_options",
        help="an option of delta-rs for a table in an object store; repeatable",
    )
    parser.add_argument(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="serve metrics for Prometheus; port 9464 is usual, 0 takes a free one",
    )
    parser.add_argument(
        "--opentelemetry",
        action="store_true",
        help="report metrics to OpenTelemetry, as opentelemetry-instrument configures it",
    )
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Follow the bucket; returns 0 when the query is done or was stopped."""
    options = {**connection(arguments), **dict(arguments.options), "bucket": arguments.bucket}
    # Errors name an option of the format as it is given here.
    arguments.origins |= {one.name: f"--option {one.name}" for one in KV} | {"bucket": "BUCKET"}
    kv_options(options, Mode.STREAMING)
    if arguments.prometheus is not None or arguments.opentelemetry:
        # Imported here: the package of the extra is only required for metrics.
        from nats_stream_source.metrics.exporters import Exporters

        Exporters.parse(arguments.prometheus, arguments.opentelemetry)
    table = _Target.parse(arguments.table, arguments.checkpoint, dict(arguments.storage_options))
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _interrupt) for number in signals}
    try:
        spark = _session()
        try:
            return _follow(spark, options, table, arguments)
        finally:
            spark.stop()
    except KeyboardInterrupt:
        return 0  # while Spark started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # Without this, py4j would log each call to the JVM that the interruption ends.
    logging.disable()
    raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class _Target:
    """The table, and where the query resumes."""

    table: str | Path
    checkpoint: str | None
    storage_options: dict[str, str] | None

    @staticmethod
    def parse(table: str, checkpoint: str | None, storage_options: dict[str, str]) -> _Target:
        scheme = urlsplit(table).scheme
        remote = len(scheme) > 1 and scheme != "file"  # `C:\` is no scheme
        if checkpoint is None and remote:
            raise OptionError(
                f"--checkpoint is missing: table {table!r} is in an object store; name a "
                f"directory that a restarted command finds again"
            )
        # A name without a slash is a directory here: this Spark does not have a catalog.
        place = table if len(scheme) > 1 else Path(table)
        return _Target(place, checkpoint, storage_options or None)


def _session() -> SparkSession:
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        raise MissingPackageError(
            "could not start Spark: pyspark is not installed; run "
            "`pip install 'nats-stream-source[delta]'`"
        ) from None
    from nats_stream_source.spark.session import configure

    os.environ["PYSPARK_PYTHON"] = sys.executable  # this machine is the only worker
    builder = SparkSession.builder.appName("nats-stream-source follow").master("local[*]")
    builder = configure(builder)
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise NatsSourceError(f"could not start Spark: {error}") from None


def _follow(
    spark: SparkSession,
    options: dict[str, str],
    target: _Target,
    arguments: argparse.Namespace,
) -> int:
    from nats_stream_source import register, watch_progress
    from nats_stream_source.delta import follow
    from nats_stream_source.delta.location import TableLocation

    uri = TableLocation(target.table, storage_options=target.storage_options).uri
    stopped = threading.Event()
    # Spark has installed a handler of SIGINT which calls the JVM in the middle of another call.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    register(spark, check=False)
    changes = spark.readStream.format("nats_kv").options(**options).load()
    query = follow(
        changes,
        target.table,
        checkpoint=target.checkpoint or f"{uri}-checkpoint",
        once=arguments.once,
        prometheus=arguments.prometheus,
        opentelemetry=arguments.opentelemetry,
        deletes=arguments.deletes,
        storage_options=target.storage_options,
    )
    line = _ProgressLine(uri, target.storage_options)
    watch_progress(spark, line.add)
    try:
        _wait(query, stopped, line)
    except Exception:
        # SIGTERM to the whole process group also ends the JVM.
        if not stopped.is_set():
            line.end(failed=True)
            raise
    line.end()
    return 0


def _wait(query: StreamingQuery, stopped: threading.Event, line: _ProgressLine) -> None:
    """Print progress until the query ends or is stopped."""
    from pyspark.errors import StreamingQueryException

    try:
        # A signal ends a wait for Spark only when its time is over.
        while not query.awaitTermination(1):
            if stopped.is_set():
                query.stop()
                return
            line.show()
    except StreamingQueryException as error:
        raise _error_of(str(error)) from None


def _error_of(text: str) -> NatsSourceError:
    """The error of this package in the text of Spark's, as one that has an exit status."""
    found = _LAST_ERROR.match(text)
    if found is None:
        return NatsSourceError(f"the query failed: {text.partition('JVM stacktrace')[0]}")
    kind = getattr(errors, found[1], NatsSourceError)
    for status in (DataLossError, ConfigurationError):
        if issubclass(kind, status):
            return status(found[2])
    return NatsSourceError(found[2])


class _ProgressLine:
    """Rows and lag of the micro-batches since the last line, and the keys of the table."""

    def __init__(self, uri: str, storage_options: dict[str, str] | None) -> None:
        self._uri = uri
        self._storage_options = storage_options
        self._terminal = terminal_columns() is not None
        self._rows = self._shown_rows = 0
        self._last: BatchProgress | None = None
        self._since = time.monotonic()
        self._table: DeltaTable | None = None

    def add(self, record: BatchProgress) -> None:
        """Add a micro-batch; Spark calls it in a thread."""
        self._rows += record.rows or 0
        self._last = record

    def show(self) -> None:
        """Print the line if it is due."""
        interval = _TERMINAL_INTERVAL if self._terminal else _LINE_INTERVAL
        if time.monotonic() - self._since >= interval and self._last is not None:
            self._print("\r\x1b[K" if self._terminal else "", "" if self._terminal else "\n")

    def end(self, *, failed: bool = False) -> None:
        """Print the last line; without a lag if Spark has not reported a micro-batch yet.

        Args:
            failed: True to print nothing in that case.
        """
        if failed and self._last is None:
            return
        self._print("\r\x1b[K" if self._terminal else "", "\n")

    def _print(self, start: str, end: str) -> None:
        now, last = time.monotonic(), self._last
        rows = self._rows
        rate = (rows - self._shown_rows) / max(now - self._since, 1e-3)
        self._since, self._shown_rows = now, rows
        behind = "?" if last is None or last.lag is None else f"{last.lag:,}"
        seconds = "?" if last is None or last.lag_seconds is None else f"{last.lag_seconds:.1f}"
        text = f"{rate:,.0f} rows/s, {behind} rows behind, {seconds} s behind, {self._keys()} keys"
        sys.stdout.write(f"{start}{text}{end}")
        sys.stdout.flush()

    def _keys(self) -> str:
        import pyarrow as pa
        from deltalake import DeltaTable, QueryBuilder
        from deltalake.exceptions import DeltaError

        try:
            if self._table is None:
                self._table = DeltaTable(self._uri, storage_options=self._storage_options)
            else:
                self._table.update_incremental()
            # `DeltaTable.count` includes rows that deletion vectors remove.
            counted = (
                QueryBuilder().register("t", self._table).execute("SELECT count(*) AS n FROM t")
            )
            return f"{pa.table(counted)['n'][0].as_py():,}"
        except (DeltaError, OSError):  # the line is not worth the end of the query
            return "?"
