"""The servers of a soak: a cluster of three, or one server, each behind a proxy.

Spark connects to the proxies, and the servers advertise the proxies' addresses to all clients, so
no client bypasses them. The generator and this process connect to the servers directly. Faults
affect deliveries only, which neither of them receives.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors

from nats_stream_source.embedded import NatsServer, free_port
from tests.support.nats.buckets import api, create_bucket
from tests.support.nats.cluster import ACCOUNTS, Cluster
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import with_user
from tests.support.oracle.expiry import MARKER_TTL
from tests.support.proxy.fault_proxy import Proxy, Verdict
from tests.support.wait import wait_until

BUCKETS = {"full": -1, "current": 1}
"""History of each bucket. ``full`` is read with all revisions and never supersedes one, so every
missing revision is an anomaly. With 1, an entry that expires does not reveal an older one."""

STREAMS = {"full": "KV_full", "current": "KV_current", "stream": "EVENTS"}
"""The stream of each source."""

PREFIXES = {"full": "$KV.full.", "current": "$KV.current.", "stream": "events."}
"""Subject prefix of the keys of each source."""

COPY, COPY_PREFIX = "COPY", "copy."
"""The stream that the query ``copy`` writes, and its subject prefix."""

_DUPLICATE_WINDOW = 3600 * 10**9  # nanoseconds; longer than a driver is away

UNAVAILABLE = (RuntimeError, OSError, AssertionError, nats.errors.Error)
"""Errors of a request to a server that is unavailable."""

LEAK_TIMEOUT = 90.0
"""Seconds for readers to end, including the minute in which a server keeps the consumer of a killed
reader."""

_RECOVERY_TIMEOUT = 120.0  # seconds


class Servers(Cluster):
    """A cluster, or one server, with two buckets and two streams; a context manager."""

    def __init__(self, size: int, directory: Path, config: str = "") -> None:
        super().__init__(size)
        self._directory = directory
        self._file = directory / "server.conf"
        self._file.write_text(ACCOUNTS + config)
        self.proxies: dict[str, Proxy] = {}
        self.down: set[str] = set()  # killed or paused, or about to be

    def __enter__(self) -> Servers:
        if self._size > 1:
            super().__enter__()
        else:
            port, self._monitors["n1"] = free_port(), free_port()
            self._serve("n1", port, ["-m", str(self._monitors["n1"])])
        with contextlib.ExitStack() as stack:
            stack.callback(self.__exit__)
            self._create()
            stack.pop_all()
        return self

    def _serve(self, name: str, port: int, args: list[str]) -> None:
        proxy = self._stack.enter_context(Proxy(port, keep=0))
        self.proxies[name] = proxy
        if self._size > 1:
            args = [*args, "--client_advertise", f"127.0.0.1:{proxy.port}"]
        self._start(name, port=port, args=args, store=self._directory / name, config=self._file)

    def _create(self) -> None:
        replicas = {"num_replicas": self._size}
        ttl = {"allow_msg_ttl": True, "subject_delete_marker_ttl": MARKER_TTL * 10**9}
        for bucket, history in BUCKETS.items():
            create_bucket(self.url, bucket, history, **replicas, **ttl)
        create_stream(self.url, "EVENTS", "events.>", **replicas)
        window = {"duplicate_window": _DUPLICATE_WINDOW}
        create_stream(self.url, COPY, f"{COPY_PREFIX}>", **replicas, **window)

    @property
    def proxy_urls(self) -> list[str]:
        return [proxy.url for proxy in self.proxies.values()]

    def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send an API request to a running server; raises :data:`UNAVAILABLE` if it fails."""
        return api(self._running_server().url, subject, request, timeout=5)

    def system_call(self, subject: str) -> dict[str, Any]:
        """Send an API request without a body as the system account."""
        return api(with_user(self._running_server().url, "sys"), subject, {}, timeout=5)

    def set_verdict(self, verdict: Verdict | None) -> None:
        """Apply ``verdict`` to all frames from servers to clients; None forwards all of them."""
        for proxy in self.proxies.values():
            proxy.verdict = verdict or (lambda frame: True)

    def start(self, name: str) -> None:
        self.servers[name].start()
        self.down.discard(name)

    def consumers(self) -> list[str]:
        """All consumers, as ``stream consumer``."""
        return [
            f"{stream} {name}"
            for stream in STREAMS.values()
            for name in self.call(f"CONSUMER.NAMES.{stream}").get("consumers") or []
        ]

    def connections(self) -> list[str]:
        """All client connections that the servers and the proxies report."""
        found = [f"proxy of {name}" for name, proxy in self.proxies.items() if proxy.served]
        for name, server in self.servers.items():
            clients = self.monitored(server, "connz").get("connections") or []
            found += [f"{name} {client.get('name') or client['cid']}" for client in clients]
        return found

    def wait_healthy(self) -> None:
        """Wait until all servers run and every replica of every stream is current."""
        for stream in STREAMS.values():
            wait_until(partial(self._healthy, stream), f"{stream} healthy", _RECOVERY_TIMEOUT)

    def _healthy(self, stream: str) -> bool:
        try:
            report = self.call(f"STREAM.INFO.{stream}").get("cluster") or {}
            for server in self.servers.values():
                self.monitored(server, "healthz")  # 503 until it has recovered all streams
        except UNAVAILABLE:
            return False
        replicas = report.get("replicas") or []
        return len(replicas) == self._size - 1 and all(
            replica.get("current") and not replica.get("lag") for replica in replicas
        )

    def _running_server(self) -> NatsServer:
        running = [server for name, server in self.servers.items() if name not in self.down]
        if not running:
            raise RuntimeError("no server runs")
        # In rotation, so that requests also reach other servers if one does not respond.
        return running[int(time.monotonic() * 2) % len(running)]


def find_leaks(servers: Servers, timeout: float = LEAK_TIMEOUT) -> list[str]:
    """Consumers and connections of the queries that are still on the servers after ``timeout``."""
    end = time.monotonic() + timeout
    while True:
        try:
            # Connections first: the request for consumers needs a connection.
            leaks = [f"connection: {connection}" for connection in servers.connections()]
            leaks += [f"consumer: {consumer}" for consumer in servers.consumers()]
        except UNAVAILABLE as error:
            leaks = [f"could not list consumers and connections: {error!r}"]
        if not leaks or time.monotonic() > end:
            return leaks
        time.sleep(0.5)
