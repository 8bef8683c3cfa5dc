"""A cluster with a system account that reports the state of each replica.

``STREAM.INFO`` reports the state of the stream leader. :class:`WatchedCluster` reads the monitoring
endpoints of each server instead, so a test can compare a follower with the leader. Its system
account lets a test move the meta leader.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nats.errors

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import api
from tests.support.nats.cluster import SYSTEM_ACCOUNT, Cluster
from tests.support.nats.topology import with_user
from tests.support.wait import wait_until

_RESTRICTED_USER = """{user: restricted, password: restricted, permissions: {
    publish: {deny: "$JS.API.CONSUMER.DELETE.>"}
}}"""
_APP_USER = "{user: app, password: app}"
_ACCOUNTS = SYSTEM_ACCOUNT.replace(_APP_USER, f"{_APP_USER}, {_RESTRICTED_USER}")


class WatchedCluster(Cluster):
    """A cluster with a system account, whose replicas can be inspected one by one.

    The user ``restricted`` must not delete consumers.

    Args:
        extra_config: lines to append to the configuration of a server, by server name.

    Attributes:
        configs: the configuration file of each server, by server name.
    """

    def __init__(
        self, *args: Any, extra_config: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._extra_config = dict(extra_config or {})
        self.configs: dict[str, Path] = {}

    def _serve(self, name: str, port: int, args: list[str]) -> None:
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        config = directory / "server.conf"
        config.write_text(_ACCOUNTS + self._extra_config.get(name, ""))
        self.configs[name] = config
        super()._serve(name, port, [*args, "-c", str(config)])

    def name_of(self, server: NatsServer) -> str:
        return next(name for name, member in self.servers.items() if member is server)

    def last_seq_at(self, server: NatsServer, stream: str) -> int:
        """Return the last sequence of ``stream`` in the replica of ``server``."""
        return int(self.state_at(server, stream)["last_seq"])

    def state_at(self, server: NatsServer, stream: str) -> dict[str, Any]:
        """Return the state of the replica of ``server``; empty when it has no replica."""
        accounts = self._monitored(server, "jsz?accounts=true&streams=true")["account_details"]
        details = (detail for account in accounts for detail in account.get("stream_detail") or [])
        return next((dict(detail["state"]) for detail in details if detail["name"] == stream), {})

    def answers_direct_gets(self, server: NatsServer, stream: str) -> bool:
        """Return whether the replica of ``server`` responds to Direct Gets.

        A follower subscribes to the Direct Get subject some seconds after the leader.
        """
        subject = f"$JS.API.DIRECT.GET.{stream}"
        report = self._monitored(server, f"subsz?subs=1&acc=APP&test={subject}")
        subscriptions = report.get("subscriptions_list") or []
        return any(subscription["subject"] == subject for subscription in subscriptions)

    def _monitored(self, server: NatsServer, path: str) -> dict[str, Any]:
        port = self._monitors[self.name_of(server)]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as response:
            return dict(json.load(response))

    def step_down_meta(self) -> NatsServer:
        """Make the meta leader step down; return the new meta leader."""
        before = self.name_of(self.meta_leader())
        after: list[str] = []

        def moved() -> bool:
            leader = self._meta_leader()
            if leader == before:
                # The response may be lost, and the server that is asked may report the new leader
                # later than the others.
                with contextlib.suppress(RuntimeError, OSError, nats.errors.Error):
                    api(with_user(self.url, "sys"), "META.LEADER.STEPDOWN", {}, timeout=2)
                return False
            after[:] = [leader]
            return leader in self.servers

        wait_until(moved, "another meta leader")
        return self.servers[after[0]]
