"""``python -m nats_stream_source.demo``: the whole story, and the comparison at its end.

Exit status: 0 when the tables equal the bucket; 1 when a key differs, or something went wrong; 2
for a wrong argument; 130 after Ctrl-C.
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
    """The command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m nats_stream_source.demo",
        description="Follow a NATS key-value bucket into a table with Spark, on real data.",
    )
    parser.add_argument(
        "--rows", type=_count, metavar="N", help="the first N departures only (default: all)"
    )
    parser.add_argument(
        "--sink",
        choices=("delta", "parquet"),
        default="delta",
        help="where the rows go: a Delta table, or Parquet files, which need no jars",
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="a new or empty directory for everything that is written, kept at the end"
        " (default: a temporary one, removed when all is equal)",
    )
    return parser.parse_args(given)


def _count(text: str) -> int:
    number = int(text.replace(",", ""))
    if number < 100:
        raise argparse.ArgumentTypeError("at least 100")
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
        print(f"--work {work} is not empty: name a new directory", file=sys.stderr)
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
    # Only now, so that a wrong argument or a missing Java is told at once.
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
    """A Spark error's text without the stack traces of both sides, which are in its log."""
    text = _JVM_STACK.split(text, maxsplit=1)[0].strip()
    before, traceback, after = text.partition("Traceback (most recent call last):")
    if not traceback:
        return text
    # The lines of a Python stack are indented; what follows the last of them is the error.
    lines = after.splitlines()
    last = max((n for n, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join([before.strip(), *lines[last + 1 :]]).strip()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # What is cut now is cut on purpose; py4j would log each call to the JVM that does not return.
    logging.disable()
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
