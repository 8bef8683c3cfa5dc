"""The streams of an account and their states, with one request for 256 streams.

A server returns ``STREAM.LIST`` in pages, sorted by name. In a cluster it collects the states from
the stream leaders; a stream without a leader is missing from ``streams``. A stream that is created
or deleted between two pages moves the others, so one list may lack a stream that exists: what a
list lacks must be confirmed by ``STREAM.INFO``.
"""

from __future__ import annotations

from typing import Any

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.json_fields import array, integer, object_, string
from nats_stream_source.jetstream.stream_info import StreamInfo

PAGE = 256
"""Streams of one response (JSApiListLimit of nats-server)."""


class StreamList:
    """Lists the streams of an account, again and again.

    Attributes:
        requests: the number of requests of the last list.
    """

    def __init__(self) -> None:
        self.requests = 1
        self._last: dict[str, tuple[dict[str, Any], StreamInfo]] = {}

    async def request(self, jetstream: JetStream) -> dict[str, StreamInfo]:
        """The streams by name. One that is unchanged is the object of the last call.

        Raises:
            ProtocolError, RequestTimeoutError, PermissionDeniedError: as ``JetStream.call``.
        """
        found: dict[str, tuple[dict[str, Any], StreamInfo]] = {}
        offset = requests = 0
        while True:
            response = await jetstream.call("STREAM.LIST", {"offset": offset})
            requests += 1
            page = array(response, "streams")
            for stream in page:
                name = string(object_(stream, "config"), "name")
                found[name] = self._parsed(name, stream)
            offset += len(page)
            if not page or offset >= integer(response, "total", default=0):
                break
        self.requests, self._last = requests, found
        return {name: info for name, (_, info) in found.items()}

    def _parsed(self, name: str, stream: dict[str, Any]) -> tuple[dict[str, Any], StreamInfo]:
        # Parsing takes 35 µs a stream, comparing 2. The state of replicas always changes.
        comparable = {key: value for key, value in stream.items() if key != "ts"}
        last = self._last.get(name)
        if last is not None and last[0] == comparable:
            return last
        return comparable, StreamInfo.parse(stream)
