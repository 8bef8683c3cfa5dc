"""The choice between the two engines that change a table.

- ``"delta-rs"``: the package ``deltalake`` in the driver's process. A small merge takes
  milliseconds, and the session needs nothing of Delta. The memory for it grows with the batch and
  the table.
- ``"spark"``: Delta Lake's MERGE. It takes seconds, for any size, catalog and table feature.
- ``"auto"``: delta-rs where it can change the table and :class:`AutoLimits` allow it, else Spark.

**When "auto" takes Spark.** The table is a name in the catalog; or its path is not on a local disk
and no ``storage_options`` are given; or the package ``deltalake`` is not installed; or delta-rs
does not support a feature of the table or a type of the batch; or a limit is exceeded. Both engines
keep one contract and can alternate on a table, so each batch is decided on its own.

**If the session lacks Delta Lake**, Spark cannot take over. A batch or table beyond a limit is then
merged by delta-rs with a warning, since a limit is a precaution. In the other cases the error names
what both engines lack.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import SparkSession

from nats_stream_source.delta.cdc.tables import EventEngine
from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.limits import NO_LIMITS, AutoLimits, LimitCheck
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.spark import session
from nats_stream_source.delta.table import EngineRefusedError, TableChangedError
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.logs import field_logger

if TYPE_CHECKING:
    from nats_stream_source.delta.driver.merge_on_read.opened_table import OpenedTable

_log = field_logger(__name__)
_T = TypeVar("_T")


class EngineSelector:
    """Runs each change of one table with the engine that its location and the limits select."""

    def __init__(
        self,
        location: TableLocation,
        limits: AutoLimits | None = None,
        deletion_vectors: bool | None = None,
    ) -> None:
        if deletion_vectors and (location.engine == "spark" or not location.is_path):
            raise ConfigurationError(
                f"invalid arguments: deletion_vectors=True with table {location.name!r}, which "
                f"Spark changes; create the table with the property delta.enableDeletionVectors"
            )
        self.location = location
        self._deletion_vectors = deletion_vectors
        self._limits = limits or AutoLimits()
        self._index_bytes = limits.index_bytes if limits else None
        self._opened: OpenedTable | None = None
        self._reason = ""  # of the last line; "" if delta-rs changed the table within the limits
        self._beyond: set[str] = set()  # limits that delta-rs went beyond, which were logged
        self._problems: tuple[str | None, str | None] | None = None

    def __repr__(self) -> str:
        return f"<EngineSelector {self.location!r}>"

    def run(self, spark: SparkSession, work: Callable[[EventEngine], _T]) -> _T:
        """The result of ``work`` with the selected engine; with Spark after a refusal.

        Raises:
            ConfigurationError: the engine, with ``"auto"`` both, cannot change the table.
        """
        location = self.location
        if location.engine == "spark":
            session.require_delta(spark)
            return self._repeated(work, self._spark_engine(spark))
        missing: str | None = None
        problem, allowed = None, replace(NO_LIMITS, index_bytes=self._index_bytes)
        if location.engine == "auto":
            missing, problem = self._session_problems(spark)
            allowed = self._limits
        limits = LimitCheck(allowed, missing, self._warn_beyond)
        try:
            if problem is not None:
                raise EngineRefusedError(problem)
            limits.validate("driver_memory", resident_memory())
            engine = self._driver_engine(limits)
            result = self._repeated(work, engine)
        except EngineRefusedError as refusal:
            reason = str(refusal)
        else:
            if not limits.exceeded:
                self._log_engine("", "delta-rs changes the table")
            return result
        if location.engine == "delta-rs":
            raise ConfigurationError(
                f"could not change table {location.name!r} with engine='delta-rs': {reason}; use "
                f"engine='spark'"
            )
        if missing is not None:
            raise ConfigurationError(
                f"could not change table {location.name!r}: engine 'delta-rs' cannot ({reason}), "
                f"and for engine 'spark' {missing}; start the session with "
                f"`configure_delta(SparkSession.builder).getOrCreate()` (nats_stream_source.delta)"
            )
        self._log_engine(reason, "Spark changes the table")
        return self._repeated(work, self._spark_engine(spark))

    def _repeated(self, work: Callable[[EventEngine], _T], engine: EventEngine) -> _T:
        return retry_conflicts(lambda: work(engine), self.location.name, (TableChangedError,))

    def finish(self) -> None:
        """Wait for upkeep in the driver that still runs."""
        if self._opened is not None:
            self._opened.wait()

    def _driver_engine(self, limits: LimitCheck) -> EventEngine:
        # Imported here: the other engine does not require deltalake.
        from nats_stream_source.delta.driver.engine import DriverEngine, opened_table

        if self._opened is None:
            self._opened = opened_table(self.location)
        return DriverEngine(self._opened, limits, self._deletion_vectors)

    def _spark_engine(self, spark: SparkSession) -> EventEngine:
        # Imported here: the other engine does not require delta-spark.
        from nats_stream_source.delta.spark.engine import SparkEngine

        location = self.location
        return SparkEngine(spark, location.name, location.path_for_spark(spark))

    def _session_problems(self, spark: SparkSession) -> tuple[str | None, str | None]:
        """What Spark's engine lacks, and why delta-rs is not taken; looked up once.

        The look-up is some calls to the JVM, which would take a tenth of a small batch.
        """
        if self._problems is None:
            self._problems = session.missing(spark), self.location.delta_rs_problem(spark)
        return self._problems

    def _warn_beyond(self, name: str, reason: str) -> None:
        """Warn, once for each limit, that delta-rs goes beyond it since Spark cannot take over."""
        if name not in self._beyond:
            self._beyond.add(name)
            _log.warning(
                "delta-rs changes the table beyond a limit",
                table=self.location.name,
                reason=reason,
            )

    def _log_engine(self, reason: str, message: str) -> None:
        # Numbers in a reason change with every batch.
        state = re.sub(r"[\d,]+", "", reason)
        if state != self._reason:
            self._reason = state
            _log.info(message, table=self.location.name, reason=reason)


def resident_memory() -> int:
    """Resident memory of this process in bytes; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return _peak_memory()


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
