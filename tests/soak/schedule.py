"""The schedule of faults, determined by the seed. Pure.

Three lanes run concurrently, so that faults overlap: a server is paused while the driver is killed
and connections are reset. Within a lane faults run one after the other, and each kind occurs once
before any kind is repeated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SOURCES = ("full", "current", "stream")

SERVER_KINDS = (
    "kill server",
    "kill leader",
    "pause server",
    "pause leader",
    "step down stream",
    "step down meta",
    "rolling restart",
    "kill all servers",
)
SINGLE_SERVER_KINDS = ("kill server", "pause server", "restart server")
BETWEEN_KINDS = (
    "delete a consumer",
    "reset connections",
    "drop deliveries",
    "drop heartbeats",
    "hold traffic",
    "delete a consumer",
)
DRIVER_KINDS = ("kill driver", "stop driver", "kill driver")

POWER_LOSS = "power loss"

_LONG = 900.0  # seconds; in such a run the last quarter is longer than the life of other drivers
_MARGIN = 8.0  # seconds without a new fault at the start and at the end


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds after the start, or later, when the previous fault of its lane has ended.
        lane: ``servers``, ``between`` or ``driver``.
        target: a source, whose stream is affected, or a server; empty if all are affected.
        seconds: its duration, or the time until a stopped process is restarted.
        share: the share of messages to drop.
    """

    at: float
    lane: str
    kind: str
    target: str = ""
    seconds: float = 0.0
    share: float = 0.0

    def __str__(self) -> str:
        text = f"{self.at:6.1f} s  {self.kind} {self.target}".rstrip()
        if self.seconds:
            text += f" for {self.seconds:.1f} s"
        return text + (f", {self.share:.1%}" if self.share else "")


class FaultNotInjectedError(Exception):
    """A fault found nothing to affect."""


def schedule(
    seed: int, seconds: float, topology: str = "cluster", *, spark: bool = True
) -> list[Fault]:
    """All faults of a run, in order of time."""
    lanes = {
        "servers": (SERVER_KINDS if topology == "cluster" else SINGLE_SERVER_KINDS, (8.0, 22.0)),
        "between": (BETWEEN_KINDS, (4.0, 12.0)),
        # Spark starts in a dozen seconds, and reads some micro-batches before it is stopped again.
        "driver": (DRIVER_KINDS, (35.0, 110.0) if spark else (4.0, 25.0)),
    }
    faults: list[Fault] = []
    for lane, (kinds, pauses) in lanes.items():
        chance = random.Random(f"{seed} {lane}")
        deck: list[str] = []
        at = _MARGIN + chance.uniform(0, pauses[0])
        until = seconds - _MARGIN
        if lane == "driver" and seconds >= _LONG:
            until = seconds * 0.75  # the last driver runs long enough to measure its memory growth
        if topology == "power-loss":
            until = seconds * 0.5  # the second half is for the power loss
        while at < until:
            if not deck:
                deck = list(kinds)
                chance.shuffle(deck)
            fault = _fault(chance, at, lane, deck.pop(), topology == "cluster")
            faults.append(fault)
            at += fault.seconds + chance.uniform(*pauses)
    if topology == "power-loss":
        faults.append(Fault(round(seconds * 0.5, 1), "servers", POWER_LOSS, "n1", 5.0))
    return sorted(faults, key=lambda fault: fault.at)


def _fault(chance: random.Random, at: float, lane: str, kind: str, clustered: bool) -> Fault:
    # The same draws for each kind, so that a change of one kind does not change later faults.
    server, source = chance.choice(("n1", "n2", "n3")), chance.choice(SOURCES)
    short, long, share = chance.uniform(0.5, 4), chance.uniform(3, 12), chance.uniform(0.002, 0.05)
    at = round(at, 1)
    if kind in ("kill server", "pause server"):
        return Fault(at, lane, kind, server if clustered else "n1", round(long, 1))
    if kind in ("kill leader", "pause leader"):
        return Fault(at, lane, kind, source, round(long, 1))
    if kind == "step down stream":
        return Fault(at, lane, kind, source)
    if kind == "drop heartbeats":
        return Fault(at, lane, kind, "", round(short, 1))
    if kind == "drop deliveries":
        return Fault(at, lane, kind, "", round(long, 1), round(share, 3))
    if kind in ("kill all servers", "hold traffic", "kill driver", "stop driver"):
        return Fault(at, lane, kind, "", round(short, 1))
    return Fault(at, lane, kind)
