"""Writes to key-value buckets (ADR-8) and creates them; revisions of ADR-53, prefixes of ADR-19.

A bucket is a stream (``config.py``), an entry is a message (``entry.py``). A write is a message to
the key's subject; a marker is an empty message with a header; a write at a revision has the header
for the expected last sequence. Reads are in ``reader.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.connection.control_line import encoded_name
from nats_stream_source.errors import (
    ApiError,
    BucketExistsError,
    ConfigurationError,
    KeyExistsError,
    ServerTooOldError,
    TtlNotSupportedError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.bucket import (
    ALL_KEYS,
    Bucket,
    bucket_errors,
    bucket_stream_info,
)
from nats_stream_source.jetstream.kv.codec import Codecs, kv_codec
from nats_stream_source.jetstream.kv.config import OMITTED_WHEN_UNSET, KeyValueConfig
from nats_stream_source.jetstream.kv.entry import (
    Entry,
    last_entry_after,
    validate_revision,
)
from nats_stream_source.jetstream.kv.reader import ReadOnlyKeyValue
from nats_stream_source.jetstream.kv.requests import last_matching_seq
from nats_stream_source.jetstream.publish.pub_ack import (
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    MSG_ID,
    ROLLUP,
    TTL,
    no_ack_error,
)
from nats_stream_source.jetstream.publish.publisher import Publisher
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import (
    RESERVED,
    is_literal,
    stream_of,
    validate_written_key,
)
from nats_stream_source.jetstream.times import LONGEST_DURATION, nanoseconds
from nats_stream_source.wire.headers import KV_OPERATION

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CREATE_ATTEMPTS = 5  # for writers that delete and create the same key at the same time
_DEFAULT_MARKER_AGE = 30 * 60.0  # seconds; the default of NATS's own clients


class KeyValue(ReadOnlyKeyValue):
    """A bucket to read from and to write to (ADR-8, "KV").

    Writes return their revision after the stream stored them. In addition to the errors that they
    list, they raise ConfigurationError, before anything is sent, for an argument of another type or
    out of range, and for a bucket whose stream has ``no_ack``; the errors of :meth:`Publisher.send`
    and its future: MessageTooLargeError, StreamFullError, NoStreamError, PermissionDeniedError; and
    AckLostError or AckTimeoutError if it is unknown whether the write was stored.
    """

    @classmethod
    async def create_bucket(
        cls, jetstream: JetStream, config: KeyValueConfig, **codecs: Unpack[Codecs]
    ) -> KeyValue:
        """Create a bucket; if it exists with the same properties, open it.

        Args:
            jetstream: the connection's JetStream.
            config: the bucket's properties.
            codecs: the codec arguments of :meth:`open`; a bucket does not store them.

        Raises:
            BucketExistsError: it exists with other properties.
            ServerTooOldError: the server does not support one of the properties.
            ApiError: the server rejects the properties.
        """
        codec = kv_codec(**codecs)
        await _require_server_support(jetstream, config)
        requested = config.stream_config()
        try:
            response = await jetstream.call(f"STREAM.CREATE.{requested['name']}", requested)
        except ApiError as error:
            if error.err_code != BucketExistsError.err_code:
                raise
            raise BucketExistsError(
                f"could not create bucket {config.bucket!r}: it exists with other properties; open "
                f"it, or change them with update_bucket (code 400, err_code 10058)"
            ) from error
        return cls(jetstream, Bucket.of(StreamInfo.parse(response), codec))

    @classmethod
    async def update_bucket(
        cls, jetstream: JetStream, config: KeyValueConfig, **codecs: Unpack[Codecs]
    ) -> KeyValue:
        """Replace all properties of a bucket with ``config``; properties that it omits are reset.

        To change one property, start with ``replace((await kv.status()).config, …)``. Stream
        settings that are not properties of a bucket stay. Servers do not allow to forbid TTLs on
        single entries again (``limit_marker_ttl``); without it only the TTL of markers is removed.

        Args:
            jetstream: the connection's JetStream.
            config: the bucket's properties.
            codecs: the codec arguments of :meth:`open`; a bucket does not store them.

        Raises:
            BucketNotFoundError: the bucket does not exist.
            ServerTooOldError: the server does not support one of the properties.
            ApiError: the server rejects the change.
        """
        codec = kv_codec(**codecs)
        await _require_server_support(jetstream, config)
        present = (await bucket_stream_info(jetstream, config.bucket)).config
        for name in OMITTED_WHEN_UNSET:
            present.pop(name, None)
        requested = {**present, **config.stream_config()}
        response = await jetstream.call(f"STREAM.UPDATE.{requested['name']}", requested)
        return cls(jetstream, Bucket.of(StreamInfo.parse(response), codec))

    @classmethod
    async def delete_bucket(cls, jetstream: JetStream, bucket: str) -> None:
        """Delete a bucket with all its data (ADR-8, "Deleting a bucket", ``Destroy``).

        Raises:
            BucketNotFoundError: the bucket does not exist.
        """
        with bucket_errors(jetstream, bucket):
            await jetstream.call(f"STREAM.DELETE.{stream_of(bucket)}")

    def read_only(self) -> ReadOnlyKeyValue:
        """The same bucket without the methods that write."""
        return ReadOnlyKeyValue(self.jetstream, self.bucket)

    async def put(
        self, key: str, value: bytes, *, ttl: float | None = None, msg_id: str | None = None
    ) -> int:
        """Store a value for the key; return its revision (ADR-8, "Storing Values").

        Args:
            key: the key.
            value: the value.
            ttl: seconds after which this entry is removed, an integer of at least 1. The bucket
                must be created with ``limit_marker_ttl`` on server 2.11 or later. That is also the
                shortest TTL; the server extends a shorter one to it. In a bucket with history, an
                older revision that the key still has is then its value again, without a marker.
            msg_id: a write that is repeated with the same id within the stream's duplicate window
                is stored once, and returns the revision of the first one.

        Raises:
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        headers = self._ttl_headers(ttl)
        if msg_id is not None:
            headers[MSG_ID] = msg_id
        return await self._publish(key, value, headers)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        """Store a value for a key without one (new or deleted); return its revision.

        Raises:
            KeyExistsError: the key has a value.
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        raw_key = self.bucket.codec.raw_key(key)
        headers = self._ttl_headers(ttl)
        expected = 0
        # Not `retry`: each attempt expects the revision of the marker that the last one met.
        for _ in range(_CREATE_ATTEMPTS):
            try:
                return await self._publish(key, value, headers, expected)
            except WrongLastSequenceError as error:
                conflict = error
            last = await last_entry_after(self.jetstream, self.bucket, raw_key, conflict)
            if last is not None and not last.is_marker:
                raise KeyExistsError(
                    f"could not create key {key!r} in bucket {self.name!r}: it has a value at "
                    f"revision {last.revision}; use put or update (code 400, err_code 10071)",
                    last_seq=last.revision,
                ) from conflict
            expected = last.revision if last is not None else 0
        raise conflict

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        """Store a value if the key's last entry has this revision; return the new revision.

        With ``revision`` 0: if the key has no entry at all.

        Raises:
            WrongLastSequenceError: it has another revision; ``last_seq`` contains it if the server
                reports it.
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        validate_revision(f"update key {key!r}", "revision", revision)
        return await self._publish(key, value, self._ttl_headers(ttl), revision)

    async def delete(self, key: str, *, revision: int | None = None) -> int:
        """Delete the key and keep its history: write a DEL marker (ADR-8, "Deleting Values").

        Args:
            key: the key.
            revision: only if the key's last entry has this revision.

        Returns:
            The marker's revision.

        Raises:
            WrongLastSequenceError: the key's last entry has another revision.
        """
        return await self._publish(key, b"", {KV_OPERATION: "DEL"}, revision)

    async def purge(
        self, key: str, *, revision: int | None = None, ttl: float | None = None
    ) -> int:
        """Delete the key with its history: write a PURGE marker (ADR-8, "Purging a key").

        Args:
            key: the key.
            revision: only if the key's last entry has this revision.
            ttl: seconds after which the marker is removed, too.

        Returns:
            The marker's revision.

        Raises:
            WrongLastSequenceError: the key's last entry has another revision.
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        headers = {KV_OPERATION: "PURGE", ROLLUP: "sub", **self._ttl_headers(ttl)}
        return await self._publish(key, b"", headers, revision)

    async def purge_deletes(self, older_than: float = _DEFAULT_MARKER_AGE) -> int:
        """Remove the remaining entries of deleted keys; return the number of keys.

        The history before each marker is removed, and the marker too if it is older than
        ``older_than`` seconds by the server's clock. Younger markers stay for watches that have not
        received them; 0 removes all. A key that is written meanwhile keeps that value. A marker
        that was written to a wildcard (``$KV.fleet.>``) does not belong to a key, and stays.

        Raises:
            ConfigurationError: the bucket is a mirror.
        """
        bucket, jetstream = self.bucket, self.jetstream
        with bucket_errors(jetstream, self.name):
            response = await jetstream.call(f"STREAM.INFO.{bucket.stream}")
        info = StreamInfo.parse(response)
        if info.config.get("mirror"):
            raise ConfigurationError(
                f"could not purge deleted keys of bucket {bucket.name!r}: it mirrors "
                f"{bucket.write_bucket!r}; call purge_deletes there, and set limits on the mirror"
            )
        # Servers before 2.10 do not report their time.
        limit = nanoseconds(response["ts"]) - round(older_than * 1e9)
        if not (end := await last_matching_seq(jetstream, info, bucket, ALL_KEYS)):
            return 0
        reader = self._reader(
            info, end, (f"{bucket.prefix}>",), last_per_subject=True, headers_only=True
        )
        markers = [
            entry
            for entry in await self._entries(reader)
            if entry.is_marker and not entry.key.startswith(RESERVED) and is_literal(entry.key)
        ]

        async def remove(marker: Entry) -> None:
            old = older_than <= 0 or marker.created_ns <= limit
            # Removes messages before ``seq``; entries written after the marker stay.
            request = {
                "filter": bucket.prefix + marker.key,
                "seq": marker.revision + 1 if old else marker.revision,
            }
            await jetstream.call(f"STREAM.PURGE.{bucket.stream}", request)

        await gather_limited(remove, markers)
        return len(markers)

    # -- inside ---------------------------------------------------------------------------------

    async def _publish(
        self, key: str, value: bytes, headers: dict[str, str], revision: int | None = None
    ) -> int:
        if self.bucket.no_ack:
            raise no_ack_error(f"bucket {self.name!r}")
        connection = self.jetstream.connection
        prefix = self.bucket.write_prefix(connection.settings.api_prefix)
        raw_key = validate_written_key(self.bucket.codec.raw_key(key))
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise ConfigurationError(
                f"could not write key {key!r}: value is of type {type(value).__name__}, expected "
                f"bytes; encode it",
                settings=("value",),
            )
        # A marker's payload is empty with each codec.
        payload = self.bucket.codec.raw_value(bytes(value))
        validate_revision(f"write key {key!r}", "revision", revision, optional=True)
        if revision is not None:
            headers = {**headers, EXPECTED_LAST_SUBJECT_SEQUENCE: str(revision)}
        publisher = connection.service(Publisher)
        with encoded_name("key", key, encoded=raw_key != key):
            ack = await publisher.publish(prefix + raw_key, payload, headers=headers)
        return ack.seq

    def _ttl_headers(self, seconds: float | None) -> dict[str, str]:
        if seconds is None:
            return {}
        # By type: ``True`` would be one second.
        if (
            type(seconds) not in (int, float)
            or not 1 <= seconds <= LONGEST_DURATION
            or seconds != int(seconds)
        ):
            raise ConfigurationError(
                f"could not write: ttl is {seconds!r}, expected an integer of 1 second or more; "
                f"change 'ttl'",
                settings=("ttl",),
            )
        if not self.bucket.allows_message_ttl:
            raise TtlNotSupportedError(
                f"could not write to bucket {self.name!r}: it does not allow a TTL on an entry; "
                f"create or update it with limit_marker_ttl, on a server from 2.11 (code 400, "
                f"err_code 10166)",
                settings=("ttl",),
            )
        return {TTL: f"{int(seconds)}s"}


async def _require_server_support(jetstream: JetStream, config: KeyValueConfig) -> None:
    # An older server ignores unknown fields, so the bucket would lack the requested properties.
    if config.limit_marker_ttl is not None and await jetstream.api_level() < 1:
        raise ServerTooOldError(
            f"could not configure bucket {config.bucket!r}: limit_marker_ttl is set, which "
            f"requires a server from 2.11; upgrade the server or remove limit_marker_ttl",
        )
