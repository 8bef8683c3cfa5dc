"""A stream as its leader reports it (``STREAM.INFO``), and what the report proves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import RequestTimeoutError
from nats_stream_source.jetstream.json_fields import (
    array,
    integer,
    object_,
    stream_config,
    string,
    timestamp,
)
from nats_stream_source.jetstream.times import nanoseconds

_MAX_SILENCE = 3_000_000_000  # nanoseconds; followers elect another leader after 4 s
_REPLICA_DOWN = 30_000_000_000  # nanoseconds without contact after which a replica is down


@dataclass(frozen=True, slots=True)
class Replica:
    """A follower, as the leader reports it.

    Attributes:
        lag: number of operations that the follower is behind.
        active: nanoseconds since the leader last heard from the follower; 0 if it never did. A
            follower that was down at the election keeps 0 while it is down.
    """

    name: str
    lag: int
    active: int

    @property
    def recently_active(self) -> bool:
        """Whether the leader has recently heard from the follower."""
        return 0 < self.active < _MAX_SILENCE


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The response to ``STREAM.INFO``.

    Attributes:
        last_time: timestamp of the message at ``last_seq``; None if the stream never had a message,
            or the server no longer has the timestamp.
        first_time: timestamp of the message at ``first_seq``; None if the stream is empty.
        subjects: number of subjects with messages.
        messages: number of messages; ``nbytes`` is their size in the store.
        config: the server's configuration object.
        now: the server's time.
        leader: name of the stream leader; None outside of a cluster.
        leader_since: the time of its election; None before nats-server 2.12.
        replicas: the followers.
        origin: the bucket whose subjects a mirror of a mirror has (``with_origin``); None
            where the configuration shows the subjects.
    """

    name: str
    created: str
    first_seq: int
    last_seq: int
    last_time: str | None
    subjects: int
    messages: int
    nbytes: int
    config: dict[str, Any]
    now: str | None = None
    leader: str | None = None
    leader_since: str | None = None
    replicas: tuple[Replica, ...] = ()
    consumers: int = 0
    first_time: str | None = None
    origin: str | None = None

    @property
    def position(self) -> tuple[object, ...]:
        """What changes with each message that is stored or removed at an end of the stream."""
        return self.created, self.first_seq, self.last_seq, self.last_time

    @property
    def consumers_left(self) -> int | None:
        """Number of consumers that the stream still allows; None without a limit of the stream."""
        limit: int = self.config.get("max_consumers", -1)
        return max(0, limit - self.consumers) if limit > 0 else None

    @property
    def replicated(self) -> bool:
        """Whether the stream has more than one replica."""
        return bool(self.config.get("num_replicas", 1) > 1)

    @property
    def is_mirror(self) -> bool:
        """Whether the stream copies another one, with its sequences and timestamps."""
        return bool(self.config.get("mirror"))

    @property
    def no_ack(self) -> bool:
        """Whether the stream stores messages without PubAcks."""
        return bool(self.config.get("no_ack"))

    @property
    def num_deleted(self) -> int:
        """The number of sequences from the first to the last one without a message."""
        return self.last_seq - self.first_seq + 1 - self.messages

    @property
    def mean_size(self) -> float:
        """The mean size of a message in the store, in bytes."""
        return self.nbytes / max(self.messages, 1)

    @property
    def has_lagging_replica(self) -> bool:
        """Whether a replica lags that may respond to requests."""
        led = 0
        if self.now is not None and self.leader_since is not None:
            led = nanoseconds(self.now) - nanoseconds(self.leader_since)
        return any(
            replica.lag and (replica.active or led) < _REPLICA_DOWN for replica in self.replicas
        )

    def verify_majority(self) -> None:
        """Raise RequestTimeoutError if another server may be the stream leader by now.

        A leader that is cut off from its followers responds for 10 to 20 s with its old state: a
        message that it lacks may exist.
        """
        if 2 * sum(replica.recently_active for replica in self.replicas) < len(self.replicas):
            raise RequestTimeoutError(
                f"stream leader {self.leader} of {self.name} has not heard from most of its "
                f"replicas for seconds: another leader may have more than sequence "
                f"{self.last_seq}; retry",
                settings=(),
            )

    def is_same_leader(self, now: StreamInfo, through: int) -> bool:
        """Whether ``now`` is a response of the same leader, which has ``through``."""
        return (now.created, now.leader) == (self.created, self.leader) and now.last_seq >= through

    def verify_same_leader(self, now: StreamInfo, through: int) -> None:
        """Raise RequestTimeoutError unless ``now`` is of the same leader and has ``through``.

        Then a message that the leader did not find in between does not exist. Otherwise a deposed
        leader may have responded, which lacks the latest messages.
        """
        if not self.replicated:
            return
        if not self.is_same_leader(now, through):
            raise RequestTimeoutError(
                f"the leader of stream {self.name} changed from {self.leader} to {now.leader} "
                f"during the read; retry",
                settings=(),
            )
        now.verify_majority()

    @classmethod
    def parse(cls, response: dict[str, Any]) -> StreamInfo:
        """From the API's JSON object; raises ProtocolError if a field is missing or invalid."""
        cluster = object_(response, "cluster", default={})
        config = stream_config(response, "config")
        return cls(
            name=string(config, "name"),
            created=timestamp(response, "created"),
            first_seq=integer(response, "state", "first_seq"),
            last_seq=integer(response, "state", "last_seq"),
            last_time=_known_time(timestamp(response, "state", "last_ts")),
            first_time=_known_time(timestamp(response, "state", "first_ts")),
            subjects=integer(response, "state", "num_subjects", default=0),
            messages=integer(response, "state", "messages"),
            nbytes=integer(response, "state", "bytes"),
            config=config,
            now=timestamp(response, "ts") if "ts" in response else None,
            leader=string(cluster, "leader", default="") or None,
            leader_since=timestamp(cluster, "leader_since") if "leader_since" in cluster else None,
            consumers=integer(response, "state", "consumer_count", default=0),
            replicas=tuple(
                Replica(
                    name=string(replica, "name", default=""),
                    lag=integer(replica, "lag", default=0),
                    active=integer(replica, "active", default=0),
                )
                for replica in array(cluster, "replicas")
            ),
        )


def _known_time(time: str) -> str | None:
    """None for the year 1, by which the server reports an unknown time."""
    return None if time.startswith("0001-") else time
