"""More than one server, or one with several accounts: what a single server cannot show.

- :class:`Cluster`: servers with routes, for replicated streams, their leader and their followers.
- :func:`takes_writes`: whether a server knows who takes a subject's messages.
- :func:`lagging`: a follower that goes on answering, with less than the leader has.
- :func:`hub_and_leaf`: two servers joined by a leaf node, each with a JetStream domain (ADR-19).
- :func:`adr19_server`: one server with the accounts of ADR-19's own configuration.
- :func:`make_mirror`, :func:`wait_for_seq`: a mirror, and the moment it has caught up.

Every wait has a deadline. Every server listens on the loopback interface, has a store of its own
and is ended, also a paused one, when its context is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
from buckets import api, with_client
from loops import ThreadServer, until_one_ends
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer

_DEADLINE = 60.0
_NO_ANSWER = (RuntimeError, OSError, nats.errors.Error)  # of a request that came too early


def wait_until(what: str, condition: Callable[[], bool], deadline: float = _DEADLINE) -> None:
    """Wait until ``condition()`` holds; AssertionError that says ``what`` was waited for."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"after {deadline:g} s still not: {what}"
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Different TCP ports of the loopback interface that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


_ANOTHER_STREAM = 10060
"""The error of a write that is refused since it names another stream."""


def takes_writes(url: str, subject: str) -> bool:
    """Whether what is published to ``subject`` at this server comes to a stream's leader.

    Asked with a write that names another stream, which the leader refuses: it takes no sequence.
    """

    async def work(client: Client) -> bool:
        headers = {"Nats-Expected-Stream": "-"}
        answer = json.loads((await client.request(subject, b"", 1, headers=headers)).data)
        return bool((answer.get("error") or {}).get("err_code") == _ANOTHER_STREAM)

    try:
        return with_client(url, work)
    except _NO_ANSWER:
        return False


def with_user(url: str, user: str, password: str | None = None) -> str:
    """``url`` with a user, whose password is the user's name where none is given."""
    scheme, rest = url.split("://")
    return f"{scheme}://{user}:{password or user}@{rest}"


# Lines


class Line(ThreadServer):
    """A TCP line to ``target`` that can be held and let go; a context manager.

    A held line keeps its connections and what they carry, in order: what a slow network does.
    """

    def __init__(self, target: int) -> None:
        super().__init__()
        self._target = target
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Let nothing pass from now on."""
        self._in_loop(self._open.clear)

    def release(self) -> None:
        """Let what was held and all that follows pass."""
        self._in_loop(self._open.set)

    async def _serve(self, down: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        up, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await until_one_ends(self._pass(down, to_server), self._pass(up, to_client))
        finally:
            to_server.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = b""
        while data := await reader.read(65536):
            await self._open.wait()
            lines, end, rest = (rest + data).rpartition(b"\r\n")
            writer.write(self.changed(lines + end))
            await writer.drain()
        raise ConnectionResetError

    def changed(self, data: bytes) -> bytes:
        """What goes on in the place of ``data``, which ends with a line's end."""
        return data


