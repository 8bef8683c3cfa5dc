"""The limit of the driver's index of keys."""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """Up to which size of the index ``engine="auto"`` takes the driver; None for no limit.

    Attributes:
        index_bytes: size of the index of keys in the driver's memory: 56 bytes for each key and the
            bytes of the key. With ``engine="driver"`` it applies if ``limits`` are given.
    """

    index_bytes: int | None = 1 << 30

    def __post_init__(self) -> None:
        value = self.index_bytes
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ConfigurationError(
                f"invalid argument: index_bytes is {value!r}, expected an integer from 1, or None"
            )
