"""Counts of events in this process: a planner, a task's worker, or the driver's own.

Code counts where it logs. What takes the counts to the driver's process is not its concern; in a
process from which nothing takes them, they are a few integers.
"""

from __future__ import annotations

import threading
from collections import Counter

from nats_stream_source.metrics.table import Metric

Counts = Counter[tuple[str, ...]]
"""Amounts by a metric's name and the values of its labels, without ``query`` and ``process``."""

_lock = threading.Lock()
_counts: Counts = Counter()


def count(metric: Metric, *labels: str, amount: float = 1) -> None:
    """Add to a counter.

    Args:
        labels: the values of the metric's labels in their order, without ``process``.
    """
    key = (metric.name, *labels)
    with _lock:
        _counts[key] += amount  # type: ignore[assignment]  # seconds are floats


def take() -> Counts:
    """The counts since the last call."""
    with _lock:
        taken = _counts.copy()
        _counts.clear()
    return taken
