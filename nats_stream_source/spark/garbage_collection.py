"""Garbage collection in Spark's Python workers.

After each task, Spark collects the garbage of a worker that it keeps. With the modules of Spark,
Arrow, NumPy and this package, the collector searches 70,000 objects, which takes 35 ms: more than
the read of a small micro-batch.
"""

from __future__ import annotations

import gc

from pyspark import TaskContext


def exempt_modules() -> None:
    """Exempt the objects that a worker has at its first task, mostly its modules', from collection.

    It does nothing in a process that does not run a task. Garbage that exists already is kept.
    """
    if TaskContext.get() is not None and not gc.get_freeze_count():
        gc.freeze()
