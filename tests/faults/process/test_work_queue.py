"""A work queue is copied to the stream that docs/streams.md shows, and a query reads the copy.

Servers and drivers are killed (-9) while messages are published, copied and read. Each message is
in the rows of the query once, and the queue is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.process.crash_point_driver import stopping_driver, stored_rows
from tests.support.nats.buckets import api, publish
from tests.support.nats.cluster import Cluster
from tests.support.nats.streams import create_stream, stream_state
from tests.support.paths import ROOT
from tests.support.spark.processes import kill_group
from tests.support.wait import wait_until

PAGE = (ROOT / "docs/streams.md").read_text()
(COPY,) = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
COUNT, CHUNK = 8000, 1000
_DEADLINE = 300.0  # seconds; only a failing test takes that long
_AWAY = (RuntimeError, OSError, asyncio.TimeoutError, nats.errors.Error)


@dataclass
class Place:
    """One server or a cluster, with the queue and its copy."""

    servers: list[NatsServer]
    cluster: Cluster | None = None

    @property
    def url(self) -> str:
        return self.servers[0].url

    @property
    def urls(self) -> str:
        return ",".join(server.url for server in self.servers)

    def create(self) -> None:
        replicas = {"num_replicas": len(self.servers)}
        create_stream(self.url, "JOBS", "jobs.>", retention="workqueue", **replicas)
        api(self.url, f"STREAM.CREATE.{COPY['name']}", {**COPY, **replicas})

    def leader(self) -> NatsServer:
        """The server that has the copy's leader, which also reads the queue."""
        return self.cluster.leader_of(COPY["name"]) if self.cluster else self.servers[0]

    def state(self, stream: str) -> dict[str, Any]:
        """The state of a stream; zeros while no server responds."""
        for server in self.servers:
            with contextlib.suppress(*_AWAY):
                return stream_state(server.url, stream)
        return {"messages": 0, "last_seq": 0}

    def publish(self, first: int, count: int) -> None:
        """Publish numbered messages; a repetition has the same message ids."""
        messages = [
            (f"jobs.eu.{i % 3}", b"%d" % i, {"Nats-Msg-Id": str(i)})
            for i in range(first, first + count)
        ]

        def sent() -> bool:
            for server in self.servers:
                with contextlib.suppress(*_AWAY):
                    publish(server.url, messages)
                    return True
            return False

        wait_until(sent, "PubAcks of the messages", deadline=_DEADLINE)


@pytest.fixture(params=["one server", "three replicas"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "one server":
        with NatsServer() as server:
            yield Place([server])
    else:
        with Cluster() as cluster:
            yield Place(list(cluster.servers.values()), cluster)


def wait_for_rows(process: subprocess.Popen[bytes], directory: Path, count: int) -> None:
    """Wait until the sink has so many rows; the query must not end."""

    def alive() -> None:
        assert process.poll() is None, "the query ended"

    wait_until(
        lambda: len(stored_rows(directory)) >= count, f"{count} rows", _DEADLINE, alive=alive
    )
    alive()


@pytest.mark.faults
def test_query_has_each_message_of_work_queue_once(place: Place, tmp_path: Path) -> None:
    place.create()
    request = tmp_path / "request.json"
    query = {
        "format": "nats_stream",
        "options": {"stream": COPY["name"], "maxRowsPerTrigger": 700},
        "directory": str(tmp_path),
        "streaming": True,
        "point": "",
        "batch": -1,
    }
    asked = {"servers": place.urls, "queries": [query]}
    killed_servers = killed_drivers = 0
    for first in range(0, COUNT, 4 * CHUNK):
        before = len(stored_rows(tmp_path))
        with stopping_driver(request, **asked) as process:
            for chunk in range(first, first + 4 * CHUNK, CHUNK):
                place.publish(chunk, CHUNK)
                # A query that starts waits only for connectTimeout, which elections can exceed.
                wait_for_rows(process, tmp_path, before + 1)
                server = place.leader()
                server.kill()
                killed_servers += 1
                server.start()
            # It reads on, unless it has all rows.
            read = len(stored_rows(tmp_path))
            wait_for_rows(process, tmp_path, min(read + 1, first + 4 * CHUNK))
            kill_group(process)
            killed_drivers += 1
    assert (killed_servers, killed_drivers) == (COUNT // CHUNK, 2)

    with stopping_driver(request, **asked) as process:
        wait_for_rows(process, tmp_path, COUNT)
        wait_until(lambda: place.state("JOBS")["messages"] == 0, "an empty queue", deadline=60)
    assert sorted(int(data) for _, data in stored_rows(tmp_path)) == list(range(COUNT))
    assert place.state(COPY["name"])["messages"] == COUNT


def test_full_copy_keeps_messages_in_work_queue(nats_server: NatsServer) -> None:
    place = Place([nats_server])
    create_stream(place.url, "JOBS", "jobs.>", retention="workqueue")
    name, small = COPY["name"], {**COPY, "max_msgs": 100}
    api(place.url, f"STREAM.CREATE.{name}", small)
    others = [(f"jobs.us.{i}", b"", None) for i in range(10)]
    publish(place.url, others)
    place.publish(0, 300)
    wait_until(lambda: place.state(name)["messages"] == 100, "a full copy")
    assert place.state("JOBS")["messages"] >= 210
    assert (place.state(name)["messages"], place.state(name)["last_seq"]) == (100, 100)

    api(place.url, f"STREAM.UPDATE.{name}", COPY)
    wait_until(lambda: place.state(name)["messages"] == 300, "all messages", deadline=_DEADLINE)
    # Those that the filter of the copy leaves out stay for the workers of the queue.
    wait_until(lambda: place.state("JOBS")["messages"] == len(others), "the rest", deadline=60)
