"""A stream of another domain, read through a leaf node: its connection stalls, or a side ends.

The reader is connected to the leaf node and names the hub's domain. All requests and responses
cross the line between the two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.nats.topology import HubAndLeaf, hub_and_leaf
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream

COUNT = 1500


@pytest.fixture(scope="module")
def both() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


def hold(both: HubAndLeaf) -> None:
    """For longer than three heartbeats are waited for."""
    both.line.hold()
    threading.Timer(2.5, both.line.release).start()


def kill_hub(both: HubAndLeaf) -> None:
    both.hub.kill()
    both.hub.start()


def restart_leaf(both: HubAndLeaf) -> None:
    both.leaf.restart()


FAULTS: dict[str, Callable[[HubAndLeaf], None]] = {
    "line held": hold,
    "hub killed": kill_hub,
    "leaf restarted": restart_leaf,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_leaf_node_lost_while_split_is_read(both: HubAndLeaf, kind: str, fault: str) -> None:
    both.wait_joined()
    recorded = RecordedStream(kind, both.hub.url).create()
    recorded.write(COUNT, size=1000)
    when = When(COUNT // 2, lambda: FAULTS[fault](both))
    with Proxy(both.leaf.port, when, keep=0) as proxy:
        options = {"domain": "hub", "requestTimeout": "2", "connectTimeout": "30"}
        with recorded.query(proxy.url, **options) as query:
            query.until(COUNT)
            assert when.consumer
            recorded.write(100)
            query.until(recorded.last)
    recorded.check(query.rows)
