"""What an ordered consumer is asked for, and the configuration that says so to the server. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ENDLESS = (1 << 63) - 1
"""The end of a range that has none: a watch goes on until it is closed."""

_INACTIVE_THRESHOLD = (
    60_000_000_000  # nanoseconds; the server's own 5 s are short for a paused reader
)


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """What one ordered consumer shall deliver: the messages in ``(start, end]``.

    Attributes:
        stream: the stream's name; ``created``: its creation time, which pins its identity.
        end: the last sequence, or :data:`ENDLESS`.
        filters: subjects, not overlapping; none for the whole stream.
        last_per_subject: deliver only the last message of each subject (then ``start`` is 0).
        headers_only: leave payloads out.
        batch_rows, batch_bytes: the most that one yielded ``Frames`` holds.
        at_leader: only consumers that the stream's leader serves, once it has ``end``. Another
            server may lack messages, or lag: what a subject's last message is, it does not know.
        eager: yield what has arrived at once, instead of full batches; and an empty batch when
            ``reach`` is reached though no message said so.
        reach: the sequence that what delivers must have looked at (ADR-53); ``end`` when None, and
            nothing where there is no end.
        heartbeat: seconds between idle heartbeats; at least 0.1.
        catch_up: seconds to wait, in all, for a replica that does not move on towards ``reach``.
        attempts: consumers in a row that may be lost without any progress.
    """

    stream: str
    created: str
    start: int
    end: int
    filters: tuple[str, ...] = ()
    last_per_subject: bool = False
    headers_only: bool = False
    at_leader: bool = False
    batch_rows: int = 8192
    batch_bytes: int = 8 << 20
    eager: bool = False
    reach: int | None = None
    heartbeat: float = 0.5
    catch_up: float = 30.0
    attempts: int = 10

    @property
    def target(self) -> int:
        """The sequence that must be reached within ``catch_up``."""
        if self.reach is not None:
            return self.reach
        return self.start if self.end == ENDLESS else self.end

    @property
    def ends_with_list(self) -> bool:
        """Whether nothing follows the list of last messages."""
        return self.last_per_subject and self.end != ENDLESS


def filter_config(filters: Sequence[str]) -> dict[str, Any]:
    """The part of a consumer's configuration that names its filter subjects; none for all."""
    if len(filters) == 1:
        return {"filter_subject": filters[0]}
    return {"filter_subjects": list(filters)} if filters else {}


def consumer_config(
    request: RangeRequest,
    position: int,
    deliver_subject: str,
    *,
    seen_through: int = 0,
    flow_control: bool = True,
) -> dict[str, Any]:
    """The configuration of one consumer for ``request`` (DESIGN 7).

    Args:
        position: the last stream sequence that was kept; delivery begins after it. A
            ``last_per_subject`` list begins anew: from a sequence on, the rest of it would come
            with full history.
        seen_through: how far the server had looked. Where that is ``reach``, the list is over, and
            what follows is delivered from ``position`` on.
        deliver_subject: the inbox.
        flow_control: off where the server is known not to receive the answers.
    """
    config: dict[str, Any] = {
        "deliver_subject": deliver_subject,
        "ack_policy": "none",
        "max_deliver": 1,
        "mem_storage": True,
        "num_replicas": 1,
        "idle_heartbeat": round(request.heartbeat * 1e9),
        "inactive_threshold": _INACTIVE_THRESHOLD,
    }
    listed = request.reach is not None and seen_through >= request.reach
    if request.last_per_subject and not listed:
        config["deliver_policy"] = "last_per_subject"
    else:
        config["deliver_policy"] = "by_start_sequence"
        config["opt_start_seq"] = position + 1
    if flow_control:
        config["flow_control"] = True
    if request.headers_only:
        config["headers_only"] = True
    return config | filter_config(request.filters)
