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

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from pyspark.sql import SparkSession

from nats_stream_source.delta import session
from nats_stream_source.delta.table import EngineRefusedError, TableEngine, is_path
from nats_stream_source.errors import ConfigurationError, MissingPackageError
from nats_stream_source.logs import field_logger

Engine = Literal["auto", "delta-rs", "spark"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two characters: `C:\` is no scheme

_log = field_logger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """Up to which sizes ``engine="auto"`` takes delta-rs; None for no limit.

    Attributes:
        batch_rows: rows of the reduced batch, for each partition and in total.
        batch_bytes: size of the reduced batch in Arrow, for each partition and in total.
        table_bytes: size of the table's live data files.
        driver_memory: resident memory of the driver's Python process before the merge, in bytes.
    """

    batch_rows: int | None = 1_000_000
    batch_bytes: int | None = 256 << 20
    table_bytes: int | None = 1 << 30
    driver_memory: int | None = 4 << 30

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ConfigurationError(
                    f"invalid argument: {name} is {value!r}, expected an integer from 1, or None"
                )


NO_LIMITS = AutoLimits(None, None, None, None)


@dataclass(frozen=True)
class TableLocation:
    """Where a table is, and which engine may change it.

    Attributes:
        name: path, URI or catalog name as the user gave it.
        engine: the user's choice.
        storage_options: options of delta-rs for an object store; never in a repr, as they have
            secrets.
    """

    name: str
    engine: Engine = "auto"
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            raise ConfigurationError(
                f"invalid argument: engine is {self.engine!r}, expected 'auto', 'delta-rs' or "
                f"'spark'"
            )
        if self.storage_options is not None and self.engine == "spark":
            raise ConfigurationError(
                "invalid arguments: storage_options with engine='spark', which reads the Hadoop "
                "settings of the session; remove storage_options, or use engine='delta-rs'"
            )
        if not is_path(self.name) and (
            self.storage_options is not None or self.engine == "delta-rs"
        ):
            given = "storage_options" if self.storage_options is not None else "engine='delta-rs'"
            raise ConfigurationError(
                f"invalid arguments: {given} with table {self.name!r}, which is a name in the "
                f"catalog; pass the table's path or URI, or use engine='spark'"
            )
        if self.engine == "delta-rs" and not _installed():
            raise MissingPackageError(
                "could not use engine='delta-rs': the package deltalake is not installed; run "
                "`pip install 'nats-stream-source[delta]'`"
            )

    @property
    def uri(self) -> str:
        """The path or URI for delta-rs."""
        return self.name if _scheme(self.name) else os.path.abspath(self.name)

    def check_session(self, spark: SparkSession | None) -> None:
        """Raise an error if no engine can change the table in this session.

        Raises:
            MissingPackageError: the package that the engine requires is not installed.
            ConfigurationError: the session lacks Delta's jar or a setting.
        """
        if self.engine == "spark" or (self.engine == "auto" and not is_path(self.name)):
            if spark is not None:
                session.check_delta(spark)
        elif self.engine == "auto" and not _installed() and spark is not None:
            missing = session.missing(spark)
            if missing is not None:
                raise MissingPackageError(
                    f"could not change table {self.name!r}: engine 'delta-rs' requires the package "
                    f"deltalake, and for engine 'spark' {missing}; run "
                    f"`pip install 'nats-stream-source[delta]'`"
                )

    def delta_rs_problem(self, spark: SparkSession) -> str | None:
        """Why ``engine="auto"`` does not take delta-rs for this location; None if it does."""
        if not is_path(self.name):
            return "the table is a name in the catalog"
        if not _installed():
            return "the package deltalake is not installed"
        scheme = _scheme(self.name)
        if self.storage_options is not None or scheme == "file":
            return None
        if scheme:
            return f"the path has the scheme '{scheme}', and storage_options are not given"
        filesystem = session.default_filesystem(spark)
        if filesystem is None:
            return "with Spark Connect, a path without a scheme is the server's; write file:///…"
        if not filesystem.startswith("file:"):
            return f"paths without a scheme are in {filesystem}"
        return None


class EngineSelector:
    """Runs each change of one table with the engine that its location and the limits select."""

    def __init__(self, location: TableLocation, limits: AutoLimits | None = None) -> None:
        self.location = location
        self._limits = limits or AutoLimits()
        self._reason = ""  # of the last line; "" if delta-rs changed the table within the limits
        self._beyond: set[str] = set()  # limits that delta-rs went beyond, which were logged
        self._problems: tuple[str | None, str | None] | None = None

    def __repr__(self) -> str:
        return f"<EngineSelector {self.location!r}>"

    def run(self, spark: SparkSession, work: Callable[[TableEngine], _T]) -> _T:
        """The result of ``work`` with the selected engine; with Spark after a refusal.

        Raises:
            ConfigurationError: the engine, with ``"auto"`` both, cannot change the table.
        """
        location = self.location
        if location.engine == "spark":
            session.check_delta(spark)
            return work(self._spark_engine(spark))
        missing: str | None = "not allowed"
        problem, allowed = None, NO_LIMITS
        if location.engine == "auto":
            missing, problem = self._session_problems(spark)
            allowed = self._limits
        limits = LimitCheck(allowed, missing, self._warn_beyond)
        try:
            if problem is not None:
                raise EngineRefusedError(problem)
            limits.check("driver_memory", resident_memory())
            result = work(self._driver_engine(limits))
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
        return work(self._spark_engine(spark))

    def _driver_engine(self, limits: LimitCheck) -> TableEngine:
        # Imported here: the other engine does not require deltalake.
        from nats_stream_source.delta.driver.engine import DriverEngine

        return DriverEngine(self.location, limits)

    def _spark_engine(self, spark: SparkSession) -> TableEngine:
        # Imported here: the other engine does not require delta-spark.
        from nats_stream_source.delta.spark.engine import SparkEngine

        return SparkEngine(spark, self.location.name)

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


class LimitCheck:
    """The limits of one change.

    Args:
        limits: of ``engine="auto"``.
        missing: why Spark cannot take over; None if it can, and then the limits are enforced.
        warn: logs a limit that is exceeded but not enforced, with the reason.
    """

    def __init__(
        self,
        limits: AutoLimits,
        missing: str | None = None,
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        self._limits = limits
        self._missing = missing
        self._warn = warn
        self.exceeded = False

    @property
    def enforced(self) -> AutoLimits:
        """The limits to observe before the data is read."""
        return self._limits if self._missing is None else NO_LIMITS

    def check(self, name: str, value: int) -> None:
        """Compare a value with the limit of this name.

        Raises:
            EngineRefusedError: the limit is exceeded and Spark can take over.
        """
        limit = getattr(self._limits, name)
        if limit is None or value <= limit:
            return
        self.exceeded = True
        reason = f"{name} is {value:,}, limit {limit:,}"
        if self._missing is None:
            raise EngineRefusedError(reason)
        if self._warn is not None:
            self._warn(name, f"{reason}; Spark cannot take over: {self._missing}")


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


def _installed() -> bool:
    return importlib.util.find_spec("deltalake") is not None


def _scheme(table: str) -> str:
    match = _SCHEME.match(table)
    return match[1].lower() if match else ""