# Clusters


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

    def __enter__(self) -> Cluster:
        ports = free_ports(3 * self._size)
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
            wait_until("a meta leader that places replicas", self._places)
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
        except _NO_ANSWER:
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

        wait_until("a meta leader", there)
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
                with contextlib.suppress(*_NO_ANSWER):
                    api(self._asked().url, f"STREAM.LEADER.STEPDOWN.{stream}", timeout=2)
                return False
            after[:] = [leader] if leader else []
            return bool(after)

        wait_until(f"another leader of {stream}", moved)
        return self.servers[after[0]]

    def wait_current(self, stream: str) -> None:
        """Wait until every replica of ``stream`` has all that the leader has."""
        wait_until(
            f"all replicas of {stream} current",
            lambda: all(
                one.get("current") and not one.get("lag")
                for one in self._report(stream).get("replicas") or [{}]
            ),
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
        wait_until(f"writes to {subject} at {url}", lambda: takes_writes(url, subject))

    def _config(self, stream: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def told() -> bool:
            with contextlib.suppress(*_NO_ANSWER):
                found.update(api(self._asked().url, f"STREAM.INFO.{stream}", timeout=1)["config"])
            return bool(found)

        wait_until(f"the configuration of {stream}", told)
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

        wait_until(f"a leader of {stream}", there)
        return found

    def _report(self, stream: str) -> dict[str, Any]:
        try:
            answer = api(self._asked().url, f"STREAM.INFO.{stream}", timeout=1)
            return dict(answer.get("cluster") or {})
        except _NO_ANSWER:
            return {}

    def _asked(self) -> NatsServer:
        return next(server for server in self.servers.values() if _runs(server))


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
    has = api(third.url, f"STREAM.INFO.{stream}")["state"]["last_seq"]
    line.hold()
    try:
        yield Lagging(bucket, leader, follower, third, has, line)
    finally:
        line.release()
        cluster.wait_current(stream)


# Leaf nodes with domains


@dataclass(frozen=True, slots=True)
class HubAndLeaf:
    """Two servers with the domains ``hub`` and ``leaf``; ``line`` is what joins them."""

    hub: NatsServer
    leaf: NatsServer
    line: Line

    def wait_joined(self) -> None:
        """Wait until the leaf node reaches the hub's JetStream."""
        wait_until("the hub's domain at the leaf", lambda: _answers(self.leaf.url, "$JS.hub.API"))


@contextlib.contextmanager
def hub_and_leaf(
    binary: str | None = None,
    *,
    options: str = "",
    hub_options: str = "",
    line: Callable[[int], Line] = Line,
) -> Iterator[HubAndLeaf]:
    """A hub and a leaf node, each with a domain; entered, the leaf reaches the hub's JetStream.

    Args:
        binary: the executable, as for :class:`NatsServer`.
        options: more lines for both configurations.
        hub_options: more lines for the hub's.
        line: what joins them, to a port; what it carries is not compressed.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (port,) = free_ports(1)
        joined = stack.enter_context(line(port))

        def server(name: str, leafnodes: str, more: str = "") -> NatsServer:
            config = directory / f"{name}.conf"
            config.write_text(
                f"server_name: {name}\njetstream {{ domain: {name} }}\n"
                f"leafnodes {{ {leafnodes}, compression: off }}\n{options}\n{more}\n"
            )
            return stack.enter_context(NatsServer(config=config, binary=binary))

        hub = server("hub", f"listen: '127.0.0.1:{port}'", hub_options)
        leaf = server(
            "leaf", f"remotes: [ {{ url: 'nats://127.0.0.1:{joined.port}', compression: off }} ]"
        )
        both = HubAndLeaf(hub, leaf, joined)
        both.wait_joined()
        yield both


def _answers(url: str, prefix: str) -> bool:
    try:
        api(url, "INFO", prefix=prefix, timeout=0.5)
    except _NO_ANSWER:
        return False
    return True


# Accounts

ADR19_API_PREFIX = "fromA"
ADR19_INBOX_PREFIX = "forI"

_ADR19 = """
accounts: {{
    A: {{
        users: [ {{user: a, password: a}} ]
        jetstream: enabled
        exports: [
            {{service: '$JS.API.>'{streamed} }}
            {{service: '$KV.>'}}
            {exports}
            {{stream: 'forI.>' }}
        ]
    }},
    I: {{
        users: [ {{user: i, password: i}} ]
        imports: [
            {{service: {{account: A, subject: '$JS.API.>'}}, to: 'fromA.>' }}
            {{service: {{account: A, subject: '$KV.>'}}, to: 'fromA.$KV.>' }}
            {imports}
            {{stream: {{ subject: 'forI.>', account: 'A' }} }}
        ]
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Adr19Server:
    """A server with the accounts ``A``, which has JetStream, and ``I``, which imports it."""

    server: NatsServer

    @property
    def exporter(self) -> str:
        """The address for account A's user."""
        return with_user(self.server.url, "a")

    @property
    def importer(self) -> str:
        """The address for account I's user; API prefix ``fromA``, inbox prefix ``forI``."""
        return with_user(self.server.url, "i")


@contextlib.contextmanager
def adr19_server(
    binary: str | None = None,
    *,
    streamed: bool = False,
    flow_control: bool = False,
    object_store: bool = False,
    options: str = "",
) -> Iterator[Adr19Server]:
    """A server with ADR-19's own configuration: account I sees account A below ``fromA``.

    Args:
        binary: the executable, as for :class:`NatsServer`.
        streamed: the API's export allows several answers to a request (``response_type``).
        flow_control: flow-control answers (``$JS.FC.>``) cross from I to A, too.
        object_store: ``$O.>`` as well, where Object Store writes go.
        options: more lines for the configuration.
    """
    more = ["$JS.FC.>"] * flow_control
    exports = [f"{{service: '{subject}'}}" for subject in more]
    imports = [f"{{service: {{account: A, subject: '{subject}'}} }}" for subject in more]
    if object_store:
        exports.append("{service: '$O.>'}")
        imports.append("{service: {account: A, subject: '$O.>'}, to: 'fromA.$O.>' }")
    text = _ADR19.format(
        streamed=", response_type: stream" if streamed else "",
        exports="\n            ".join(exports),
        imports="\n            ".join(imports),
    )
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "accounts.conf"
        config.write_text(f"jetstream: enabled\n{text}\n{options}\n")
        with NatsServer(config=config, binary=binary) as server:
            yield Adr19Server(server)


# Mirrors


def make_mirror(
    url: str, name: str, of: str, *, source_domain: str | None = None, **config: Any
) -> dict[str, Any]:
    """Create the stream ``name`` that mirrors ``of`` and wait until it has caught up.

    Args:
        url: the server of the mirror.
        source_domain: the domain of ``of``, where it is another one than the mirror's.
        config: more of the mirror's configuration.
    """
    mirror: dict[str, Any] = {"name": of}
    prefix = "$JS.API"
    if source_domain is not None:
        prefix = f"$JS.{source_domain}.API"
        wait_until(f"the domain {source_domain} at {url}", lambda: _answers(url, prefix))
        mirror["external"] = {"api": prefix}
    answer = api(url, f"STREAM.CREATE.{name}", {"name": name, "mirror": mirror, **config})
    wait_for_seq(url, name, api(url, f"STREAM.INFO.{of}", prefix=prefix)["state"]["last_seq"])
    return answer


def wait_for_seq(url: str, stream: str, seq: int) -> None:
    """Wait until ``stream`` (its leader, as ``STREAM.INFO`` has it) has come to ``seq``."""

    def there() -> bool:
        try:
            return bool(api(url, f"STREAM.INFO.{stream}")["state"]["last_seq"] >= seq)
        except _NO_ANSWER:
            return False  # of a server that has just come back

    wait_until(f"{stream} at {seq}", there)
