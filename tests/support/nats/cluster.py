"""Clusters: servers with routes, for replicated streams, their leader and their followers.

- :class:`Cluster`: all of its servers, and the leader of each stream.
- :func:`accepts_writes`: whether a server has the stream of a subject.
- :func:`paused`: servers that pause for a while.
- :func:`lagging`: a follower that still responds, with less than the leader has.

Every wait has a deadline. Every server has a store of its own and is ended, also a paused one, when
the cluster's context is left.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer, free_port
from tests.support.nats.buckets import api, with_client
from tests.support.nats.streams import stream_state
from tests.support.nats.topology import (
    NO_ANSWER,
    Line,
)
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

_ANOTHER_STREAM = 10060
"""The error of a write that is refused since it names another stream."""


def accepts_writes(url: str, subject: str) -> bool:
    """Whether what is published to ``subject`` at this server comes to a stream's leader.

    The test is a write that names another stream. The leader refuses it without a sequence.
    """

    async def work(client: Client) -> bool:
        headers = {"Nats-Expected-Stream": "-"}
        answer = json.loads((await client.request(subject, b"", 1, headers=headers)).data)
        return bool((answer.get("error") or {}).get("err_code") == _ANOTHER_STREAM)

    try:
        return with_client(url, work)
    except NO_ANSWER:
        return False


SYSTEM_ACCOUNT = """
accounts {
    SYS { users [ {user: sys, password: sys} ] }
    APP { jetstream: enabled, users [ {user: app, password: app} ] }
}
system_account: SYS
no_auth_user: app
"""
"""Only the system account may tell the meta leader to step down; all others need no password."""


class Cluster:
    """Servers ``n1``, ``n2``, … with routes between all of them; a context manager.

    Entered, it has a meta leader and takes streams with ``size`` replicas.

    Args:
        size: how many servers.
        binary: the executable, as for :class:`NatsServer`.
        lines: lead each route over a :class:`Line`, see :meth:`line`.
        stores: where servers have their stores, by name; in directories of their own otherwise.
    """

    def __init__(
        self,
        size: int = 3,
        binary: str | None = None,
        *,
        lines: bool = False,
        stores: Mapping[str, Path] | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._size = size
        self._binary = binary
        self._stores = dict(stores or {})
        self._monitors: dict[str, int] = {}
        self._lines: dict[frozenset[str], Line] | None = {} if lines else None
        self.servers: dict[str, NatsServer] = {}

    def __repr__(self) -> str:
        return f"<Cluster {' '.join(map(repr, self.servers.values()))}>"

    @property
    def url(self) -> str:
        """The address of the first server."""
        return self.servers["n1"].url

    def __enter__(self) -> Self:
        ports = [free_port() for _ in range(3 * self._size)]
        monitors, ports = ports[: self._size], ports[self._size :]
        names = [f"n{index + 1}" for index in range(self._size)]
        with self._stack:
            for index, name in enumerate(names):
                own = f"nats://127.0.0.1:{ports[self._size + index]}"
                args = ["-n", name, "--cluster_name", "test", "--cluster", own]
                args += ["-m", str(monitors[index])]
                self._monitors[name] = monitors[index]
                args += ["--routes", ",".join(self._routes(index, names, ports[self._size :]))]
                if self._lines is not None:
                    # Servers tell each other of all others; at this address they find nobody, so
                    # the only routes are those of the lines.
                    args += ["--cluster_advertise", "127.0.0.1:1"]
                self._serve(name, ports[index], args)
            wait_until(self._places, "a meta leader that places replicas")
            self._stack = self._stack.pop_all()
        return self

    def _routes(self, index: int, names: list[str], ports: list[int]) -> list[str]:
        if self._lines is not None:
            own, ports = ports[index], ports[:index]
            for other, port in enumerate(ports):
                line = self._stack.enter_context(Line(port))
                self._lines[frozenset((names[index], names[other]))] = line
                ports[other] = line.port
            # Its own: a server without any route is in no cluster.
            ports = [*ports, own]
        return [f"nats://127.0.0.1:{port}" for port in ports]

    def line(self, one: NatsServer, other: NatsServer) -> Line:
        """What joins two servers. While it is held neither sees what the other does."""
        assert self._lines is not None
        names = {name for name, server in self.servers.items() if server in (one, other)}
        return self._lines[frozenset(names)]

    def _serve(self, name: str, port: int, args: list[str]) -> None:
        store = self._stores.get(name)
        server = NatsServer(store=store, port=port, args=args, binary=self._binary)
        self._stack.callback(server.stop)
        # In good order a server first hands its leaderships over: nobody needs that here.
        self._stack.callback(server.kill)
        self.servers[name] = server.start()

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _places(self) -> bool:
        try:
            config = {"name": "PROBE", "num_replicas": self._size, "storage": "memory"}
            api(self.url, "STREAM.CREATE.PROBE", config, timeout=0.5)
            api(self.url, "STREAM.DELETE.PROBE", timeout=0.5)
        except NO_ANSWER:
            return False  # no leader yet, or it has not met all the others
        return True

    def leader_of(self, stream: str) -> NatsServer:
        """The server that leads ``stream``; waits while there is an election."""
        return self.servers[self._leader(stream)]

    def move_leader(self, stream: str, away_from: NatsServer) -> NatsServer:
        """The leader of ``stream``, after it has stepped down for as long as it is that server."""
        while (leader := self.leader_of(stream)) is away_from:
            self.step_down(stream)
        return leader

    def meta_leader(self) -> NatsServer:
        """The server that decides where streams and consumers are placed."""
        found: list[str] = []

        def there() -> bool:
            found[:] = [self._meta_leader()]
            return found[0] in self.servers

        wait_until(there, "a meta leader")
        return self.servers[found[0]]

    def _meta_leader(self) -> str:
        # As the first server that runs has it: its clients are not told.
        port = self._monitors[next(n for n, s in self.servers.items() if _runs(s))]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/jsz", timeout=5) as answer:
                return str((json.load(answer).get("meta_cluster") or {}).get("leader"))
        except OSError:
            return ""

    def followers_of(self, stream: str) -> list[NatsServer]:
        """The servers with the other replicas of ``stream``."""
        report = self._led(stream)
        replicas = report.get("replicas") or []
        return [self.servers[one["name"]] for one in replicas if one["name"] != report["leader"]]

    def step_down(self, stream: str) -> NatsServer:
        """Make the leader of ``stream`` give way; the new leader."""
        before = self._leader(stream)
        after: list[str] = []

        def moved() -> bool:
            leader = self._report(stream).get("leader")
            if leader == before:
                # An answer may get lost, and the old leader may be elected again.
                with contextlib.suppress(*NO_ANSWER):
                    api(self._asked().url, f"STREAM.LEADER.STEPDOWN.{stream}", timeout=2)
                return False
            after[:] = [leader] if leader else []
            return bool(after)

        wait_until(moved, f"another leader of {stream}")
        return self.servers[after[0]]

    def wait_current(self, stream: str) -> None:
        """Wait until every replica of ``stream`` has all that the leader has."""
        wait_until(
            lambda: all(
                one.get("current") and not one.get("lag")
                for one in self._report(stream).get("replicas") or [{}]
            ),
            f"all replicas of {stream} current",
        )

    def wait_ready(self, stream: str) -> None:
        """Wait until ``stream`` has all its replicas, and takes writes at each server that runs.

        A server that does not know a new stream, or a new leader, answers a write with "no
        responders".
        """
        self.wait_current(stream)
        subjects = self._config(stream).get("subjects") or []
        for server in filter(_runs, self.servers.values()):
            for subject in subjects:
                self.wait_writable(server.url, subject)

    def wait_writable(self, url: str, subjects: str) -> None:
        """Wait until writes to ``subjects``, which may have wildcards, come to a leader."""
        subject = subjects.replace("*", "x").replace(">", "x")
        wait_until(lambda: accepts_writes(url, subject), f"writes to {subject} at {url}")

    def _config(self, stream: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def told() -> bool:
            with contextlib.suppress(*NO_ANSWER):
                found.update(api(self._asked().url, f"STREAM.INFO.{stream}", timeout=1)["config"])
            return bool(found)

        wait_until(told, f"the configuration of {stream}")
        return found

    def _leader(self, stream: str) -> str:
        return str(self._led(stream)["leader"])

    def _led(self, stream: str) -> dict[str, Any]:
        """The stream's part of ``STREAM.INFO`` about the cluster, once there is a leader."""
        found: dict[str, Any] = {}

        def there() -> bool:
            found.clear()
            found.update(self._report(stream))
            return bool(found.get("leader"))

        wait_until(there, f"a leader of {stream}")
        return found

    def _report(self, stream: str) -> dict[str, Any]:
        try:
            answer = api(self._asked().url, f"STREAM.INFO.{stream}", timeout=1)
            return dict(answer.get("cluster") or {})
        except NO_ANSWER:
            return {}

    def _asked(self) -> NatsServer:
        return next(server for server in self.servers.values() if _runs(server))


