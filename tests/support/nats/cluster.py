"""Clusters: servers with routes, for replicated streams, their leader and their followers.

``STREAM.INFO`` reports the state of the stream leader. :meth:`Cluster.state_at` reads the
monitoring endpoint of a server instead, so a test can compare a follower with the leader.

Every wait has a deadline. Every server has a store of its own and is ended, also a paused one, when
the cluster's context is left.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer, free_port
from tests.support.nats.buckets import api, with_client
from tests.support.nats.topology import NO_ANSWER, Line, with_user
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


def leader_at(url: str, stream: str) -> str:
    """The stream's leader as this server reports it; empty when it reports none."""
    try:
        return str(api(url, f"STREAM.INFO.{stream}", timeout=1)["cluster"].get("leader") or "")
    except NO_ANSWER:
        return ""


ACCOUNTS = """
accounts {
    SYS { users [ {user: sys, password: sys} ] }
    APP { jetstream: enabled, users [
        {user: app, password: app}
        {user: restricted, password: restricted, permissions: {
            publish: {deny: "$JS.API.CONSUMER.DELETE.>"}
        }}
    ] }
}
system_account: SYS
no_auth_user: app
"""
"""Only the system account may tell the meta leader to step down; clients need no password.

The user ``restricted`` must not delete consumers.
"""


class Cluster:
    """Servers ``n1``, ``n2``, … with routes between all of them; a context manager.

    Entered, it has a meta leader and takes streams with ``size`` replicas.

    Args:
        lines: lead each route over a :class:`Line`, see :meth:`line`.
        stores: where servers have their stores, by name; in directories of their own otherwise.
        extra_config: lines to append to the configuration of a server, by name.

    Attributes:
        configs: the configuration file of each server, by name.
    """

    def __init__(
        self,
        size: int = 3,
        *,
        lines: bool = False,
        stores: Mapping[str, Path] | None = None,
        extra_config: Mapping[str, str] | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._size = size
        self._stores = dict(stores or {})
        self._extra_config = dict(extra_config or {})
        self.configs: dict[str, Path] = {}
        self._monitors: dict[str, int] = {}
        self._lines: dict[frozenset[str], Line] | None = {} if lines else None
        self.servers: dict[str, NatsServer] = {}

    def __repr__(self) -> str:
        return f"<Cluster {' '.join(map(repr, self.servers.values()))}>"

    @property
    def url(self) -> str:
        """The address of the first server."""
        return self.servers["n1"].url

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers.values()]

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
        return self._lines[frozenset((self.name_of(one), self.name_of(other)))]

    def name_of(self, server: NatsServer) -> str:
        return next(name for name, member in self.servers.items() if member is server)

    def _serve(self, name: str, port: int, args: list[str]) -> None:
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        config = self.configs[name] = directory / "server.conf"
        config.write_text(ACCOUNTS + self._extra_config.get(name, ""))
        self._start(name, port=port, args=args, store=self._stores.get(name), config=config)

    def _start(self, name: str, **settings: Any) -> None:
        server = NatsServer(**settings)
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
        return self._once_led(self._meta_leader, "a meta leader")

    def _meta_leader(self) -> str:
        """The name of the meta leader, as the first server that runs reports it."""
        for server in filter(_runs, self.servers.values()):
            with contextlib.suppress(OSError, ValueError):
                report = self.monitored(server, "jsz").get("meta_cluster") or {}
                return str(report.get("leader"))
        return ""

    def monitored(self, server: NatsServer, path: str) -> dict[str, Any]:
        port = self._monitors[self.name_of(server)]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as response:
            return dict(json.load(response))

    def state_at(self, server: NatsServer, stream: str) -> dict[str, Any]:
        """Return the state of the replica of ``server``; empty when it has no replica."""
        accounts = self.monitored(server, "jsz?accounts=true&streams=true")["account_details"]
        details = (detail for account in accounts for detail in account.get("stream_detail") or [])
        return next((dict(detail["state"]) for detail in details if detail["name"] == stream), {})

    def last_seq_at(self, server: NatsServer, stream: str) -> int:
        return int(self.state_at(server, stream)["last_seq"])

    def answers_direct_gets(self, server: NatsServer, stream: str) -> bool:
        """Return whether the replica of ``server`` responds to Direct Gets.

        A follower subscribes to the Direct Get subject some seconds after the leader.
        """
        subject = f"$JS.API.DIRECT.GET.{stream}"
        report = self.monitored(server, f"subsz?subs=1&acc=APP&test={subject}")
        subscriptions = report.get("subscriptions_list") or []
        return any(subscription["subject"] == subject for subscription in subscriptions)

    def followers_of(self, stream: str) -> list[NatsServer]:
        """The servers with the other replicas of ``stream``."""
        report = self._led(stream)
        replicas = report.get("replicas") or []
        return [self.servers[one["name"]] for one in replicas if one["name"] != report["leader"]]

    def step_down(self, stream: str) -> NatsServer:
        return self._stepped_down(
            self._leader(stream),
            lambda: str(self._report(stream).get("leader", "")),
            lambda: api(self._asked().url, f"STREAM.LEADER.STEPDOWN.{stream}", timeout=2),
        )

    def step_down_meta(self) -> NatsServer:
        return self._stepped_down(
            self.name_of(self.meta_leader()),
            self._meta_leader,
            lambda: api(with_user(self.url, "sys"), "META.LEADER.STEPDOWN", {}, timeout=2),
        )

    def _stepped_down(
        self, before: str, leader: Callable[[], str], request: Callable[[], object]
    ) -> NatsServer:
        def other() -> str:
            if (found := leader()) != before:
                return found
            # A response may be lost, the old leader may be elected again, and the server that is
            # asked may report the new leader later than the others.
            with contextlib.suppress(*NO_ANSWER):
                request()
            return ""

        return self._once_led(other, f"another leader than {before}")

    def _once_led(self, leader: Callable[[], str], what: str) -> NatsServer:
        """Wait until ``leader`` returns the name of a server; that server."""
        return wait_until(lambda: self.servers.get(leader()), what)

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
        config = wait_until(lambda: self._report(stream, "config"), f"the config of {stream}")
        for server in filter(_runs, self.servers.values()):
            for subject in config.get("subjects") or []:
                self.wait_writable(server.url, subject)

    def wait_writable(self, url: str, subjects: str) -> None:
        """Wait until writes to ``subjects``, which may have wildcards, come to a leader."""
        subject = subjects.replace("*", "x").replace(">", "x")
        wait_until(lambda: accepts_writes(url, subject), f"writes to {subject} at {url}")

    def _leader(self, stream: str) -> str:
        return str(self._led(stream)["leader"])

    def _led(self, stream: str) -> dict[str, Any]:
        """The stream's part of ``STREAM.INFO`` about the cluster, once there is a leader."""

        def led() -> dict[str, Any] | None:
            report = self._report(stream)
            return report if report.get("leader") else None

        return wait_until(led, f"a leader of {stream}")

    def _report(self, stream: str, part: str = "cluster") -> dict[str, Any]:
        try:
            answer = api(self._asked().url, f"STREAM.INFO.{stream}", timeout=1)
            return dict(answer.get(part) or {})
        except NO_ANSWER:
            return {}

    def _asked(self) -> NatsServer:
        return next(server for server in self.servers.values() if _runs(server))


