"""``python -m nats_stream_source.demo``: runs the demo and compares its tables with the bucket.

Exit status: 0 if the tables equal the bucket; 1 if a key differs or the demo failed; 2 for an
invalid argument; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from nats_stream_source.demo import preflight
from nats_stream_source.errors import NatsSourceError

_INTERRUPTED = 130
_JVM_STACK = re.compile(r"\n+(?:JVM stacktrace|\tat )")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m nats_stream_source.demo",
        description="Follow a NATS key-value bucket into a table with Spark, on real data.",
    )
    parser.add_argument(
        "--rows", type=_count, metavar="N", help="number of departures to replay (default: all)"
    )
    parser.add_argument(
        "--sink",
        choices=("delta", "parquet"),
        default="delta",
        help="write a Delta table, or Parquet files, which require no jars",
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
    number = int(text.replace(",", ""))
    if number < 100:
        raise argparse.ArgumentTypeError(f"{number} is too small, expected at least 100")
    return number


def main(words: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    given = arguments(words)
    problem = preflight.java_problem()
    if problem is not None:
        print(problem, file=sys.stderr)
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
        shutil.rmtree(work, ignore_errors=True)
    else:
        print(f"tables, checkpoints and Spark's log are in {work}")
    return status


def _run(given: argparse.Namespace, work: Path) -> int:
    # Imported here, so that an invalid argument or a missing Java is reported immediately.
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from nats_stream_source.demo.story import Story

    try:
        return 0 if Story(given.rows, given.sink, work).run() else 1
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
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
