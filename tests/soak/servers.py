"""The servers of a soak: three in a cluster, or one; each behind a proxy that clients are led to.

Spark gets the proxies' addresses, and the servers advertise these to all clients, so that nobody
finds a way around. The generator and this process, which watches and heals, begin with the servers
themselves; harm is done to deliveries only, which neither of them gets.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors
from buckets import api, bucket_config
from cluster import SYSTEM_ACCOUNT, Cluster
from faults.proxy import Proxy, Verdict
from topology import wait_until, with_user

from nats_stream_source.embedded import NatsServer, free_port

BUCKETS = {"full": -1, "current": 1}
"""Each bucket's history. Of ``full``, read with all of it, nothing is ever superseded: else none
that is missing would prove anything. With 1, an entry that expires uncovers no older one."""

STREAMS = {"full": "KV_full", "current": "KV_current", "stream": "EVENTS"}
"""By place."""

PREFIXES = {"full": "$KV.full.", "current": "$KV.current.", "stream": "events."}
"""What stands before a key in each place."""

MARKER_TTL = 45
"""Seconds that a server's own marker stays, and therefore the shortest TTL."""

NO_ANSWER = (RuntimeError, OSError, AssertionError, nats.errors.Error)
"""What asking a server ends with while it is away."""

_RECOVERY = 120.0  # seconds; only a run that fails takes so long


class Servers(Cluster):
    """A cluster, or one server, with buckets and a stream; a context manager.

    Args:
        size: 3 or 1.
        directory: for the stores.
        config: lines of a server's configuration.
    """

    def __init__(self, size: int, directory: Path, config: str = "") -> None:
        super().__init__(size)
        self._directory = directory
        self._file = directory / "server.conf"
        self._file.write_text(SYSTEM_ACCOUNT + config)
        self.proxies: dict[str, Proxy] = {}
        self.down: set[str] = set()  # killed, or paused, or about to be

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
        server = NatsServer(port=port, args=args, store=self._directory / name, config=self._file)
        self._stack.callback(server.stop)
        self._stack.callback(server.kill)
        self.servers[name] = server.start()

    def _create(self) -> None:
        replicas = {"num_replicas": self._size}
        ttl = {"allow_msg_ttl": True, "subject_delete_marker_ttl": MARKER_TTL * 10**9}
        for bucket, history in BUCKETS.items():
            config = bucket_config(bucket, history, **replicas, **ttl)
            api(self.url, f"STREAM.CREATE.KV_{bucket}", config)
        config = {"name": "EVENTS", "subjects": ["events.>"], **replicas}
        api(self.url, "STREAM.CREATE.EVENTS", config)

    @property
    def addresses(self) -> list[str]:
        """Of the servers themselves."""
        return [server.url for server in self.servers.values()]

    @property
    def proxied(self) -> list[str]:
        """Of the proxies."""
        return [proxy.url for proxy in self.proxies.values()]

    def name_of(self, server: NatsServer) -> str:
        return next(name for name, one in self.servers.items() if one is server)

    def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """One API request to a server that runs; RuntimeError, OSError, … when it fails."""
        return api(self._asked().url, subject, request, timeout=5)

    def system_call(self, subject: str) -> dict[str, Any]:
        """The same as the system account, without a request's body."""
        return api(with_user(self._asked().url, "sys"), subject, {}, timeout=5)

    def harm(self, verdict: Verdict | None) -> None:
        """Let ``verdict`` judge what all servers send to clients; None for no harm."""
        for proxy in self.proxies.values():
            proxy.verdict = verdict or (lambda frame: True)

    def start(self, name: str) -> None:
        """Start a server that was killed or ended."""
        self.servers[name].start()
        self.down.discard(name)

    def consumers(self) -> list[str]:
        """All consumers, with their streams."""
        return [
            f"{stream} {name}"
            for stream in STREAMS.values()
            for name in self.call(f"CONSUMER.NAMES.{stream}").get("consumers") or []
        ]

    def connections(self) -> list[str]:
        """All clients' connections, as the servers and the proxies have them."""
        found = [f"proxy of {name}" for name, proxy in self.proxies.items() if proxy.served]
        for name, port in self._monitors.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/connz", timeout=5) as answer:
                clients = json.load(answer).get("connections") or []
            found += [f"{name} {one.get('name') or one['cid']}" for one in clients]
        return found

    def wait_healthy(self) -> None:
        """Wait until all servers run and every replica of every stream has all that there is."""
        for stream in STREAMS.values():
            wait_until(f"{stream} healthy", partial(self._healthy, stream), _RECOVERY)

    def _healthy(self, stream: str) -> bool:
        report = self._report(stream)
        if self._size == 1:
            return self._answers(stream)
        replicas = report.get("replicas") or []
        return (
            bool(report.get("leader"))
            and len(replicas) == self._size - 1
            and all(one.get("current") and not one.get("lag") for one in replicas)
            and all(self._recovered(port) for port in self._monitors.values())
        )

    def _recovered(self, monitor: int) -> bool:
        """Whether a server says of itself that it has caught up with everything."""
        url = f"http://127.0.0.1:{monitor}/healthz"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:  # 503, or it does not listen yet
            return False

    def _answers(self, stream: str) -> bool:
        try:
            self.call(f"STREAM.INFO.{stream}")
        except Exception:  # not yet, for whatever reason; who waits has a deadline
            return False
        return True

    def _asked(self) -> NatsServer:
        running = [one for name, one in self.servers.items() if name not in self.down]
        if not running:
            raise RuntimeError("no server runs")
        # Not always the same one, so that one that hangs does not hide the others.
        return running[int(time.monotonic() * 2) % len(running)]

    def _meta_leader(self) -> str:
        for name, port in self._monitors.items():
            if name in self.down:
                continue
            with contextlib.suppress(OSError, ValueError):
                url = f"http://127.0.0.1:{port}/jsz"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    return str((json.load(answer).get("meta_cluster") or {}).get("leader"))
        return ""
