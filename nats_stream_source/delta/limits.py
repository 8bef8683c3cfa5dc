"""Up to which sizes ``engine="auto"`` takes the driver's engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nats_stream_source.delta.table import EngineRefusedError
from nats_stream_source.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """Up to which sizes ``engine="auto"`` takes delta-rs; None for no limit.

    Attributes:
        batch_rows: rows of the reduced batch, for each partition and in total.
        batch_bytes: size of the reduced batch in Arrow, for each partition and in total.
        table_bytes: size of the table's live data files, where they are rewritten (tables without
            deletion vectors).
        index_bytes: size of the index of keys in the driver's memory, for tables with deletion
            vectors: 56 bytes for each key and the bytes of the key. With ``engine="delta-rs"``, the
            one limit that applies if it is given.
        driver_memory: resident memory of the driver's Python process before the merge, in bytes.
    """

    batch_rows: int | None = 1_000_000
    batch_bytes: int | None = 256 << 20
    table_bytes: int | None = 1 << 30
    index_bytes: int | None = 1 << 30
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


NO_LIMITS = AutoLimits(None, None, None, None, None)


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

    def validate(self, name: str, value: int) -> None:
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
