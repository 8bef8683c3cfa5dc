"""The choice of the executor of a table: once per query, at its first batch.

- ``"driver"``: this process. A small merge takes milliseconds, a batch of any size is merged in
  parts, and the session needs nothing of Delta.
- ``"spark"``: Delta Lake's MERGE. It takes seconds, for any catalog and table feature.
- ``"auto"``: the driver where it can change the table, else Spark.

**When "auto" takes Spark.** The table is a name in the catalog; or its path is not on a local disk
and ``storage_options`` are not given; or the package ``deltalake`` is not installed; or
:mod:`nats_stream_source.delta.refused` has a row for the table; or its index of keys is larger than
the limit. Both executors keep one contract, so the next query may take the other one.

**Later.** A query stays with its executor. What the driver refuses later (a feature that another
writer has added, an index that has grown beyond its limit) is an error whose action is a restart,
which chooses again.

**If the session lacks Delta Lake**, Spark cannot take the table. An index beyond the limit is then
a warning, since a limit is a precaution. In the other cases the error names what both lack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import SparkSession

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.location import AutoLimits, TableLocation, driver_installed, scheme_of
from nats_stream_source.delta.spark import session
from nats_stream_source.delta.tables import EngineRefusedError, Table, TableChangedError
from nats_stream_source.errors import ConfigurationError, MissingPackageError
from nats_stream_source.logs import field_logger

if TYPE_CHECKING:
    from nats_stream_source.delta.driver.table import DriverTable

_log = field_logger(__name__)
_T = TypeVar("_T")

_driven: weakref.WeakSet[EngineChoice] = weakref.WeakSet()
"""The choices of this process that have taken the driver."""


class EngineChoice:
    """Runs each change of one table with the executor that the first one has chosen."""

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
        self._limits = limits
        self._driver: DriverTable | None = None
        self._engine: Callable[[SparkSession], Table] | None = None

    def run(self, spark: SparkSession, work: Callable[[Table], _T]) -> _T:
        """The result of ``work`` with the executor of the table.

        Args:
            work: leaves the table unchanged if it raises EngineRefusedError.

        Raises:
            ConfigurationError: the executor, with ``"auto"`` both, cannot change the table.
        """
        if self._engine is None:
            return self._choose(spark, work)
        try:
            return self._repeated(work, self._engine(spark))
        except EngineRefusedError as refusal:
            raise ConfigurationError(
                f"could not change table {self.location.name!r}: {refusal} since the query has "
                f"started; restart the query, which then chooses its engine again"
            ) from refusal

    def finish(self) -> None:
        """Wait for upkeep in the driver that still runs."""
        if self._driver is not None:
            self._driver.wait()

    def _choose(self, spark: SparkSession, work: Callable[[Table], _T]) -> _T:
        location = self.location
        if location.engine == "spark":
            session.require_delta(spark)
            return self._by_spark(spark, work, "engine='spark'")
        missing = session.missing(spark) if location.engine == "auto" else None
        problem = None
        if location.engine == "auto":
            problem = location.driver_problem(session.default_filesystem(spark))
        if problem is None:
            engine = self._driver_engine(missing)
            try:
                result = self._repeated(work, engine)
            except EngineRefusedError as refusal:
                problem = str(refusal)
            else:
                self._engine = lambda _: engine
                _driven.add(self)
                _log.info("the driver changes the table", table=location.name)
                return result
        if location.engine == "driver":
            raise ConfigurationError(
                f"could not change table {location.name!r} with engine='driver': {problem}; use "
                f"engine='spark'"
            )
        if missing is not None:
            raise ConfigurationError(
                f"could not change table {location.name!r}: engine 'driver' cannot ({problem}), "
                f"and for engine 'spark' {missing}; start the session with "
                f"`configure(SparkSession.builder, delta=True).getOrCreate()` "
                f"(nats_stream_source.delta)"
            )
        return self._by_spark(spark, work, problem)

    def _by_spark(self, spark: SparkSession, work: Callable[[Table], _T], reason: str) -> _T:
        result = self._repeated(work, self._spark_engine(spark))
        self._engine = self._spark_engine
        _log.info("Spark changes the table", table=self.location.name, reason=reason)
        scheme = scheme_of(self.location.name)
        setting = f"spark.delta.logStore.{scheme}.impl"
        if scheme in ("s3", "s3a", "s3n") and not spark.conf.get(setting, None):
            _log.warning(
                "Spark's commits can replace those of other writers of the table",
                table=self.location.name,
                reason=f"the session lacks {setting}, and Delta Lake's own LogStore replaces an "
                "entry of the log that another writer has put meanwhile",
                action="give the table one writer, or set a LogStore with a conditional put",
            )
        return result

    def _spark_engine(self, spark: SparkSession) -> Table:
        # Imported here: the driver does not require delta-spark.
        from nats_stream_source.delta.spark.table import SparkTable

        location = self.location
        session.require_encoding(spark, location.name)
        path = location.path_for_spark(session.default_filesystem(spark))
        return SparkTable(spark, location.name, path)

    def _repeated(self, work: Callable[[Table], _T], engine: Table) -> _T:
        return retry_conflicts(lambda: work(engine), self.location.name, (TableChangedError,))

    def _driver_engine(self, missing: str | None) -> Table:
        # Imported here: Spark's executor does not require deltalake.
        from nats_stream_source.delta.driver.storage import TableStorage
        from nats_stream_source.delta.driver.table import DriverTable

        if self._driver is None:
            location = self.location
            storage = TableStorage(location.name, location.uri, location.storage_options)
            limits = self._limits
            if limits is None:
                limits = AutoLimits(None) if location.engine == "driver" else AutoLimits()
            # A limit is a precaution: it is not enforced without Spark to take the table. While a
            # query of this process changes the table in the driver, the driver also reconciles and
            # maintains it: of two writers of this process, one would lose its commit.
            driven = any(one.location.uri == location.uri for one in _driven)
            self._driver = DriverTable(
                storage,
                self._deletion_vectors,
                limits.index_bytes,
                enforced=missing is None and not driven,
            )
        return self._driver


def require_engine(location: TableLocation, spark: SparkSession | None) -> None:
    """Raise an error if no executor can change a table in a session.

    Raises:
        MissingPackageError: the package that the engine requires is not installed.
        ConfigurationError: the session lacks Delta's jar or a setting.
    """
    if spark is None:
        return
    if location.engine == "spark" or (location.engine == "auto" and not location.is_path):
        session.require_delta(spark)
    elif location.engine == "auto" and not driver_installed():
        missing = session.missing(spark)
        if missing is not None:
            raise MissingPackageError(
                f"could not change table {location.name!r}: engine 'driver' requires the package "
                f"deltalake, and for engine 'spark' {missing}; run "
                f"`pip install 'nats-stream-source[delta]'`"
            )
