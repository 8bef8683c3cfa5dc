"""Writes of many entries to a bucket as columns, with compare-and-set (ADR-8).

Messages go through ``publish/batch_publisher``. A message with the header for an expected revision
is *conditional*. When the stream rejects a conditional message, the writer reads the key's last
message, and then

- the message has the rejected message's ``Nats-Msg-Id``: it is the same write, sent twice or
  repeated by another attempt, so it counts as stored. Servers check the expected revision before
  they look for a duplicate (docs/internals/measurements.md), so the id alone does not suffice;
- the expected revision is 0, and the last message is a marker or was removed: the key does not
  exist, so the write is sent again for that revision, as ``KeyValue.create`` does;
- the last message has the expected revision: a replicated stream rejected the message because
  another one on the key was not stored on a majority yet, so the write is sent again;
- the message had a PubAck before it was sent again: it was stored, and then overwritten;
- otherwise it is a conflict: an error, or counted with ``skip_conflicts``.
"""

from __future__ import annotations

import asyncio

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import WrongLastSequenceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_errors
from nats_stream_source.jetstream.kv.entry import last_entry_after
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.batch_publisher import (
    BatchPublisher,
    MessageColumns,
    Rejection,
)
from nats_stream_source.jetstream.publish.pub_ack import EXPECTED_LAST_SUBJECT_SEQUENCE, MSG_ID
from nats_stream_source.jetstream.retry import Backoff
from nats_stream_source.wire.headers import parse_headers
from nats_stream_source.wire.publish.headers import replace_value

_CREATE_ATTEMPTS = 5  # for writers that delete and create the same key at the same time
_PENDING_ATTEMPTS = 10  # for a message on the key that is not stored on a majority yet
_BACKOFF = Backoff(0.02, 1.0)


class KvBatchWriter(BatchPublisher):
    """Writes columns of entries to one bucket; an async context manager.

    Args:
        bucket: the bucket; not a mirror.
        skip_conflicts: count conditional writes that are in conflict instead of raising.
        max_in_flight, retry_timeout: see :class:`BatchPublisher`.

    Attributes:
        skipped: number of conditional writes that were not stored because of a conflict.
    """

    def __init__(
        self,
        jetstream: JetStream,
        bucket: Bucket,
        *,
        skip_conflicts: bool = False,
        max_in_flight: int = MAX_IN_FLIGHT,
        retry_timeout: float | None = None,
    ) -> None:
        super().__init__(
            jetstream,
            bucket.stream,
            max_in_flight=max_in_flight,
            retry_timeout=retry_timeout,
            no_ack=bucket.no_ack,
            on_rejected=self._add_conflict,
        )
        self._bucket = bucket
        self._skip_conflicts = skip_conflicts
        self._conflicts: list[Rejection] = []
        self._creations: dict[str, int] = {}  # attempts, by message id
        self._pending: dict[str, int] = {}  # the same
        self.skipped = 0

    async def send(self, messages: MessageColumns) -> None:
        """Send entries, in order; returns when all were sent, before their PubAcks arrive.

        Raises:
            WrongLastSequenceError: a conflict, unless they are skipped.
            BucketNotFoundError: the bucket does not exist any more.
            as :meth:`BatchPublisher.send`.
        """
        with bucket_errors(self._jetstream, self._bucket.name):
            await super().send(messages)
            await self._resolve_conflicts()

    async def flush(self) -> None:
        """Wait until each entry is stored, or skipped; raises as :meth:`send`."""
        with bucket_errors(self._jetstream, self._bucket.name):
            await super().flush()
            while self._conflicts:
                await self._resolve_conflicts()
                await super().flush()

    def _add_conflict(self, rejection: Rejection) -> None:
        if not isinstance(rejection.error, WrongLastSequenceError):
            raise rejection.error
        self._conflicts.append(rejection)

    async def _resolve_conflicts(self) -> None:
        conflicts, self._conflicts = self._conflicts, []
        # In the order of the rows, so that the first conflict is the one that is reported.
        again = [m for m in await gather_limited(self._resolve, conflicts) if m is not None]
        for message in again:
            await super().send(message)

    async def _resolve(self, rejection: Rejection) -> MessageColumns | None:
        """Returns the message to send again; None if the conflict is resolved."""
        error, message = rejection.error, rejection.message
        assert isinstance(error, WrongLastSequenceError)
        assert message.headers is not None
        block = message.headers[0].as_py()
        headers = parse_headers(block)
        message_id = headers.get(MSG_ID)
        expected = int(headers.get(EXPECTED_LAST_SUBJECT_SEQUENCE) or 0)
        raw_key = rejection.subject.rpartition(f"$KV.{self._bucket.write_bucket}.")[2]
        entry = await last_entry_after(self._jetstream, self._bucket, raw_key, error)
        last_headers = None if entry is None else entry.headers
        if message_id and last_headers and last_headers.get(MSG_ID) == message_id:
            self.stored += 1  # by an earlier attempt
            self.duplicates += 1
            return None
        revision = 0 if entry is None else entry.revision
        if message_id and revision == expected:
            attempts = self._pending[message_id] = self._pending.get(message_id, 0) + 1
            if attempts <= _PENDING_ATTEMPTS:
                await asyncio.sleep(_BACKOFF.pause(attempts - 1))
                return message
        creates = message_id is not None and (expected == 0 or message_id in self._creations)
        if creates and (entry is None or entry.is_marker):
            attempts = self._creations.get(message_id or "", 0) + 1
            if attempts <= _CREATE_ATTEMPTS:
                self._creations[message_id or ""] = attempts
                if rejection.acknowledged and message_id:
                    # It was stored before the marker: with the same id, it would be a duplicate.
                    message_id = f"{message_id}.{attempts}"
                    self._creations[message_id] = attempts
                    block = replace_value(block, MSG_ID, message_id)
                return message.with_headers(
                    replace_value(block, EXPECTED_LAST_SUBJECT_SEQUENCE, str(revision))
                )
        if rejection.acknowledged:
            self.stored += 1  # and then overwritten
            return None
        if self._skip_conflicts:
            self.skipped += 1
            return None
        found = "missing" if entry is None else f"revision {entry.revision} ({entry.operation})"
        key = self._bucket.codec.decoded_key(raw_key)
        raise WrongLastSequenceError(
            f"could not write key {key!r} of bucket {self._bucket.name!r}: the key's last entry is "
            f"{found}, expected revision {0 if creates else expected} (code 400, err_code "
            f"{error.err_code})",
            error.code,
            error.err_code,
            None if entry is None else entry.revision,
        ) from error
