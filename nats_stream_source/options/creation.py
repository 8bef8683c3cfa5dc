"""The options of a sink for the bucket or stream that ``ifMissing=create`` creates.

Those that only a bucket, or only a stream, has are in ``options.writing``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nats_stream_source.errors import OptionError
from nats_stream_source.options import converters
from nats_stream_source.options.table import Option

CREATION: tuple[Option, ...] = (
    Option(
        "replicas",
        converters.replica_count,
        "Replicas of a bucket or stream that is created. Default: 1; at most 5.",
    ),
    Option(
        "storage",
        converters.one_of("file", "memory"),
        "Storage of a bucket or stream that is created. Default: `file`.",
    ),
    Option(
        "maxBytes",
        converters.byte_size,
        "Size of a bucket or stream that is created, in bytes or with `k`, `m` or `g`; an account "
        "can require it. A full bucket refuses rows, a full stream removes its oldest messages. "
        "Default: no limit.",
    ),
    Option(
        "compression",
        converters.one_of("none", "s2"),
        "Compression of the files of a bucket or stream that is created. Default: `none`; requires "
        "server 2.10.",
    ),
    Option(
        "placementCluster",
        converters.string,
        "Cluster of a bucket or stream that is created. Default: the connection's.",
    ),
    Option(
        "placementTags",
        converters.string_list,
        "Tags that each server of a bucket or stream that is created has. Default: none.",
        default=(),
    ),
    Option(
        "metadata",
        converters.metadata,
        'Metadata of a bucket or stream that is created, as `{"owner": "fleet"}`. Default: none; '
        "requires server 2.10.",
    ),
    Option(
        "ttl",
        converters.long_duration,
        "Age at which a created bucket or stream removes a message. Default: no limit. The column "
        "`ttl` sets it for single rows.",
    ),
    Option(
        "duplicateWindow",
        converters.long_duration,
        "Time during which a created bucket or stream recognises a message id that it has stored. "
        "Default: 120. Set it longer than a restart of the query takes.",
    ),
)


def validate_creation(values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise OptionError for a property of a new bucket or stream without ``ifMissing=create``."""
    if values["ifMissing"] == "create":
        return
    for name in (*names, *(option.name for option in CREATION)):
        if values[name] not in (None, ()):
            raise OptionError(
                f"option {name!r} has no effect without ifMissing=create: the properties of an "
                f"existing bucket or stream do not change; add ifMissing=create or remove {name!r}"
            )
