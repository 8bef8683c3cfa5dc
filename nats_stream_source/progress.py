"""Deprecated path of ``nats_stream_source.spark.progress``, for one version."""

import warnings

from nats_stream_source.spark.progress import BatchProgress, records, watch_progress

__all__ = ["BatchProgress", "records", "watch_progress"]

warnings.warn(
    "nats_stream_source.progress is deprecated: import records, BatchProgress and watch_progress "
    "from nats_stream_source.spark.progress",
    DeprecationWarning,
    stacklevel=2,
)
