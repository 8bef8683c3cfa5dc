"""A server that is told to go (lame duck) sends its clients away, and ends by itself.

The reader pauses in the middle of a split until it was sent away, see ``clusters.halfway``, and
goes on at another one: of its option ``servers``, where nobody listened before, else it might have
been there from the start; or one that the first server told it of. ``test_rolling_restart`` has
servers that are told so and are restarted at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from faults.proxy import Proxy
from faults.trial import DEADLINE, KINDS
from topology import wait_until

from clusters.halfway import COUNT, SIZE, Halfway, read_in_small_batches
from clusters.watched import WatchedCluster, create_replicated
from nats_stream_source.embedded import NatsServer, free_port

pytestmark = pytest.mark.faults

_GRACE = 'lame_duck_grace_period: "1s"\n'
"""After it, clients are sent away, about one each second."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[WatchedCluster]:
    with WatchedCluster(more=dict.fromkeys(("n1", "n2", "n3"), _GRACE)) as cluster:
        yield cluster


class SentAway:
    """Tells a server to go when it is called, and starts it again when it is closed."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.gone = False

    def __call__(self) -> None:
        os.kill(self.server.pid, signal.SIGUSR2)
        wait_until("it has ended by itself", self._ended, deadline=DEADLINE)
        self.gone = True
        self.server.kill()  # nothing more happens: it is known to have ended

    def _ended(self) -> bool:
        ended = os.waitid(os.P_PID, self.server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None

    def close(self) -> None:
        """It runs again."""
        self.server.kill()
        self.server.start()

    def check(self) -> None:
        """It sent its clients away, and nobody told it to end."""
        assert self.gone
        log = self.server.log
        assert "Entering lame duck mode" in log
        assert "Closing existing clients" in log


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_that_is_half_read(
    cluster: WatchedCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    trial = create_replicated(cluster, kind, COUNT, SIZE)
    read_in_small_batches(monkeypatch)
    first = cluster.followers_of(trial.stream)[0]
    second = Proxy(cluster.leader_of(trial.stream).port, listen=free_port(), keep=0)
    with contextlib.ExitStack() as stack:
        away = stack.enter_context(contextlib.closing(SentAway(first)))

        def act() -> None:
            away()
            stack.enter_context(second)

        proxy = stack.enter_context(Halfway(first.port, act))
        reading = stack.enter_context(
            trial.reading(f"{proxy.url},{second.url}", connectTimeout="60")
        )
        assert reading.plan()
        assert proxy.connections == 1
        reading.read(proxy.each)
        # The first server does not run, and was the only one until then: the rest is another's.
        assert proxy.served == 0
        assert away.gone
        assert [one for one in caplog.records if "reason=reconnected" in one.getMessage()]
        trial.write(100, url=second.url)
        reading.until(trial.last)
    away.check()
    assert 0 < proxy.rows <= proxy.passed < COUNT
    trial.check(reading.rows)
