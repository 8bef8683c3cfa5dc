"""Asks Spark's Python workers whether they can run the formats.

Spark starts its Python workers from ``PYSPARK_PYTHON``, by default from the first ``python3`` of
the PATH, which often is not the Python of the program. Spark's own errors then name neither the
setting nor the Python: ``DATA_SOURCE_NOT_FOUND``, ``PYTHON_VERSION_MISMATCH``, a
``ModuleNotFoundError`` or an ``EOFException``.

The check is a query of one row whose task reports its Python. The function of that task is nested,
so that it is pickled by value: by reference, the worker would have to import this package first.
It is not an Arrow function, since the worker may lack pyarrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from nats_stream_source.errors import WorkerPythonError
from nats_stream_source.logs import field_logger

_REQUIRED = {
    "nats_stream_source": "nats-stream-source",
    "nats": "nats-py",
    "pyarrow": "pyarrow",
    "numpy": "numpy",
}
"""The modules that a worker imports, and the packages that have them."""

_ADVICE = (
    "set PYSPARK_PYTHON, or spark.pyspark.python, to a Python that has the package, before the "
    "session is created; on one machine: os.environ['PYSPARK_PYTHON'] = sys.executable"
)

# Texts of Spark 4.0 to 4.3 for a worker that does not start, and in them what the user is shown.
_NOT_STARTED = (  # the first one that is found counts
    r"PYTHON_VERSION_MISMATCH\] (.+?)(?:, PySpark|$)",
    r"(Cannot run program.*)",
    r"Error from python worker.*\n\s*(.+)",
    r"(.*pyspark\.daemon.*)",
)

log = field_logger(__name__)


def verify_workers(spark: SparkSession, version: str) -> None:
    """Verify that a Python worker of ``spark`` can run the formats of this ``version``.

    Raises:
        WorkerPythonError: the workers' Python cannot be run, has another version than the driver's,
            or lacks a package.
    """
    try:
        report = udf(_report(tuple(_REQUIRED)), "string", useArrow=False)
        row = spark.range(0, 1, 1, 1).select(report("id")).head()
    except _spark_errors() as error:
        reason = start_failure(str(error))
        if reason is None:
            # The job failed for a reason of the cluster, which the next query will show.
            log.warning(
                "could not check the workers' Python", reason=str(error).strip().partition("\n")[0]
            )
            return
        raise WorkerPythonError(
            f"could not run Spark's Python workers: {reason}; {_ADVICE}"
        ) from None
    assert row is not None  # a range of one
    verify(json.loads(row[0]), version)


def verify(worker: dict[str, Any], version: str) -> None:
    """Raise WorkerPythonError if the worker lacks a package, or has another version of this one."""
    where = f"{worker['executable']} (Python {worker['python']})"
    if worker["missing"]:
        packages = ", ".join(_REQUIRED[module] for module in worker["missing"])
        raise WorkerPythonError(
            f"could not use Spark's Python workers: {where} lacks {packages}; install it there "
            f"with `{worker['executable']} -m pip install 'nats-stream-source'`, or {_ADVICE}"
        )
    if worker["package"] != version:
        raise WorkerPythonError(
            f"could not use Spark's Python workers: {where} has nats-stream-source "
            f"{worker['package']}, expected {version} as in the driver; install the same version "
            f"there, or {_ADVICE}"
        )


def start_failure(text: str) -> str | None:
    """What Spark reports of a worker that did not start; None if ``text`` is of another failure."""
    found = (re.search(pattern, text, re.MULTILINE) for pattern in _NOT_STARTED)
    return next((one[1].strip() for one in found if one), None)


def _report(modules: tuple[str, ...]) -> Callable[[int], str]:
    """The function of the task; nested, see the module."""

    def report(_: int) -> str:
        import importlib.util
        import json
        import platform
        import sys

        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        package = None
        if "nats_stream_source" not in missing:
            package = importlib.import_module("nats_stream_source").__version__
        return json.dumps(
            {
                "executable": sys.executable,
                "python": platform.python_version(),
                "package": package,
                "missing": missing,
            }
        )

    return report


def _spark_errors() -> tuple[type[Exception], ...]:
    """What a failed job raises; a client of Spark Connect lacks py4j."""
    try:
        from py4j.protocol import Py4JError
    except ModuleNotFoundError:
        return (PySparkException,)
    return PySparkException, Py4JError
