"""Several filters as one, for servers whose consumers of several lose messages.

Before nats-server 2.15 a purge of subjects that one of a consumer's filters covers (a PURGE marker
in a bucket is one) moves the whole consumer on to the first message that is left of them: what its
other filters match before that is passed over, and neither sequences nor heartbeats show it
(measured with 2.10.26 to 2.14.6). Consumers of one filter are right. So there, a range of several
filters is read with one that covers them all, and what none of them matches is left out here. It
takes more of the line, all of the stream at worst.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.subjects import covering, is_literal
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.frames import Frames

_SOUND = (2, 15)
_TOKENS = {"*": r"[^.]+", ">": r".+"}


def loses_messages(connection: Connection) -> bool:
    """Whether consumers of several filters do, on the server of this connection."""
    version = connection.client.connected_server_version
    try:
        return (version.major, version.minor) < _SOUND
    except ValueError:
        return True  # it says no version that anybody knows


class OneFilter:
    """What stands in for ``filters``.

    Attributes:
        subject: the filter that covers all of them.
    """

    def __init__(self, filters: Sequence[str]) -> None:
        self.subject = covering(filters)
        self._names = pa.array([one for one in filters if is_literal(one)], pa.string())
        patterns = [_pattern(one) for one in filters if not is_literal(one)]
        self._pattern = f"(?s)^(?:{'|'.join(patterns)})$" if patterns else None

    def __repr__(self) -> str:
        return f"<OneFilter {self.subject}>"

    def select(self, frames: Frames) -> Frames:
        """Those of ``frames`` that one of the filters matches."""
        if not len(frames):
            return frames
        names = subjects(frames, replace=True)
        mask = pc.is_in(names, value_set=self._names)
        if self._pattern is not None:
            mask = pc.or_(mask, pc.match_substring_regex(names, self._pattern))
        return frames.select(mask.to_numpy(zero_copy_only=False))


def _pattern(subject: str) -> str:
    """A regular expression for a filter."""
    return r"\.".join(_TOKENS.get(token) or re.escape(token) for token in subject.split("."))
