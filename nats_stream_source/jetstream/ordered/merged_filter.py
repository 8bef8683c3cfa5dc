"""One filter in place of several, for servers whose consumers with several filters skip messages.

Before nats-server 2.15, a purge of subjects that one filter of a consumer covers (for example a
PURGE marker in a bucket) moves the whole consumer to the first remaining message of these subjects.
The consumer skips the messages of its other filters before that message, and neither sequences nor
heartbeats show it (measured with 2.10.26 to 2.14.6). Consumers with one filter are not affected.

On these servers, a range with several filters is read with one filter that covers them all, and the
reader drops the messages that match none of them. This transfers more data, at worst the whole
stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.connection.connection import Connection
from nats_stream_source.jetstream.subjects import covering, filter_pattern, is_literal
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries

_FIXED_IN = (2, 15)


def needs_merged_filter(connection: Connection) -> bool:
    """Whether consumers with several filters may skip messages on the connected server."""
    version = connection.client.connected_server_version
    try:
        return (version.major, version.minor) < _FIXED_IN
    except ValueError:
        return True  # the server's version is not a version number


class MergedFilter:
    """One filter in place of ``filters``.

    Attributes:
        subject: the filter that covers all of them.
    """

    def __init__(self, filters: Sequence[str]) -> None:
        self.subject = covering(filters)
        literals = [subject for subject in filters if is_literal(subject)]
        wild = [subject for subject in filters if not is_literal(subject)]
        self._literals = pa.array(literals, pa.string())
        self._pattern = filter_pattern(wild) if wild else None

    def select(self, rows: Deliveries) -> Deliveries:
        """The messages of ``rows`` that match one of the filters."""
        if not len(rows):
            return rows
        names = subjects(rows, replace=True)
        mask = pc.is_in(names, value_set=self._literals)
        if self._pattern is not None:
            mask = pc.or_(mask, pc.match_substring_regex(names, self._pattern))
        return rows.select(mask.to_numpy(zero_copy_only=False))
