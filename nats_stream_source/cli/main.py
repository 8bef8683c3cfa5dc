"""The command line: subcommands, exit status, errors in one line.

Exit status: 0 for success; 1 for a failure that a restart may cure (a server, the network, the
storage), or if ``inspect`` found a difference or too much lag; 2 if the command line, an option,
the user, an entry, the bucket, the table or an installed package must be changed; 3 for data loss;
130 after Ctrl-C. Results go to standard output, everything else to standard error. An error is one
line that names the flags, variables or fields of a context that can change it. A subcommand's
module is imported when the subcommand is used.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NoReturn

from nats_stream_source import __version__, errors

FAILED, USAGE, DATA_LOSS, INTERRUPTED = 1, 2, 3, 130
# Errors that a restart repeats: the user must change something.
_LASTING = (
    *(errors.ConfigurationError, errors.StreamNotFoundError, errors.UndecodableError),
    *(errors.AuthorizationError, errors.TlsError, errors.PermissionDeniedError),
)

_PACKAGE = "nats_stream_source.cli"
_COMMANDS = {
    "inspect": "show a query's checkpoint, and its lag behind the live stream",
    "peek": "show the first or last rows of a bucket or stream, or follow it",
    "follow": "keep a Delta table equal to a bucket; requires the extra 'follow'",
}


def main(given: Sequence[str] | None = None) -> int:
    """Run the command with ``given`` arguments, or those of the process; returns the status."""
    argv = list(sys.argv[1:] if given is None else given)
    arguments = argparse.Namespace(origins={})
    if sys.stdout is None:
        return _fail(OSError("standard output is closed"), FAILED, {})
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A key or a value may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _, unknown = _parser(argv).parse_known_args(argv, arguments)
        if unknown:
            # By the command's parser, whose help has the flags.
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. The buffered rest is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except errors.DataLossError as error:
        return _fail(error, DATA_LOSS, arguments.origins)
    except (errors.NatsSourceError, OSError) as error:
        return _fail(error, USAGE if isinstance(error, _LASTING) else FAILED, arguments.origins)


class _Formatter(argparse.HelpFormatter):
    """Help texts in which a line does not end within a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _fail(error: Exception, status: int, origins: Mapping[str, str]) -> int:
    text = str(error)
    if isinstance(error, errors.NatsSourceError):
        from nats_stream_source.cli.options import error_text  # at an error only

        text = error_text(error, origins)
    print("nats-stream-source:", " ".join(text.split()), file=sys.stderr)
    return status


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nats-stream-source",
        description="Inspect NATS JetStream buckets and streams, and Spark queries on them.",
        epilog="exit status: 0 success; 1 a failure, a difference, too much lag; 2 wrong usage; "
        "3 data loss; 130 Ctrl-C",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=_Formatter,
        )
        if name in argv[:1]:
            module = importlib.import_module(f"{_PACKAGE}.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=command)
    return parser
