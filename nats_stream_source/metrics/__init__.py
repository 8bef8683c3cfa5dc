"""Metrics of running queries, for Prometheus and OpenTelemetry.

:mod:`table` declares them and counts events in any process, :mod:`recorder` has the values in the
driver's process and serves them. ``spark.progress`` and ``delta`` feed what :func:`active_recorder`
returns: without metrics, that costs nothing and requires no package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats_stream_source.metrics.recorder import Recorder

_recorder: Recorder | None = None


def active_recorder() -> Recorder | None:
    """The recorder of this process; None if no query has asked for metrics."""
    return _recorder


def start_recorder() -> Recorder:
    """The recorder of this process, which the first call creates.

    Raises:
        MissingPackageError: the package ``prometheus-client`` is not installed.
    """
    global _recorder
    if _recorder is None:
        from nats_stream_source.metrics.recorder import Recorder

        _recorder = Recorder()
    return _recorder
