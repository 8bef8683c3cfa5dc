"""Reads a key-value bucket (ADR-8, "RoKV"): get, history, keys, watch, status.

::

    get, get_revision    Direct Get (``direct_get/client.py``), or the leader if that is disabled
    history, keys        an ordered consumer over a range (``ordered/reader.py``)
    watch                an ordered consumer without an end (``watch.py``)

Every write returns its revision, and every read accepts one as ``min_last_revision``: the read then
observes at least that write (ADR-53). ``history``, ``keys`` and ``watch`` request the end of their
range from the leader. So they observe all writes that were acknowledged before the call even
without ``min_last_revision``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from nats_stream_source.connection.control_line import encoded_name
from nats_stream_source.errors import KeyDeletedError, KeyNotFoundError, MessageNotFoundError
from nats_stream_source.jetstream.api import JetStream, missing_messages
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.kv.bucket import (
    ALL_KEYS,
    Bucket,
    bucket_errors,
    bucket_stream_info,
    stream_info_with_revision,
)
from nats_stream_source.jetstream.kv.codec import SkippedEntries, kv_codec
from nats_stream_source.jetstream.kv.config import BucketStatus, KeyValueConfig
from nats_stream_source.jetstream.kv.entry import (
    Entry,
    decoded_entry,
    entries_from_frames,
    entry_from_message,
    validate_revision,
)
from nats_stream_source.jetstream.kv.requests import last_matching_seq, with_origin
from nats_stream_source.jetstream.kv.watch import Watch, WatchOptions
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import RESERVED

R = TypeVar("R", bound="ReadOnlyKeyValue")


class ReadOnlyKeyValue:
    """A bucket to read from, also a read replica (ADR-8, "RoKV").

    Created with :meth:`open`. It needs no ``close``: it holds resources only during a call.

    In addition to the errors that they list, all methods raise BucketNotFoundError, or its base
    class StreamNotFoundError if the bucket is deleted during the call; InvalidNameError for a key
    that ADR-8 does not allow; ConfigurationError for a revision that is not an integer from 0 to
    2**64 - 1; MinLastSequenceError (412, 10180) if the responding server does not reach
    ``min_last_revision`` within ``request_timeout``; RequestTimeoutError, ConnectError,
    PermissionDeniedError, ApiError.
    """

    def __init__(self, jetstream: JetStream, bucket: Bucket) -> None:
        self.jetstream = jetstream
        self.bucket = bucket
        self._direct_get = DirectGet(jetstream, bucket.stream)
        self._connection = SharedConnection(jetstream.connection)

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self.bucket.name

    @classmethod
    async def open(
        cls: type[R],
        jetstream: JetStream,
        bucket: str,
        *,
        key_codec: str | None = None,
        value_codec: str | None = None,
        on_undecodable: str = "fail",
    ) -> R:
        """Open an existing bucket.

        With codecs (ADR-54) all methods take and return keys and values as they are before they are
        encoded; filters are encoded token by token.

        Args:
            jetstream: the connection's JetStream.
            bucket: the bucket's name.
            key_codec: ``base64``, ``path``, or several in the order in which they encode:
                ``path,base64``. None: keys are stored as they are.
            value_codec: ``base64``, or None.
            on_undecodable: ``fail``, or ``skip`` to leave out entries that the codecs cannot decode
                (``get`` fails in each case).

        Raises:
            BucketNotFoundError: the bucket does not exist.
            UnsupportedStreamError: its stream is not a bucket.
            InvalidNameError: the name is not valid for a bucket.
            ConfigurationError: a codec is unknown.
        """
        codec = kv_codec(key_codec, value_codec, on_undecodable)
        info = await with_origin(jetstream, await bucket_stream_info(jetstream, bucket))
        KeyValueConfig.of(info.config)
        return cls(jetstream, Bucket.of(info, codec))

    async def get(self, key: str, *, min_last_revision: int | None = None) -> Entry:
        """The key's latest value (ADR-8, "Get Operation").

        Without ``min_last_revision`` any replica may respond, and any mirror that allows Direct
        Get, so the value may be slightly older than the leader's.

        Raises:
            KeyDeletedError: the key's last entry is a marker.
            KeyNotFoundError: the key has no entry.
        """
        raw_key = self.bucket.codec.raw_key(key)
        self._validate_min_last_revision(min_last_revision)
        subject = self.bucket.prefix + raw_key
        try:
            with (
                bucket_errors(self.jetstream, self.name),
                encoded_name("key", key, encoded=raw_key != key),
            ):
                message = await self._direct_get.last(subject, min_last_seq=min_last_revision)
        except MessageNotFoundError:
            raise self._not_found(key, "entry") from None
        return self._require_value(entry_from_message(message, self.bucket))

    async def get_revision(
        self, key: str, revision: int, *, min_last_revision: int | None = None
    ) -> Entry:
        """The value of the key at a revision.

        Raises:
            KeyDeletedError: that revision is a marker.
            KeyNotFoundError: the bucket no longer has the revision, or it belongs to another key.
            ConfigurationError: ``revision`` is not an integer of at least 1.
        """
        subject = self.bucket.prefix + self.bucket.codec.raw_key(key)
        validate_revision(f"read key {key!r}", "revision", revision, first=1)
        self._validate_min_last_revision(min_last_revision)
        try:
            with bucket_errors(self.jetstream, self.name):
                message = await self._direct_get.get(revision, min_last_seq=min_last_revision)
        except MessageNotFoundError:
            raise self._not_found(key, f"revision {revision}") from None
        if message.subject != subject:
            raise self._not_found(key, f"revision {revision}, which belongs to another key,")
        return self._require_value(entry_from_message(message, self.bucket))

    async def history(self, key: str, *, min_last_revision: int | None = None) -> list[Entry]:
        """All entries of a key in the bucket, markers included, oldest first (ADR-8, "History").

        ``delta`` counts from the end: 0 for the latest, 1 for the one before it. If writers
        repeatedly replace revisions before they are read, revisions in between may be missing; the
        latest is always included.

        Raises:
            KeyNotFoundError: the key has no entry.
        """
        raw_key = self.bucket.codec.raw_key(key)
        keys = (raw_key,)
        self._validate_min_last_revision(min_last_revision)
        info = await stream_info_with_revision(self.jetstream, self.name, min_last_revision)
        with encoded_name("key", key, encoded=raw_key != key):
            end = await last_matching_seq(self.jetstream, info, self.bucket, keys)
        subjects = self.bucket.filter_subjects(keys)
        entries = await self._entries(self._reader(info, end, subjects)) if end else []
        if end and (not entries or entries[-1].revision != end):
            # Superseded before the read: the remaining entries and the current last one.
            last = await self.jetstream.message(
                self.bucket.stream, last_by_subj=self.bucket.prefix + raw_key
            )
            if last is not None and last.seq > end:
                entries.append(entry_from_message(last, self.bucket))
        if not entries:
            raise self._not_found(key, "entry")
        return self._decoded(
            replace(entry, delta=len(entries) - i) for i, entry in enumerate(entries, 1)
        )

    async def keys(self, *filters: str, min_last_revision: int | None = None) -> list[str]:
        """The keys that have a value (ADR-8, "List of known keys"), in no particular order.

        The list is complete: it contains every key that had a value at the call and still has one
        at the return, even if the key is overwritten meanwhile. Reserved keys are omitted.

        Args:
            filters: only keys that match one of these filters; they must not overlap.
            min_last_revision: see the module.

        Raises:
            DataLossError: the bucket was re-created or rolled back meanwhile.
        """
        key_filters = self.bucket.codec.raw_filters(filters) or ALL_KEYS
        self._validate_min_last_revision(min_last_revision)
        bucket, jetstream = self.bucket, self.jetstream
        info = await stream_info_with_revision(jetstream, self.name, min_last_revision)
        latest: dict[str, Entry] = {}
        end = await last_matching_seq(jetstream, info, bucket, key_filters)
        if end:
            one_revision_per_key = bucket.history == 1
            subjects = bucket.filter_subjects(key_filters) or (
                () if one_revision_per_key else (f"{bucket.prefix}>",)
            )
            reader = self._reader(
                info, end, subjects, last_per_subject=not one_revision_per_key, headers_only=True
            )
            latest = {entry.key: entry for entry in await self._entries(reader)}
            if reader.info.last_seq != info.last_seq:
                # A key that was superseded before its delivery was not delivered up to ``end``.
                missing = await missing_messages(
                    jetstream,
                    bucket.stream,
                    [bucket.prefix + key_filter for key_filter in key_filters],
                    {bucket.prefix + key for key in latest},
                    headers_only=True,
                )
                latest |= {entry.key: entry for entry in entries_from_frames(missing, bucket)}
        include_reserved = any(key_filter.startswith(RESERVED) for key_filter in key_filters)
        entries = [
            entry
            for key, entry in latest.items()
            if not entry.is_marker and (include_reserved or not key.startswith(RESERVED))
        ]
        return [entry.key for entry in self._decoded(entries)]

    async def status(self) -> BucketStatus:
        """Properties and size of the bucket (ADR-8, "Status")."""
        with bucket_errors(self.jetstream, self.name):
            response = await self.jetstream.call(f"STREAM.INFO.{self.bucket.stream}")
        return BucketStatus.of(response)

    def watch(
        self,
        *keys: str,
        include_history: bool = False,
        ignore_deletes: bool = False,
        meta_only: bool = False,
        updates_only: bool = False,
        resume_from_revision: int | None = None,
        min_last_revision: int | None = None,
        heartbeat: float = 0.5,
    ) -> Watch:
        """Watch entries, the end-of-initial-data signal, and changes of keys (ADR-8, "Watch").

        The watch starts when it is entered (``async with``) or first read. See :class:`Watch` for
        what it yields and :class:`WatchOptions` for the arguments.

        Args:
            keys: filters that do not overlap; none, an empty one, or ``>`` for all keys.

        Raises:
            InvalidNameError: a filter is invalid.
            ConfigurationError: two filters overlap, or two options contradict each other.
        """
        options = WatchOptions(
            keys=ALL_KEYS if keys in ((), ("",)) else self.bucket.codec.raw_filters(keys),
            include_history=include_history,
            ignore_deletes=ignore_deletes,
            meta_only=meta_only,
            updates_only=updates_only,
            resume_from_revision=resume_from_revision,
            min_last_revision=min_last_revision,
            heartbeat=heartbeat,
        )
        return Watch(self._connection, self.bucket, options)

    def watch_all(self, **options: Any) -> Watch:
        """:meth:`watch` for all keys."""
        return self.watch(**options)

    # -- inside ---------------------------------------------------------------------------------

    def _validate_min_last_revision(self, revision: object) -> None:
        action = f"read bucket {self.name!r}"
        validate_revision(action, "min_last_revision", revision, optional=True)

    def _not_found(self, key: str, missing: str) -> KeyNotFoundError:
        return KeyNotFoundError(
            f"could not read key {key!r} of bucket {self.name!r}: {missing} not found"
        )

    def _decoded(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries with decoded keys and values, without those that are skipped."""
        skipped = SkippedEntries()
        decoded = [decoded_entry(entry, self.bucket, skipped) for entry in entries]
        skipped.report()
        return [entry for entry in decoded if entry is not None]

    def _require_value(self, stored: Entry) -> Entry:
        entry = decoded_entry(stored, self.bucket, None)
        assert entry is not None
        if entry.is_marker:
            raise KeyDeletedError(
                f"could not read key {entry.key!r} of bucket {self.name!r}: it was deleted "
                f"({entry.operation} at revision {entry.revision})",
                entry.revision,
                entry.operation,
            )
        return entry

    def _reader(
        self, info: StreamInfo, end: int, filters: tuple[str, ...], **options: Any
    ) -> OrderedReader:
        """A reader up to a sequence that the leader has."""
        prefix = self.bucket.prefix
        request = RangeRequest(info.name, KnownStream.of(info), 0, end, filters, prefix, **options)
        return OrderedReader(self._connection, request)

    async def _entries(self, reader: OrderedReader) -> list[Entry]:
        """The entries of a range, as they are stored."""
        entries: list[Entry] = []
        with bucket_errors(self.jetstream, self.name):
            async for frames in reader.batches():
                entries += entries_from_frames(frames, self.bucket)
        return entries
