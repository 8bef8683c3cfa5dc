"""Writing to key-value buckets (ADR-8), and making them; ADR-53's revisions, ADR-19's prefixes.

A bucket is a stream (``kv_config.py``), an entry a message (``entry.py``). A write is a message to
the key's subject; a marker is an empty message with a header; a write at a revision has the header
for the expected last sequence. Reading is in ``read_only.py``.
"""

from __future__ import annotations

from nats_stream_source.errors import (
    ApiError,
    BucketExistsError,
    BucketNotFoundError,
    ConfigurationError,
    KeyExistsError,
    ServerTooOldError,
    StreamNotFoundError,
    TtlNotSupportedError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream.answer import stream_config
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.bucket import EVERYTHING, Bucket, last_matching, look_up
from nats_stream_source.jetstream.entry import Entry, entry_of
from nats_stream_source.jetstream.kv_config import ABSENT_WHEN_OFF, KeyValueConfig
from nats_stream_source.jetstream.pub_ack import (
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    MSG_ID,
    ROLLUP,
    TTL,
)
from nats_stream_source.jetstream.publish import Publisher
from nats_stream_source.jetstream.read_after_write import leader_message
from nats_stream_source.jetstream.read_only import ReadOnlyKeyValue
from nats_stream_source.jetstream.subjects import (
    RESERVED,
    check_bucket,
    check_written_key,
    is_literal,
    stream_of,
)
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.jetstream.together import together
from nats_stream_source.wire.headers import KV_OPERATION

__all__ = ["KeyValue", "ReadOnlyKeyValue"]

_CREATE_ATTEMPTS = 5  # writers that delete and create the same key at the same time are few
_LONGEST_TTL = 9e9  # seconds: what nanoseconds in 64 bits can say; and infinity is no number
_OLD = 30 * 60.0  # seconds; the age from which NATS's own clients remove markers


class KeyValue(ReadOnlyKeyValue):
    """A bucket to read from and to write to (ADR-8, "KV").

    Writes return their revision once the stream has stored them. Besides what they name, they raise
    what :meth:`Publisher.send` and its future do: MessageTooLargeError, StreamFullError,
    NoStreamError, PermissionDeniedError; and AckLostError or AckTimeoutError where the write may
    have happened or not.
    """

    @classmethod
    async def create_bucket(cls, jetstream: JetStream, config: KeyValueConfig) -> KeyValue:
        """Make a bucket; one that exists with these very properties is opened.

        Raises:
            BucketExistsError: it exists with other properties.
            ServerTooOldError: the server does not know one of them.
            ApiError: the server refuses them.
        """
        await _check_server(jetstream, config)
        wanted = config.stream_config()
        try:
            answer = await jetstream.call(f"STREAM.CREATE.{wanted['name']}", wanted)
        except ApiError as error:
            if error.err_code != BucketExistsError.err_code:
                raise
            raise BucketExistsError(
                f"bucket {config.bucket!r} exists with other properties: open it, or change them "
                f"with update_bucket (code 400, err_code 10058)"
            ) from error
        return cls(jetstream, Bucket.of(config.bucket, stream_config(answer, "config")))

    @classmethod
    async def update_bucket(cls, jetstream: JetStream, config: KeyValueConfig) -> KeyValue:
        """Give a bucket other properties, all of ``config``: what that leaves out ends.

        To change one, begin with ``replace((await kv.status()).config, …)``. What the stream has
        besides a bucket's properties stays. TTLs on single entries (``limit_marker_ttl``) cannot be
        forbidden again, servers refuse that; without it only the markers' own TTL ends.

        Raises:
            BucketNotFoundError: there is none.
            ServerTooOldError: the server does not know one of the properties.
            ApiError: the server refuses the change.
        """
        await _check_server(jetstream, config)
        present = (await look_up(jetstream, config.bucket)).config
        for name in ABSENT_WHEN_OFF:
            present.pop(name, None)
        wanted = {**present, **config.stream_config()}
        answer = await jetstream.call(f"STREAM.UPDATE.{wanted['name']}", wanted)
        return cls(jetstream, Bucket.of(config.bucket, stream_config(answer, "config")))

    @classmethod
    async def delete_bucket(cls, jetstream: JetStream, bucket: str) -> None:
        """Delete a bucket with all its data (ADR-8, "Deleting a bucket", ``Destroy``)."""
        stream = stream_of(check_bucket(bucket))
        try:
            await jetstream.call(f"STREAM.DELETE.{stream}")
        except StreamNotFoundError as error:
            raise BucketNotFoundError(f"bucket {bucket!r} does not exist") from error

    def read_only(self) -> ReadOnlyKeyValue:
        """The same bucket without the methods that write."""
        return ReadOnlyKeyValue(self.jetstream, self.bucket)

    async def put(
        self, key: str, value: bytes, *, ttl: float | None = None, msg_id: str | None = None
    ) -> int:
        """Give the key a value; its revision (ADR-8, "Storing Values").

        Args:
            ttl: seconds after which this entry goes away, at least 1, whole ones. With it ends the
                key: a bucket with history may then show the value before. The bucket must have
                been made with ``limit_marker_ttl``, on a server from 2.11; that is also the
                shortest TTL, to which the server lengthens a shorter one.
            msg_id: a write that is repeated with the same one within the stream's duplicate window
                is stored once, and returns the first one's revision.

        Raises:
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        headers = self._ttl(ttl)
        if msg_id is not None:
            headers[MSG_ID] = msg_id
        return await self._write(key, value, headers)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        """Give a value to a key that has none, never had one or was deleted; its revision.

        Raises:
            KeyExistsError: it has one.
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        headers = self._ttl(ttl)
        expected = 0
        for _ in range(_CREATE_ATTEMPTS):
            try:
                return await self._write(key, value, headers, expected)
            except WrongLastSequenceError as error:
                refusal = error
            # What is there? The refusal came from the leader and may name its last sequence: the
            # look must not be older (ADR-53). Asking the leader itself is what works without it.
            message = await leader_message(
                self.jetstream,
                self._written_stream(),
                min_last_seq=refusal.last_seq,
                last_by_subj=self.bucket.prefix + key,
            )
            last = entry_of(message, self.bucket) if message is not None else None
            if last is not None and not last.is_marker:
                raise KeyExistsError(
                    f"bucket {self.name!r} has the key {key!r} already, at revision "
                    f"{last.revision} (code 400, err_code 10071)",
                    last_seq=last.revision,
                ) from refusal
            expected = last.revision if last is not None else 0
        raise refusal

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        """Give the key a value if its last entry has this revision; the new revision.

        With ``revision`` 0: if the key has no entry at all.

        Raises:
            WrongLastSequenceError: it has another; ``last_seq`` says which, where the server does.
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        return await self._write(key, value, self._ttl(ttl), revision)

    async def delete(self, key: str, *, revision: int | None = None) -> int:
        """Delete the key, and keep its history: a DEL marker (ADR-8, "Deleting Values").

        Args:
            revision: only if the key's last entry has this one.

        Returns:
            The marker's revision.

        Raises:
            WrongLastSequenceError: the key's last entry has another revision.
        """
        return await self._write(key, b"", {KV_OPERATION: "DEL"}, revision)

    async def purge(
        self, key: str, *, revision: int | None = None, ttl: float | None = None
    ) -> int:
        """Delete the key with its history: a PURGE marker is what stays (ADR-8, "Purging a key").

        Args:
            revision: only if the key's last entry has this one.
            ttl: seconds after which the marker goes away, too.

        Returns:
            The marker's revision.

        Raises:
            WrongLastSequenceError: the key's last entry has another revision.
            TtlNotSupportedError: the bucket does not allow a TTL.
        """
        headers = {KV_OPERATION: "PURGE", ROLLUP: "sub", **self._ttl(ttl)}
        return await self._write(key, b"", headers, revision)

    async def purge_deletes(self, older_than: float = _OLD) -> int:
        """Remove what deleted keys have left behind; how many keys.

        The history before each marker goes away, and the marker too if it is older than
        ``older_than`` seconds by the server's clock (younger ones stay, for watches that have not
        seen them; 0: none stays). A key that is written meanwhile keeps that value. A marker that
        somebody wrote to a wildcard (``$KV.fleet.>``) is nobody's, and stays.

        Raises:
            ConfigurationError: the bucket is a mirror.
        """
        bucket, jetstream = self.bucket, self.jetstream
        if bucket.writes_to != bucket.name:
            raise ConfigurationError(
                f"bucket {bucket.name!r} mirrors {bucket.writes_to!r}: remove what deleted keys "
                f"left behind there, and in the mirror by its own limits"
            )
        answer = await jetstream.call(f"STREAM.INFO.{bucket.stream}")
        info = StreamInfo.parse(answer)
        # Servers before 2.10 do not say what time it is.
        limit = nanoseconds(answer["ts"]) - round(older_than * 1e9)
        if not (end := await last_matching(jetstream, info, bucket, EVERYTHING)):
            return 0
        entries = await self._read(
            info, end, (f"{bucket.prefix}>",), last_per_subject=True, headers_only=True
        )
        markers = [
            entry
            for entry in entries
            if entry.is_marker and not entry.key.startswith(RESERVED) and is_literal(entry.key)
        ]

        async def remove(marker: Entry) -> None:
            old = older_than <= 0 or marker.created_ns <= limit
            # "Up to and without this sequence": what was written after the marker stays.
            request = {
                "filter": bucket.prefix + marker.key,
                "seq": marker.revision + 1 if old else marker.revision,
            }
            await jetstream.call(f"STREAM.PURGE.{bucket.stream}", request)

        await together(remove, markers)
        return len(markers)

    # -- inside ---------------------------------------------------------------------------------

    async def _write(
        self, key: str, value: bytes, headers: dict[str, str], revision: int | None = None
    ) -> int:
        connection = self.jetstream.connection
        prefix = self.bucket.write_prefix(connection.settings.api_prefix)
        if revision is not None:
            headers = {**headers, EXPECTED_LAST_SUBJECT_SEQUENCE: str(revision)}
        publisher = connection.companion(Publisher)
        ack = await publisher.publish(prefix + check_written_key(key), value, headers=headers)
        return ack.seq

    def _written_stream(self) -> str:
        """The stream that takes the writes, or the mirror of it that can be asked from here."""
        bucket = self.bucket
        return bucket.stream if bucket.writes_through else stream_of(bucket.writes_to)

    def _ttl(self, seconds: float | None) -> dict[str, str]:
        if seconds is None:
            return {}
        if not 1 <= seconds <= _LONGEST_TTL or seconds != int(seconds):
            raise ConfigurationError(f"a TTL of {seconds!r} s: it is 1 second or more, whole ones")
        if not self.bucket.message_ttl:
            raise TtlNotSupportedError(
                f"bucket {self.name!r} does not allow a TTL on an entry: make it (or update it) "
                f"with limit_marker_ttl, on a server from 2.11 (code 400, err_code 10166)"
            )
        return {TTL: f"{int(seconds)}s"}


async def _check_server(jetstream: JetStream, config: KeyValueConfig) -> None:
    # An older server ignores what it does not know, and the bucket would not be what was asked for.
    if config.limit_marker_ttl is not None and await jetstream.api_level() < 1:
        raise ServerTooOldError(
            f"bucket {config.bucket!r}: limit_marker_ttl needs a server from 2.11"
        )
