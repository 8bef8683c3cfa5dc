"""What is done when: the seed decides it, and the same seed decides the same. Pure.

Three lanes run beside each other, so that troubles meet: a server is paused while the driver is
killed while connections are reset. Within a lane one fault follows the other; each kind comes once
before any comes again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PLACES = ("full", "current", "stream")

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

_LONG = 900.0  # seconds; a quarter of it is more than a driver lives otherwise
_CALM = 8.0  # seconds at the beginning and at the end without a new fault


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds after the start, at the earliest: the one before it in its lane goes first.
        lane: ``servers``, ``between`` or ``driver``.
        target: a place (whose stream it is about), or a server; empty where it is about all.
        seconds: how long it lasts, or until what was ended is started again.
        share: of the messages, where some are dropped.
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


class NothingDoneError(Exception):
    """A fault did not happen."""


def schedule(
    seed: int, seconds: float, topology: str = "cluster", *, spark: bool = True
) -> list[Fault]:
    """All faults of a run, in the order of their time."""
    lanes = {
        "servers": (SERVER_KINDS if topology == "cluster" else SINGLE_SERVER_KINDS, (8.0, 22.0)),
        "between": (BETWEEN_KINDS, (4.0, 12.0)),
        # Starting Spark takes a dozen seconds, and something is to be read between two ends.
        "driver": (DRIVER_KINDS, (35.0, 110.0) if spark else (4.0, 25.0)),
    }
    faults: list[Fault] = []
    for lane, (kinds, pauses) in lanes.items():
        drawn = random.Random(f"{seed} {lane}")
        deck: list[str] = []
        at = _CALM + drawn.uniform(0, pauses[0])
        until = seconds - _CALM
        if lane == "driver" and seconds >= _LONG:
            until = seconds * 0.75  # the last driver lives for long enough to see its memory grow
        if topology == "power-loss":
            until = seconds * 0.5  # what is left is for the loss itself
        while at < until:
            if not deck:
                deck = list(kinds)
                drawn.shuffle(deck)
            fault = _fault(drawn, at, lane, deck.pop(), topology == "cluster")
            faults.append(fault)
            at += fault.seconds + drawn.uniform(*pauses)
    if topology == "power-loss":
        faults.append(Fault(round(seconds * 0.5, 1), "servers", POWER_LOSS, "n1", 5.0))
    return sorted(faults, key=lambda fault: fault.at)


def _fault(drawn: random.Random, at: float, lane: str, kind: str, clustered: bool) -> Fault:
    # Always drawn, so that one kind's needs do not change what comes after it.
    server, place = drawn.choice(("n1", "n2", "n3")), drawn.choice(PLACES)
    short, long, share = drawn.uniform(0.5, 4), drawn.uniform(3, 12), drawn.uniform(0.002, 0.05)
    at = round(at, 1)
    if kind in ("kill server", "pause server"):
        return Fault(at, lane, kind, server if clustered else "n1", round(long, 1))
    if kind in ("kill leader", "pause leader"):
        return Fault(at, lane, kind, place, round(long, 1))
    if kind == "step down stream":
        return Fault(at, lane, kind, place)
    if kind == "drop heartbeats":
        return Fault(at, lane, kind, "", round(short, 1))
    if kind == "drop deliveries":
        return Fault(at, lane, kind, "", round(long, 1), round(share, 3))
    if kind in ("kill all servers", "hold traffic", "kill driver", "stop driver"):
        return Fault(at, lane, kind, "", round(short, 1))
    return Fault(at, lane, kind)
