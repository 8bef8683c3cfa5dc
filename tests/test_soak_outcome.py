"""What the soak makes of a run: what the oracle does not see, and when a run proves nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from buckets import api, connected
from loops import run
from soak.collect import Events
from soak.findings import Loss
from soak.outcome import Outcome, Settings, growth, summary
from soak.processes import Memory
from soak.remains import left_behind
from soak.schedule import POWER_LOSS, Fault
from soak.servers import Servers
from soak.stall import Stall
from soak.worst import Done
from topology import wait_until

QUERIES = ("full", "current", "stream")
POWER = Fault(10.0, "servers", POWER_LOSS, "n1", 5.0)


def outcome(*, loss: Loss | None = None, lost: dict[str, float] | None = None) -> Outcome:
    """Of a run in which queries stopped for data loss at the times in ``lost``."""
    settings = Settings(seed=1, minutes=1)
    found = Outcome(settings, Path(), loss=loss)
    found.events = Events(lost=dict.fromkeys(lost or {}, "gone"), lost_at=dict(lost or {}))
    return found


# The power loss


LOSS = Loss(100.0, dict.fromkeys(QUERIES, 5))


def test_a_run_without_trouble_has_no_anomaly() -> None:
    assert not outcome().anomalies
    assert not outcome(loss=LOSS, lost=dict.fromkeys(QUERIES, 101.0)).anomalies


def test_a_query_that_goes_on_after_the_power_loss_is_seen() -> None:
    found = outcome(loss=LOSS, lost={"full": 101.0, "stream": 101.0})
    assert found.anomalies == {"loss unnoticed": 1}
    assert "current" in found.examples["loss unnoticed"][0]


def test_a_data_loss_without_any_is_seen() -> None:
    assert outcome(lost={"full": 50.0}).anomalies == {"false loss": 1}
    early = {"full": 50.0, "current": 101.0, "stream": 101.0}
    assert outcome(loss=LOSS, lost=early).anomalies == {"false loss": 1}
    by_itself = outcome(lost={"full": 50.0})
    by_itself.findings.add("server lost", "it")
    assert by_itself.anomalies == {"server lost": 1}


@pytest.mark.parametrize("done", [[], [Done(POWER, 10.0, False, "nothing to lose")]])
def test_a_power_loss_that_was_not_done_is_a_trouble(done: list[Done]) -> None:
    found = outcome()
    found.planned, found.done = [POWER], done
    assert found.anomalies == {"harness": 1}
    assert "no power loss" in summary(found)["examples"]["harness"][0]


def test_a_power_loss_that_was_done_is_none() -> None:
    found = outcome(loss=LOSS, lost=dict.fromkeys(QUERIES, 101.0))
    found.planned, found.done = [POWER], [Done(POWER, 10.0, True, "all queries stopped")]
    assert not found.anomalies


# Memory


def life(worker: list[float], driver: list[float]) -> list[tuple[int, float, Memory]]:
    pairs = zip(worker, driver, strict=True)
    return [(1, 5.0 * i, Memory(mine, 900, one, 3)) for i, (one, mine) in enumerate(pairs)]


def test_a_process_that_grows_is_seen() -> None:
    flat, warm, growing = [100.0] * 100, [60.0, 90.0, *[100.0] * 98], [*map(float, range(100, 200))]
    assert not growth(life(warm, flat))
    assert not growth(life(growing[:30], growing[:30]))  # not long enough to tell
    assert ["worker" in one for one in growth(life(growing, flat))] == [True]
    assert ["worker" in one for one in growth(life(flat, growing))] == [False]
    found = outcome()
    found.memory = life(growing, growing)
    assert found.anomalies == {"memory grew": 2}


# Stalled queries


def watched(limit: float = 60) -> Stall:
    stall = Stall(QUERIES, limit)
    stall.look(0, dict.fromkeys(QUERIES, 3), dict.fromkeys(QUERIES, 10), ready=True)
    return stall


def test_a_query_that_reads_nothing_is_seen_once() -> None:
    stall = watched()
    for i in range(1, 20):
        batches = {"full": 3, "current": 3 + i, "stream": 3 + i}
        stall.look(5.0 * i, batches, dict.fromkeys(QUERIES, 10 + i), ready=True)
    assert [text.split(":")[0] for text in stall.found] == ["full"]
    found = outcome()
    found.stalled = stall.found
    assert found.anomalies == {"stalled": 1}


@pytest.mark.parametrize(
    ("ready", "acked", "stopped"), [(False, 1, ()), (True, 0, ()), (True, 1, QUERIES)]
)
def test_time_does_not_count_in_which_nothing_can_be_read(
    ready: bool, acked: int, stopped: tuple[str, ...]
) -> None:
    stall = watched()
    for i in range(1, 100):
        counts = dict.fromkeys(QUERIES, 10 + i * acked)
        stall.look(5.0 * i, dict.fromkeys(QUERIES, 3), counts, ready=ready, stopped=stopped)
    assert not stall.found


def test_a_micro_batch_begins_the_time_anew_and_a_busy_watcher_counts_little() -> None:
    stall = watched()
    for i in range(1, 100):
        counts = dict.fromkeys(QUERIES, 10 + i)
        stall.look(5.0 * i, dict.fromkeys(QUERIES, i // 10), counts, ready=True)
    stall.look(5000.0, dict.fromkeys(QUERIES, 9), dict.fromkeys(QUERIES, 1000), ready=True)
    assert not stall.found


# What is left on the servers


def test_what_is_left_on_the_servers_is_named(tmp_path: Path) -> None:
    with Servers(1, tmp_path) as servers:
        url = servers.url

        def wait_for(*left: str) -> None:
            # What asked just now is on its way out for a moment.
            wait_until(f"{left} left", lambda: left_behind(servers, 0) == [*left])

        config = {"name": "kept", "inactive_threshold": 600 * 10**9, "ack_policy": "none"}
        request = {"stream_name": "KV_full", "config": config}
        wait_for()
        api(url, "CONSUMER.CREATE.KV_full.kept", request)
        wait_for("consumer: KV_full kept")
        api(url, "CONSUMER.DELETE.KV_full.kept")
        wait_for()

        async def connect(address: str, *left: str) -> None:
            async with connected(address, name="forgotten"):
                await asyncio.to_thread(wait_for, *left)

        run(connect(url, "connection: n1 forgotten"))
        run(connect(servers.proxied[0], "connection: proxy of n1", "connection: n1 forgotten"))
        assert not left_behind(servers, 60)
        servers.servers["n1"].kill()
        (text,) = left_behind(servers, 0)
        assert "not counted" in text
