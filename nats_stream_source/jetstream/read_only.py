"""Reading a key-value bucket (ADR-8, "RoKV"): get, history, keys, watch, status.

::

    get, get_revision    Direct Get (``direct_get.py``), or the leader where that is off
    history, keys        an ordered consumer over a range (``ordered.py``)
    watch                an ordered consumer without an end (``watch.py``)

Every write returns its revision, and every read takes it as ``min_last_revision``: what is read
then has at least that write (ADR-53). ``history``, ``keys`` and ``watch`` decide at the leader how
far they must read, so they see all writes that were acknowledged before they began also without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    KeyDeletedError,
    KeyNotFoundError,
    MessageNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.bucket import (
    EVERYTHING,
    Bucket,
    info_of,
    last_matching,
    look_up,
)
from nats_stream_source.jetstream.direct_get import DirectGet
from nats_stream_source.jetstream.entry import Entry, entries_of, entry_of
from nats_stream_source.jetstream.kv_config import BucketStatus, KeyValueConfig
from nats_stream_source.jetstream.link import SharedLink
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.jetstream.stored import listed_subjects
from nats_stream_source.jetstream.subjects import (
    RESERVED,
    check_filters,
    check_key,
    is_literal,
)
from nats_stream_source.jetstream.together import together
from nats_stream_source.jetstream.watch import Watch, WatchOptions

_OVERTAKEN = 3  # how often a history that is overwritten while it is read is read anew

R = TypeVar("R", bound="ReadOnlyKeyValue")


class ReadOnlyKeyValue:
    """A bucket to read from: what works on a read replica, too (ADR-8, "RoKV").

    Made with :meth:`open`. It needs no closing: what it holds, it holds only during a call.

    All methods raise, besides what they name: BucketNotFoundError or StreamNotFoundError;
    InvalidNameError for a key that ADR-8 does not allow; MinLastSequenceError (412, 10180) where
    what answers does not get as far as ``min_last_revision`` within ``request_timeout``;
    RequestTimeoutError, ConnectError, PermissionDeniedError, ApiError.
    """

    def __init__(self, jetstream: JetStream, bucket: Bucket) -> None:
        self.jetstream = jetstream
        self.bucket = bucket
        self._direct = DirectGet(jetstream, bucket.stream)
        self._link = SharedLink(jetstream.connection)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.bucket.name}>"

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self.bucket.name

    @classmethod
    async def open(cls: type[R], jetstream: JetStream, bucket: str) -> R:
        """A bucket that exists.

        Raises:
            BucketNotFoundError: it does not.
            UnsupportedStreamError: its stream is no bucket.
            InvalidNameError: it cannot.
        """
        info = await look_up(jetstream, bucket)
        KeyValueConfig.of(info.config)
        return cls(jetstream, Bucket.of(bucket, info.config))

    async def get(self, key: str, *, min_last_revision: int | None = None) -> Entry:
        """The key's latest value (ADR-8, "Get Operation").

        Without ``min_last_revision`` any replica may answer, and mirrors that allow it: the value
        may be a moment old.

        Raises:
            KeyDeletedError: its last entry is a marker.
            KeyNotFoundError: it has no entry.
        """
        return _value(await self._last(check_key(key), min_last_revision), self.name)

    async def get_revision(
        self, key: str, revision: int, *, min_last_revision: int | None = None
    ) -> Entry:
        """The value that the key had at a revision.

        Raises:
            KeyDeletedError: that revision is a marker.
            KeyNotFoundError: the bucket does not have it any more, or it is another key's.
        """
        subject = self.bucket.prefix + check_key(key)
        if revision < 1:
            raise ConfigurationError(f"there is no revision {revision}: they begin at 1")
        try:
            message = await self._direct.get(revision, min_last_seq=min_last_revision)
        except MessageNotFoundError:
            raise self._not_found(key, f"revision {revision}") from None
        if message.subject != subject:
            raise self._not_found(key, f"revision {revision}, which is another key's,")
        return _value(entry_of(message, self.bucket), self.name)

    async def history(self, key: str, *, min_last_revision: int | None = None) -> list[Entry]:
        """All entries that the bucket has of a key, markers too, oldest first (ADR-8, "History").

        ``delta`` counts from the end: 0 for the latest, 1 for the one before. Where writers are so
        fast that what is read is gone by then, again and again, revisions in between may be
        missing; the latest is there.

        Raises:
            KeyNotFoundError: there are none.
        """
        keys = (check_key(key),)
        info = await info_of(self.jetstream, self.name, min_last_revision)
        found: list[Entry] = []
        for _ in range(_OVERTAKEN):
            end = await last_matching(self.jetstream, info, self.bucket, keys)
            found = await self._read(info, end, self.bucket.filters(keys)) if end else []
            if not end or (found and found[-1].revision == end):
                break
        else:
            # Overwritten each time before it was read: what is left and the last one of now.
            found += await self._last_beyond(key, end)
        if not found:
            raise self._not_found(key, "entry")
        return [replace(entry, delta=len(found) - i) for i, entry in enumerate(found, 1)]

    async def keys(self, *filters: str, min_last_revision: int | None = None) -> list[str]:
        """The keys that have a value (ADR-8, "List of known keys"), in no order.

        Complete: a key that had a value when this was called and still has one when it returns is
        among them, however often it is overwritten meanwhile. Reserved keys are left out.

        Args:
            filters: only keys that match one of these; they must not overlap.
        """
        chosen = check_filters(filters) or EVERYTHING
        bucket, jetstream = self.bucket, self.jetstream
        info = await info_of(jetstream, self.name, min_last_revision)
        latest: dict[str, Entry] = {}
        if end := await last_matching(jetstream, info, bucket, chosen):
            whole = bucket.history == 1
            subjects = bucket.filters(chosen) or (() if whole else (f"{bucket.prefix}>",))
            entries = await self._read(
                info, end, subjects, last_per_subject=not whole, headers_only=True
            )
            latest = {entry.key: entry for entry in entries}
        now = await look_up(jetstream, self.name)
        if now.created != info.created:
            raise DataLossError(
                f"bucket {self.name!r} was deleted and made again while its keys were listed"
            )
        if now.last_seq != info.last_seq:
            # A key that was overwritten before its turn was not delivered up to ``end``.
            latest |= await self._unseen(chosen, latest)
        keep_reserved = any(one.startswith(RESERVED) for one in chosen)
        return [
            key
            for key, entry in latest.items()
            if not entry.is_marker and (keep_reserved or not key.startswith(RESERVED))
        ]

    async def status(self) -> BucketStatus:
        """What the bucket is, and how much is in it (ADR-8, "Status")."""
        return BucketStatus.of(await self.jetstream.call(f"STREAM.INFO.{self.bucket.stream}"))

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
        """The keys' entries, the end-of-initial-data signal, and their changes (ADR-8, "Watch").

        It begins when it is entered (``async with``) or first read. See :class:`Watch` for what it
        yields and :class:`WatchOptions` for the arguments.

        Args:
            keys: filters that do not overlap; none, an empty one, or ``>`` for all keys.

        Raises:
            InvalidNameError: one is no filter.
            ConfigurationError: two overlap, or two options contradict each other.
        """
        options = WatchOptions(
            keys=EVERYTHING if keys in ((), ("",)) else keys,
            include_history=include_history,
            ignore_deletes=ignore_deletes,
            meta_only=meta_only,
            updates_only=updates_only,
            resume_from_revision=resume_from_revision,
            min_last_revision=min_last_revision,
            heartbeat=heartbeat,
        )
        return Watch(self._link, self.bucket, options)

    def watch_all(self, **options: Any) -> Watch:
        """:meth:`watch` for all keys."""
        return self.watch(**options)

    # -- inside ---------------------------------------------------------------------------------

    async def _last(self, key: str, min_last_revision: int | None) -> Entry:
        """The key's last entry, a marker too; KeyNotFoundError when there is none."""
        subject = self.bucket.prefix + key
        try:
            message = await self._direct.last(subject, min_last_seq=min_last_revision)
        except MessageNotFoundError:
            raise self._not_found(key, "entry") from None
        return entry_of(message, self.bucket)

    async def _last_beyond(self, key: str, revision: int) -> list[Entry]:
        """The leader's last entry of the key, if it is newer than ``revision``."""
        stream, subject = self.bucket.stream, self.bucket.prefix + key
        message = await self.jetstream.message(stream, last_by_subj=subject)
        if message is None or message.seq <= revision:
            return []
        return [entry_of(message, self.bucket)]

    def _not_found(self, key: str, what: str) -> KeyNotFoundError:
        return KeyNotFoundError(f"bucket {self.name!r} has no {what} of the key {key!r}")

    async def _read(
        self, info: StreamInfo, end: int, filters: tuple[str, ...], **how: bool
    ) -> list[Entry]:
        """The entries up to a sequence that the leader has."""
        request = RangeRequest(info.name, info.created, 0, end, filters, **how)
        found: list[Entry] = []
        async for frames in OrderedReader(self._link, request).batches():
            found += entries_of(frames, self.bucket)
        return found

    async def _unseen(
        self, filters: tuple[str, ...], seen: Mapping[str, Entry]
    ) -> dict[str, Entry]:
        """The leader's last entry of each key that matches and was not seen."""
        bucket, jetstream = self.bucket, self.jetstream
        subjects = [bucket.prefix + one for one in filters]
        names = await listed_subjects(jetstream, bucket.stream, subjects)
        missing = [
            name for name in names if is_literal(name) and name[len(bucket.prefix) :] not in seen
        ]

        async def last(name: str) -> Entry | None:
            message = await jetstream.message(bucket.stream, last_by_subj=name)
            return entry_of(message, bucket) if message else None

        # None: gone again since the list was made.
        found = await together(last, missing)
        return {entry.key: entry for entry in found if entry is not None}


def _value(entry: Entry, bucket: str) -> Entry:
    if entry.is_marker:
        raise KeyDeletedError(
            f"bucket {bucket!r}: the key {entry.key!r} was deleted "
            f"({entry.operation} at revision {entry.revision})",
            entry.revision,
            entry.operation,
        )
    return entry
