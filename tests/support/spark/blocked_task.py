"""Tasks of Spark that stop within their split until they are released.

:meth:`BlockedTask.work` follows a source in its task (``mapInArrow``). The source's split must hold
much more than fits between there and the server, and the session is one of :func:`session`: then
the server still has the reader's consumer while the task has stopped.

Such a task may be interrupted. Before it stops it must not be: Spark 4.2.0 frees the buffer
of the rows that it hands to Python when its thread is interrupted meanwhile, and the JVM crashes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession

from tests.support.wait import wait_until

# What runs in a task is pickled as it is: workers do not import tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

PER_SPLIT, SIZE = 6000, 24_000
"""Messages, and bytes of each, that are enough for a split. From the server to where the task
stands still are three connections, and Linux lets each take up to 36 MiB."""


def session(spark: SparkSession) -> SparkSession:
    """A session on the same Spark in which rows pass from one step to the next soon."""
    made = spark.newSession()
    # Else what follows the source is given its first rows when there are 10,000.
    made.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    return made


class BlockedTask:
    """The first task of a stage stops at its first rows.

    Args:
        directory: to be made; where the tasks leave their ids.
        attempts: how many attempts at that task stop.
        after: how many record batches each of them passes on before.
    """

    def __init__(self, directory: Path, attempts: int = 1, after: int = 0) -> None:
        directory.mkdir()
        self._directory = directory
        self._attempts = attempts
        self._after = after

    @property
    def work(self) -> Work:
        """What follows the source; it passes all rows on."""
        place, attempts, after = str(self._directory), self._attempts, self._after

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            for number, batch in enumerate(batches):
                blocked = context.partitionId() == 0 and context.attemptNumber() < attempts
                if blocked and number >= after:
                    _stand_still(Path(place), context)
                yield batch

        return work

    def wait(self, attempt: int, alive: Callable[[], None]) -> tuple[int, int]:
        """As :meth:`arrived`, for a task that is not interrupted."""
        at = self._directory / f"{attempt}.at"
        wait_until(at.exists, f"attempt {attempt} has its first rows", alive=alive, deadline=600)
        stage, task = map(int, at.read_text().split())
        return stage, task

    def arrived(
        self, spark: SparkSession, attempt: int, alive: Callable[[], None]
    ) -> tuple[int, int]:
        """Wait until an attempt has stopped; the ids of its stage and its task.

        Args:
            alive: raises when that cannot come any more.
        """
        stage, task = self.wait(attempt, alive)
        wait_until(
            lambda: _waits_for_python(spark, task),
            f"task {task} hands no rows over",
            alive=alive,
            deadline=600,
        )
        return stage, task

    def kill(
        self, spark: SparkSession, attempt: int, interrupt: bool, alive: Callable[[], None]
    ) -> None:
        """Let Spark kill an attempt that has stopped, and wait until it has."""
        stage, task = (
            self.arrived(spark, attempt, alive) if interrupt else self.wait(attempt, alive)
        )
        _wait_for_status(spark, stage, task, (attempt, "RUNNING"), alive)
        assert spark.sparkContext._jsc.sc().killTaskAttempt(task, interrupt, "a test")
        _wait_for_status(spark, stage, task, (attempt, "KILLED"), alive)

    def over(self) -> None:
        """All stopped tasks continue."""
        (self._directory / "over").touch()


def _wait_for_status(
    spark: SparkSession, stage: int, task: int, status: tuple[int, str], alive: Callable[[], None]
) -> None:
    """Wait until Spark has this attempt and status of a task on record."""

    def record() -> dict[int, tuple[int, str]]:
        tasks = spark.sparkContext._jsc.sc().statusStore().taskList(stage, 0, 1000)
        some = (tasks.apply(i) for i in range(tasks.size()))
        return {task.taskId(): (task.attempt(), task.status()) for task in some}

    wait_until(
        lambda: record().get(task) == status,
        f"task {task} has become {status[1]}",
        alive=alive,
        seen=record,
        deadline=600,
    )


def _waits_for_python(spark: SparkSession, task: int) -> bool:
    """Whether a task's thread in this JVM waits for the Python worker behind the source."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    threads = jvm.java.lang.management.ManagementFactory.getThreadMXBean()
    for thread in threads.dumpAllThreads(False, False):
        if thread.getThreadName().endswith(f"(TID {task})"):
            calls = {call.getMethodName() for call in thread.getStackTrace()}
            return "select" in calls and "writeNextInputToStream" not in calls
    return False


def _stand_still(directory: Path, context: TaskContext) -> None:
    over = directory / "over"
    if over.exists():
        return
    partial = directory / f"{context.attemptNumber()}.partial"
    partial.write_text(f"{context.stageId()} {context.taskAttemptId()}")
    partial.rename(partial.with_suffix(".at"))
    # A task is killed in the JVM: this process may live on, and hear of it when it writes.
    while not over.exists():
        time.sleep(0.05)
    raise RuntimeError("the task was let go, to end")
