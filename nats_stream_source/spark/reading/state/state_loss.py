"""Reports the entries of a former state of a bucket that cannot be determined.

The error, or with ``failOnDataLoss=false`` the warning, names the keys by the cause for which their
entries are missing, and the settings of the stream that may have removed entries without a trace.
Each cause has its own action: a deeper history keeps superseded revisions and does not keep purged
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.stream_identity import has_older_messages
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.splits import MESSAGE_TTLS, BatchSplit, removal_settings

_MAX_NAMED = 10

log = field_logger(__name__)


class Cause(Enum):
    """Why a key's entry is missing."""

    SUPERSEDED = "superseded"
    PURGED = "purged"


Unknown = Mapping[Cause, Sequence[str]]
"""The subjects whose entries are missing, by cause."""


def has_all_messages(info: StreamInfo) -> bool:
    """Whether the stream still has every message."""
    return info.messages == info.last_seq


def untraced_removals(info: StreamInfo) -> list[str]:
    """The settings that may have removed entries without a trace; empty if none is missing."""
    if has_all_messages(info):
        return []
    settings = list(removal_settings(info.config))
    now = info.now and nanoseconds(info.now)
    young = now and now - nanoseconds(info.created) < (info.config.get("max_age") or 0)
    if "max_age" in settings and young and not has_older_messages(info):
        settings.remove("max_age")  # the stream is younger than the limit
    # The limits remove the oldest messages first, a TTL any message.
    return settings if info.first_seq > 1 else [name for name in settings if name == MESSAGE_TTLS]


def report(
    batch_split: BatchSplit, adapter: FormatAdapter, unknown: Unknown, removals: Sequence[str]
) -> None:
    """Raise DataLossError, or log a warning, if a part of the state is unknown."""
    split, history = batch_split.split, batch_split.history
    stream = split.range.stream
    observed = []
    actions = ["set failOnDataLoss=false to leave out the unknown entries"]
    if superseded := unknown.get(Cause.SUPERSEDED):
        kept = "" if history < 1 else f", of which the bucket keeps {history} per key"
        observed.append(
            f"the entries of {_named(superseded, split.prefix)} were superseded by later "
            f"revisions{kept}"
        )
        actions.append("keep more with a deeper history of the bucket")
    if purged := unknown.get(Cause.PURGED):
        observed.append(
            f"the entries of {_named(purged, split.prefix)} were removed by a later purge or expiry"
        )
        actions.append("delete keys with a DEL marker, which keeps their revisions")
    if removals:
        observed.append(f"entries may have been removed without a trace ({', '.join(removals)})")
        if MESSAGE_TTLS in removals:
            actions[0] = (
                f"set failOnDataLoss=false if no writer sets a TTL: {MESSAGE_TTLS} only allows "
                f"TTLs, and nats-py's create_key_value always sets it"
            )
            actions.append(f"create the bucket without {MESSAGE_TTLS}")
        else:
            actions.append("use a bucket without limits")
    if not observed:
        return
    state = f"as of {adapter.terms.sequence} {split.range.end}: {'; '.join(observed)}"
    if adapter.options.common.fail_on_data_loss:
        raise DataLossError(f"data loss in stream {stream} {state}; {', or '.join(actions)}")
    log.warning(
        f"data loss accepted: stream {stream} {state}; failOnDataLoss=false: leave out the unknown "
        f"entries",
        stream=stream,
    )


def _named(subjects: Sequence[str], prefix: str) -> str:
    """The number of keys, and the first of them."""
    names = sorted(name[len(prefix) :] for name in subjects)
    listed = ", ".join(repr(name) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{len(names)} keys ({listed}{more})"
