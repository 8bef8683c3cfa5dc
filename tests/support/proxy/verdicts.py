"""Verdicts for the proxy, by what they do: each counts what it did (``done``).

A delivery is a message that a consumer delivers; everything else passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable
from functools import partial

from tests.support.proxy.fault_proxy import (
    Outcome,
    Verdict,
    consumer_of,
    is_delivery,
    is_status,
    pending,
    stream_seq,
    subject_of,
)

Effect = Outcome | Callable[[bytes], Outcome]
"""What becomes of a frame, or a function from the frame to it."""

EVERY = range(1, 10**9)


class FrameFault:
    """Does ``outcome`` to the frames that :meth:`hits` names."""

    def __init__(self, outcome: Effect = False) -> None:
        self.outcome = outcome
        self.done = 0

    def hits(self, frame: bytes) -> bool:
        raise NotImplementedError

    def __call__(self, frame: bytes) -> Outcome:
        if not self.hits(frame):
            return True
        outcome = self.outcome(frame) if callable(self.outcome) else self.outcome
        self.done += 1
        return outcome


class Counted(FrameFault):
    """Of the frames that match, those with these numbers, from 1 on over all connections."""

    def __init__(
        self,
        matches: Callable[[bytes], bool],
        numbers: Container[int] = EVERY,
        outcome: Effect = False,
    ) -> None:
        super().__init__(outcome)
        self._matches = matches
        self._numbers = numbers
        self._count = 0

    def hits(self, frame: bytes) -> bool:
        if not self._matches(frame):
            return False
        self._count += 1
        return self._count in self._numbers


def first(most: int | None) -> range:
    """The numbers of so many frames; of all without a limit."""
    return EVERY if most is None else range(1, most + 1)


Nth = partial(Counted, is_delivery)
"""The n-th deliveries."""


class Sequences(FrameFault):
    """Deliveries with these stream sequences, each once."""

    def __init__(self, sequences: Iterable[int], outcome: Effect = False) -> None:
        super().__init__(outcome)
        self._left = set(sequences)

    def hits(self, frame: bytes) -> bool:
        if not is_delivery(frame) or (seq := stream_seq(frame)) not in self._left:
            return False
        self._left.discard(seq)
        return True


class Last(Counted):
    """Once, the delivery after which the consumer has nothing more."""

    def __init__(self) -> None:
        super().__init__(lambda frame: is_delivery(frame) and pending(frame) == 0, first(1))


class Share(FrameFault):
    """A share of all deliveries, drawn with a seed."""

    def __init__(self, share: float, seed: int = 0, outcome: Outcome = False) -> None:
        super().__init__(outcome)
        self._share = share
        self._random = random.Random(seed)

    def hits(self, frame: bytes) -> bool:
        return is_delivery(frame) and self._random.random() < self._share


class Status(Counted):
    """Status messages: ``FlowControl``, ``Idle Heartbeat``; the first ``most`` of them."""

    def __init__(self, text: str, most: int | None = None, outcome: Effect = False) -> None:
        super().__init__(lambda frame: is_status(frame, text.encode()), first(most), outcome)


class Published(Counted):
    """What the client publishes to subjects with ``prefix``; the first ``most`` of it."""

    def __init__(self, prefix: str, most: int | None = None) -> None:
        super().__init__(
            lambda frame: (
                frame[:4].upper() in (b"PUB ", b"HPUB") and subject_of(frame).startswith(prefix)
            ),
            first(most),
        )


class When(FrameFault):
    """Once, when the delivery of ``seq`` (or a later one) passes, do ``act``.

    What that consumer had under way, this one included, is lost: else a fast reader would have all
    before anything happens. ``lose=False`` lets it pass.
    """

    def __init__(self, seq: int, act: Callable[[], None], *, lose: bool = True) -> None:
        super().__init__(not lose)
        self._seq = seq
        self._act = act
        self.consumer: str | None = None

    def hits(self, frame: bytes) -> bool:
        if not is_delivery(frame):
            return False
        if self.consumer is None and stream_seq(frame) >= self._seq:
            self.consumer = consumer_of(frame)
            self._act()
        return consumer_of(frame) == self.consumer


class ConsumerDeletedEarly(FrameFault):
    """A consumer is deleted as its creation is confirmed: it delivers nothing."""

    def __init__(self, delete: Callable[[], list[str]]) -> None:
        super().__init__()
        self._delete = delete
        self.gone: list[str] = []

    def hits(self, frame: bytes) -> bool:
        if b"consumer_create_response" in frame and not self.gone:
            self.gone = self._delete()
            return False
        return is_delivery(frame) and (not self.gone or consumer_of(frame) in self.gone)


class ConsumerDeletedAt(When):
    """A consumer is deleted when its delivery of ``seq`` passes."""

    def __init__(self, delete: Callable[[], list[str]], seq: int) -> None:
        self.gone: list[str] = []
        super().__init__(seq, lambda: self.gone.extend(delete()))


class Silence(FrameFault):
    """From the delivery of ``seq`` on, nothing of that consumer comes, its heartbeats neither."""

    def __init__(self, seq: int) -> None:
        super().__init__(False)
        self._seq = seq
        self._inbox: str | None = None

    def hits(self, frame: bytes) -> bool:
        if is_delivery(frame):
            # Deliveries have the stream's subject, statuses the consumer's inbox: the sid has both.
            if self._inbox is None and stream_seq(frame) >= self._seq:
                self._inbox = _sid(frame)
            return _sid(frame) == self._inbox
        return is_status(frame, b"") and _sid(frame) == self._inbox


def _sid(frame: bytes) -> str:
    return frame.split(b" ", 3)[2].decode()


def each(*verdicts: Verdict) -> Verdict:
    """The first of ``verdicts`` that does not let a frame pass decides."""

    def verdict(frame: bytes) -> Outcome:
        for one in verdicts:
            if (outcome := one(frame)) is not True:
                return outcome
        return True

    return verdict