@contextlib.contextmanager
def paused(servers: Iterable[NatsServer]) -> Iterator[None]:
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
    """A stream, one of whose replicas does not get what is written.

    Attributes:
        follower: the one that lags.
        outside: a server that reaches both, and has no replica where the cluster has such a one.
        has: the last sequence that the follower has.
        line: between it and the leader; released, it catches up.
    """

    cluster: Cluster
    stream: str
    leader: NatsServer
    follower: NatsServer
    outside: NatsServer
    has: int
    line: Line

    @property
    def bucket(self) -> str:
        return self.stream.removeprefix("KV_")

    @property
    def lags(self) -> bool:
        """Whether the follower still has what it had."""
        return self.cluster.last_seq_at(self.follower, self.stream) == self.has


@contextlib.contextmanager
def lagging(cluster: Cluster, stream: str, *, direct: bool = False) -> Iterator[Lagging]:
    """Make a follower of ``stream`` lag, from what it has now on.

    The route between it and the leader is held. Through the others it is still reached: it serves
    consumers, and answers Direct Gets, with what it has. For some seconds only: then it calls for
    an election, and gets what it lacks from a new leader.

    Args:
        cluster: one with ``lines``. With four servers, one has no replica: any of the three
            responds to its requests.
        direct: wait until the follower responds to Direct Gets.
    """
    cluster.wait_current(stream)
    # Neither of the two: else there is an election for want of it, or the follower does not hear of
    # new consumers.
    meta = cluster.meta_leader()
    leader = cluster.move_leader(stream, meta)
    cluster.wait_current(stream)
    follower = next(one for one in cluster.followers_of(stream) if one is not meta)
    others = [one for one in cluster.servers.values() if one not in (leader, follower)]
    outside = min(others, key=lambda one: one in cluster.followers_of(stream))
    if direct:
        wait_until(lambda: cluster.answers_direct_gets(follower, stream), "Direct Gets")
    has = cluster.last_seq_at(follower, stream)
    line = cluster.line(leader, follower)
    line.hold()
    try:
        yield Lagging(cluster, stream, leader, follower, outside, has, line)
    finally:
        line.release()
        cluster.wait_current(stream)
