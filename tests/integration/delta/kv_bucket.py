"""A bucket on a server, for the tests that compare a table with its bucket."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from nats_stream_source.delta import ReconcileResult
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.delta.merge_model import Entry
from tests.support.nats import buckets


class Bucket:
    """A bucket whose writes return the entries that the source would deliver for them."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name

    def create(self, **config: Any) -> Bucket:
        info = buckets.create_bucket(self.url, self.name, history=3, **config)
        micros = nanoseconds(info["created"]) // 1000
        self.stream_created = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(
            microseconds=micros
        )
        return self

    def delete(self) -> None:
        buckets.delete_bucket(self.url, self.name)

    def write(
        self,
        *entries: tuple[str, str],
        value: bytes = b"x",
        headers: dict[str, str] | None = None,
    ) -> list[Entry]:
        """Write (key, operation) pairs; puts have the value and the headers."""
        messages_of = {
            "PUT": (value, headers),
            "DEL": (b"", buckets.DEL),
            "PURGE": (b"", buckets.PURGE),
        }
        messages = [
            (f"$KV.{self.name}.{key}", *messages_of[operation]) for key, operation in entries
        ]
        return [
            Entry(
                key,
                seq,
                operation,
                value if operation == "PUT" else None,
                self.stream_created,
                self.name,
            )
            for (key, operation), seq in zip(
                entries, buckets.publish(self.url, messages), strict=True
            )
        ]

    def purge_subjects(self, *keys: str) -> None:
        """Purge the subjects of keys through the API, which leaves no marker."""
        for key in keys:
            request = {"filter": f"$KV.{self.name}.{key}"}
            buckets.api(self.url, f"STREAM.PURGE.KV_{self.name}", request)

    def last(self, key: str) -> dict[str, Any] | None:
        """Return the last message of a key, as the server has it; None without one."""
        request = {"last_by_subj": f"$KV.{self.name}.{key}"}
        try:
            response = buckets.api(self.url, f"STREAM.MSG.GET.KV_{self.name}", request)
        except RuntimeError as error:
            if "no message found" in str(error):
                return None
            raise
        message: dict[str, Any] = response["message"]
        return message

    def created(self, revision: int) -> datetime:
        """Return when the server stored a revision."""
        stored = buckets.api(self.url, f"STREAM.MSG.GET.KV_{self.name}", {"seq": revision})
        micros = nanoseconds(stored["message"]["time"]) // 1000
        return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)

    def state(self) -> dict[str, Any]:
        return buckets.bucket_state(self.url, self.name)


Reconciled = Callable[..., ReconcileResult]

AfterComparison = Callable[[Callable[[], object]], None]
