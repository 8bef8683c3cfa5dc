"""Configured servers, accounts, domains and mirrors: what a server by itself cannot show.

Clusters are in ``cluster``.

Every wait has a deadline. Every server listens on the loopback interface, has a store of its own
and is ended, also a paused one, when its context is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors

from nats_stream_source.embedded import NatsServer, free_port
from tests.support.event_loop import Relay
from tests.support.nats.buckets import api, create_bucket
from tests.support.nats.streams import create_stream, stream_state
from tests.support.wait import wait_until

DEADLINE = 60.0
NO_ANSWER = (RuntimeError, OSError, nats.errors.Error)  # of a request that came too early


def with_user(url: str, user: str, password: str | None = None) -> str:
    """``url`` with a user, whose password is the user's name where none is given."""
    scheme, rest = url.split("://")
    return f"{scheme}://{user}:{password or user}@{rest}"


@contextlib.contextmanager
def configured_server(config: str, **settings: Any) -> Iterator[NatsServer]:
    """A server with ``config`` as its configuration file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "server.conf")
        path.write_text(config)
        with NatsServer(config=path, **settings) as server:
            yield server


CONSUMER_LIMITS = (
    {"max_ack_pending": 100},
    {"inactive_threshold": 1_000_000_000},
    {"max_ack_pending": 100, "inactive_threshold": 1_000_000_000},
)
"""``consumer_limits`` of a stream, below the defaults of consumers."""

_LIMITED = """
jetstream {}
accounts { A {
  jetstream: enabled
  users: [ { user: me, password: pw } ]
  limits { max_payload: 1000 }
} }
no_auth_user: me
"""


@contextlib.contextmanager
def limited_server() -> Iterator[str]:
    """The URL of a server with the bucket ``b``, the stream ``S``, and messages of 1,000 bytes."""
    with configured_server(_LIMITED) as server:
        create_bucket(server.url, "b")
        create_stream(server.url, "S", allow_batched=True)
        yield server.url


class ChangingServer:
    """A server with the user ``me``; started by ``with self.server``."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "users.conf"
        self.write()
        self.server = NatsServer(config=self._path, store=directory / "store")

    def write(self, password: str = "right", permissions: str = "", more: str = "") -> None:
        """Write the configuration that the server reads at its next start."""
        user = f'{{ user: me, password: "{password}", permissions: {{ {permissions} }} }}'
        self._path.write_text(f"{more}\nauthorization {{ users: [ {user} ] }}\n")

    def change(self, **to: str) -> None:
        """Let the server read another configuration."""
        self.write(**to)
        os.kill(self.server.pid, signal.SIGHUP)


# Lines


class Line(Relay):
    """A TCP line to the port ``target``; a context manager."""

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = b""
        while data := await reader.read(65536):
            await self._open.wait()
            lines, end, rest = (rest + data).rpartition(b"\r\n")
            writer.write(self.changed(lines + end))
            await writer.drain()
        raise ConnectionResetError

    _pass_down = _pass_up

    def changed(self, data: bytes) -> bytes:
        """What is sent in the place of ``data``, which ends with a line's end."""
        return data


# Leaf nodes with domains


@dataclass(frozen=True, slots=True)
class HubAndLeaf:
    """Two servers with the domains ``hub`` and ``leaf``; ``line`` is what joins them."""

    hub: NatsServer
    leaf: NatsServer
    line: Line

    def wait_joined(self) -> None:
        """Wait until the leaf node reaches the hub's JetStream."""
        wait_until(lambda: answers(self.leaf.url, "$JS.hub.API"), "the hub's domain at the leaf")

    def mirror(self, stream: str, history: int) -> None:
        config = {"source_domain": "hub", "max_msgs_per_subject": history}
        make_mirror(self.leaf.url, stream, stream, **config)


@contextlib.contextmanager
def hub_and_leaf(
    *, options: str = "", hub_options: str = "", line: Callable[[int], Line] = Line
) -> Iterator[HubAndLeaf]:
    """A hub and a leaf node, each with a domain; entered, the leaf reaches the hub's JetStream.

    Args:
        line: what joins them, to a port; what it carries is not compressed.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        joined = stack.enter_context(line(port))

        def server(name: str, leafnodes: str, more: str = "") -> NatsServer:
            config = directory / f"{name}.conf"
            config.write_text(
                f"server_name: {name}\njetstream {{ domain: {name} }}\n"
                f"leafnodes {{ {leafnodes}, compression: off }}\n{options}\n{more}\n"
            )
            return stack.enter_context(NatsServer(config=config))

        hub = server("hub", f"listen: '127.0.0.1:{port}'", hub_options)
        leaf = server(
            "leaf", f"remotes: [ {{ url: 'nats://127.0.0.1:{joined.port}', compression: off }} ]"
        )
        both = HubAndLeaf(hub, leaf, joined)
        both.wait_joined()
        yield both


def answers(url: str, prefix: str = "$JS.API", timeout: float = 0.5) -> bool:
    """Whether JetStream answers at a server."""
    try:
        api(url, "INFO", prefix=prefix, timeout=timeout)
    except NO_ANSWER:
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
    *,
    streamed: bool = False,
    flow_control: bool = False,
    acks: bool = False,
    object_store: bool = False,
    options: str = "",
) -> Iterator[Adr19Server]:
    """A server with ADR-19's own configuration: account I sees account A below ``fromA``.

    Args:
        streamed: the API's export allows several responses to a request (``response_type``).
        flow_control: responses to flow control (``$JS.FC.>``) cross from I to A, too.
        acks: acknowledgements (``$JS.ACK.>``) cross from I to A, too.
        object_store: ``$O.>`` as well, where Object Store writes go.
    """
    more = ["$JS.FC.>"] * flow_control + ["$JS.ACK.>"] * acks
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
    with configured_server(f"jetstream: enabled\n{text}\n{options}\n") as server:
        yield Adr19Server(server)


# Mirrors


def make_mirror(
    url: str, name: str, of: str, *, source_domain: str | None = None, **config: Any
) -> dict[str, Any]:
    """Create the stream ``name`` that mirrors ``of`` and wait until it has caught up."""
    mirror: dict[str, Any] = {"name": of}
    prefix = "$JS.API"
    if source_domain is not None:
        prefix = f"$JS.{source_domain}.API"
        wait_until(lambda: answers(url, prefix), f"the domain {source_domain} at {url}")
        mirror["external"] = {"api": prefix}
    answer = api(url, f"STREAM.CREATE.{name}", {"name": name, "mirror": mirror, **config})
    wait_for_seq(url, name, api(url, f"STREAM.INFO.{of}", prefix=prefix)["state"]["last_seq"])
    return answer


def wait_for_seq(url: str, stream: str, seq: int) -> None:
    """Wait until ``stream`` (its leader, as ``STREAM.INFO`` has it) has come to ``seq``."""

    def there() -> bool:
        try:
            return bool(stream_state(url, stream)["last_seq"] >= seq)
        except NO_ANSWER:
            return False  # of a server that has just come back

    wait_until(there, f"{stream} at {seq}")
