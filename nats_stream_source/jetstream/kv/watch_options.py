"""Options of a watch (ADR-8, "Watch")."""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.kv.arguments import validate_optional_revision, validate_revision
from nats_stream_source.jetstream.kv.bucket import ALL_KEYS
from nats_stream_source.jetstream.subjects import validate_filters

_MIN_HEARTBEAT = 0.1  # seconds; the shortest interval that servers accept


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a watch sends and where it starts.

    Attributes:
        keys: filters that do not overlap; ``>`` for all keys.
        include_history: all revisions in the bucket, not only the last of each key.
        ignore_deletes: omit markers.
        meta_only: omit values.
        updates_only: omit existing entries; the signal is sent at once.
        resume_from_revision: start at this revision: all entries from it on.
        min_last_revision: fail if the bucket does not reach this revision before the start
            (ADR-53).
        heartbeat: seconds between the server's idle heartbeats, at least 0.1. After three
            intervals without a message or heartbeat the consumer is re-created.

    Raises:
        InvalidNameError: a filter is invalid.
        ConfigurationError: an option is out of range, or two contradict each other.
    """

    keys: tuple[str, ...] = ALL_KEYS
    include_history: bool = False
    ignore_deletes: bool = False
    meta_only: bool = False
    updates_only: bool = False
    resume_from_revision: int | None = None
    min_last_revision: int | None = None
    heartbeat: float = 0.5

    def __post_init__(self) -> None:
        validate_filters(self.keys)
        starts = [name for name in ("include_history", "updates_only") if getattr(self, name)]
        if self.resume_from_revision is not None:
            starts.append("resume_from_revision")
            validate_revision("watch", "resume_from_revision", self.resume_from_revision, first=1)
        validate_optional_revision("watch", "min_last_revision", self.min_last_revision)
        if len(starts) > 1:
            raise ConfigurationError(
                f"could not watch: {' and '.join(starts)} are both set, but a watch has one start; "
                f"set one of them"
            )
        if self.heartbeat < _MIN_HEARTBEAT:
            raise ConfigurationError(
                f"could not watch: heartbeat is {self.heartbeat}, expected at least "
                f"{_MIN_HEARTBEAT} seconds; increase heartbeat"
            )
