"""CDC into Delta Lake: a table that follows a key-value bucket.

``merge_changes`` for ``foreachBatch``, ``merge`` for one batch, and ``reconcile`` for rows whose
keys went without leaving a marker. Needs the extra ``delta`` (``nats-stream-source[delta]``).
"""

from nats_stream_source.delta.changes import merge, merge_changes
from nats_stream_source.delta.reconcile import ReconcileResult, reconcile
from nats_stream_source.delta.table import Deletes

__all__ = ["Deletes", "ReconcileResult", "merge", "merge_changes", "reconcile"]