@contextlib.contextmanager
def paused(servers: Iterable[NatsServer]) -> Iterator[None]:
    """Pause these servers."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            server.pause()
            stack.callback(server.resume)
        yield


def _runs(server: NatsServer) -> bool:
    try:
        return server.pid > 0 and not server.paused
    except RuntimeError:
        return False  # it was killed


@dataclass(frozen=True, slots=True)
class Lagging:
    """The stream ``KV_<bucket>`` of a cluster, one of whose replicas does not get what is written.

    Attributes:
        leader, follower, third: ``follower`` is the one that lags.
        has: the last sequence that it has.
        line: between it and the leader; released, it catches up.
    """

    bucket: str
    leader: NatsServer
    follower: NatsServer
    third: NatsServer
    has: int
    line: Line


@contextlib.contextmanager
def lagging(cluster: Cluster, bucket: str) -> Iterator[Lagging]:
    """Make a follower of the replicated ``bucket`` lag, from what it has now on.

    The route between it and the leader is held. Through the third server it is still reached: it
    serves consumers, and answers Direct Gets, with what it has. For some seconds only: then it
    calls for an election.

    Args:
        cluster: one of three servers, with ``lines``.
        bucket: with three replicas.
    """
    stream = f"KV_{bucket}"
    cluster.wait_current(stream)
    # The third one shall be the meta leader: it reaches both, so that there is no election for want
    # of one, and the follower hears of new consumers.
    third = cluster.meta_leader()
    leader = cluster.move_leader(stream, third)
    cluster.wait_current(stream)
    (follower,) = (one for one in cluster.servers.values() if one not in (leader, third))
    line = cluster.line(leader, follower)
    has = stream_state(third.url, stream)["last_seq"]
    line.hold()
    try:
        yield Lagging(bucket, leader, follower, third, has, line)
    finally:
        line.release()
        cluster.wait_current(stream)
