"""A server in lame duck mode disconnects its clients, and ends by itself.

The reader pauses within a split until it is disconnected, see
``tests.faults.cluster.replica_state``, and continues at another server. That one is named by its
option ``servers`` and did not listen before, else the reader might have been there from the start;
or the first server named it. ``test_rolling_restart`` has servers in lame duck mode that are
restarted at once.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from nats_stream_source.embedded import NatsServer, free_port
from tests.faults.cluster.replica_state import (
    COUNT,
    SIZE,
    StalledReader,
    create_replicated,
    read_in_small_batches,
)
from tests.support.nats.cluster import Cluster
from tests.support.proxy.fault_proxy import Proxy
from tests.support.recorded_stream import DEADLINE, KINDS
from tests.support.wait import wait_until

_GRACE = 'lame_duck_grace_period: "1s"\n'
"""After this time the server disconnects its clients, about one each second."""

pytestmark = [
    pytest.mark.faults,
    pytest.mark.cluster(extra_config=dict.fromkeys(("n1", "n2", "n3"), _GRACE)),
]


class LameDuck:
    """Puts a server into lame duck mode when it is called, and starts it when it is closed."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.gone = False

    def __call__(self) -> None:
        os.kill(self.server.pid, signal.SIGUSR2)
        wait_until(self._ended, "it has ended by itself", deadline=DEADLINE)
        self.gone = True
        self.server.kill()  # nothing more happens: it is known to have ended

    def _ended(self) -> bool:
        ended = os.waitid(os.P_PID, self.server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None

    def close(self) -> None:
        self.server.kill()
        self.server.start()

    def check(self) -> None:
        assert self.gone
        log = self.server.log
        assert "Entering lame duck mode" in log
        assert "Closing existing clients" in log


@pytest.mark.parametrize("kind", KINDS)
def test_lame_duck_while_split_is_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    recorded = create_replicated(cluster, kind, COUNT, SIZE)
    read_in_small_batches(monkeypatch)
    first = cluster.followers_of(recorded.stream)[0]
    second = Proxy(cluster.leader_of(recorded.stream).port, listen=free_port(), keep=0)
    with contextlib.ExitStack() as stack:
        away = stack.enter_context(contextlib.closing(LameDuck(first)))

        def act() -> None:
            away()
            stack.enter_context(second)

        proxy = stack.enter_context(StalledReader(first.port, act))
        query = stack.enter_context(
            recorded.query(f"{proxy.url},{second.url}", connectTimeout="60")
        )
        assert query.plan()
        assert proxy.connections == 1
        query.read(proxy.each)
        # The first server does not run, and was the only one until then: the rest is another's.
        assert proxy.served == 0
        assert away.gone
        assert [one for one in caplog.records if "reason=reconnected" in one.getMessage()]
        recorded.write(100, url=second.url)
        query.until(recorded.last)
    away.check()
    assert 0 < proxy.rows <= proxy.passed < COUNT
    recorded.check(query.rows)
