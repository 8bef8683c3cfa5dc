"""The limit of a server on the lines that a client sends, ``max_control_line``.

A server closes the connection after a longer PUB, HPUB or SUB, and does not report its limit before
that. It counts what follows the command: subject, reply or queue, sizes and the spaces between
(docs/internals/measurements.md, Servers 25). So a line is validated before it is sent. If a server
closes the connection nevertheless, its limit is lower than the longest line of that connection:
then the limit is lowered, and the next attempt to send that line is refused here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nats_stream_source.errors import NameTooLongError

_SHOWN = 100  # characters of a subject in an error
_SHOWN_NAME = 50  # characters of the name that a subject has encoded
_LOWEST = 512  # bytes; a server with a lower limit does not accept the requests of JetStream
_SHORTEST_REST = 2  # bytes of a PUB beside its subject: a space and one digit
_MAX_REST = 100  # more than a line has beside its subject, with a reply of the default prefix


class ControlLine:
    """The limit on the lines of one connection.

    Attributes:
        limit: the maximum length of the arguments of a line, in bytes.
        longest: the length of the longest line since the client connected.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.longest = 0
        self._lowered = False

    def validate(self, subject: str, rest: int) -> None:
        """Raise NameTooLongError if ``subject`` and ``rest`` further bytes are too long a line."""
        length = _length(subject) + rest
        if length > self.limit:
            raise self.error(subject)
        self.longest = max(self.longest, length)

    def validate_name(self, subject: str) -> None:
        """Raise NameTooLongError for a subject to which no message could be published."""
        # A character has at most four bytes: most names need not be encoded.
        if 4 * len(subject) + _SHORTEST_REST <= self.limit:
            return
        if _length(subject) + _SHORTEST_REST > self.limit:
            raise self.error(subject)

    def fits(self, subject: str) -> bool:
        """Whether a request on ``subject`` is accepted, whatever its reply and size."""
        return _length(subject) + _MAX_REST <= self.limit

    def refused(self, subject: str) -> bool:
        """Whether a request on ``subject`` can be the one after which a server closed."""
        return self._lowered and not self.fits(subject)

    def error(self, subject: str) -> NameTooLongError:
        """The error for a subject that is too long for this limit."""
        shown = subject if len(subject) <= _SHOWN else f"{subject[:_SHOWN]}…"
        return NameTooLongError(
            f"could not send subject {shown!r}: it has {_length(subject):,} "
            f"bytes, expected a line of at most {self.limit:,} bytes with reply and sizes "
            f"('max_control_line'); use a shorter name, or raise 'max_control_line' at the servers "
            f"and here",
            settings=("max_control_line",),
        )

    def lower(self) -> None:
        """Lower the limit: a server closed the connection after one of the lines sent."""
        if self.longest > _LOWEST:
            self.limit, self._lowered = min(self.limit, self.longest - 1), True


@contextlib.contextmanager
def encoded_name(kind: str, name: str, *, encoded: bool = True) -> Iterator[None]:
    """Add the name to a NameTooLongError of its subject, which shows the encoded name only.

    Args:
        kind: what ``name`` names: ``key``.
        encoded: whether the subject has the name in another form.
    """
    try:
        yield
    except NameTooLongError as error:
        if not encoded:
            raise
        shown = name if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]}…"
        raise NameTooLongError(
            f"{kind} {shown!r} of {len(name):,} characters is too long: {error}",
            settings=error.settings,
        ) from None


def _length(subject: str) -> int:
    return len(subject.encode(errors="replace"))
