"""Anomalies of a soak that the oracle does not report."""

from __future__ import annotations

import asyncio
import json
import traceback
from pathlib import Path

import pytest

from nats_stream_source import errors
from tests.soak.collect import STALLED, Events, read_events
from tests.soak.fault_injector import POWER_LOSS, Fault, InjectedFault
from tests.soak.run import Outcome, Settings, memory_growth, summary
from tests.soak.servers import Servers, find_leaks
from tests.soak.supervisor import Memory
from tests.support.event_loop import run
from tests.support.nats.buckets import api, connected
from tests.support.oracle.evidence import Rollback
from tests.support.oracle.query_failures import DATA_LOSS, UNEXPECTED, WORKER_START, kind_of
from tests.support.wait import wait_until

QUERIES = ("full", "current", "stream")


def outcome(*, rollback: Rollback | None = None, lost: dict[str, float] | None = None) -> Outcome:
    """The outcome of a run whose queries stopped for data loss at the times in ``lost``."""
    settings = Settings(seed=1, minutes=1)
    found = Outcome(settings, Path(), rollback=rollback)
    found.events = Events(lost=dict.fromkeys(lost or {}, "gone"), lost_at=dict(lost or {}))
    return found


# The power loss


ROLLBACK = Rollback(100.0, dict.fromkeys(QUERIES, 5))


def test_run_without_errors_has_no_anomaly() -> None:
    assert not outcome().anomalies
    assert not outcome(rollback=ROLLBACK, lost=dict.fromkeys(QUERIES, 101.0)).anomalies


def test_query_that_continues_after_power_loss_is_found() -> None:
    found = outcome(rollback=ROLLBACK, lost={"full": 101.0, "stream": 101.0})
    assert found.anomalies == {"loss unnoticed": 1}
    assert "current" in found.examples["loss unnoticed"][0]


def test_false_data_loss_is_found() -> None:
    assert outcome(lost={"full": 50.0}).anomalies == {"false loss": 1}
    early = {"full": 50.0, "current": 101.0, "stream": 101.0}
    assert outcome(rollback=ROLLBACK, lost=early).anomalies == {"false loss": 1}


def test_power_loss_that_was_not_injected_is_found() -> None:
    power_loss = Fault(10.0, "servers", POWER_LOSS, "n1", 5.0)
    found = outcome()
    found.planned = [power_loss]
    found.injected = [InjectedFault(power_loss, 10.0, False, "nothing to lose")]
    assert found.anomalies == {"harness": 1}
    assert "no power loss" in summary(found)["examples"]["harness"][0]


# Failures of queries


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (errors.DataLossError("gone"), DATA_LOSS),
        (errors.ApiError("X: no leader (code 503, err_code 10008)"), "ApiError"),
        (ValueError("DataLossError: ConnectError: x"), UNEXPECTED),
    ],
)
def test_last_exception_determines_kind(last: Exception, kind: str) -> None:
    try:
        try:
            raise errors.ConnectError("no server of nats://127.0.0.1:1")
        except errors.ConnectError:
            raise last  # noqa: B904  (the test requires an implicit exception context)
    except Exception:
        text = traceback.format_exc()
    assert "ConnectError" in text
    query = "\n=== Streaming Query ===\nTraceback (most recent call last):\nKeyError: 1\n"
    assert kind_of(text + query) == kind


def test_worker_start_timeout_of_spark() -> None:
    text = (
        "Job aborted due to stage failure: Task 0 in stage 5.0 failed 3 times, most recent: "
        "org.apache.spark.SparkException: Python worker failed to connect back.\n\tat org.apache"
    )
    assert kind_of(text) == WORKER_START


# Memory


def life(worker: list[float], driver: list[float]) -> list[tuple[int, float, Memory]]:
    pairs = zip(worker, driver, strict=True)
    return [(1, 5.0 * i, Memory(mine, 900, one)) for i, (one, mine) in enumerate(pairs)]


def test_growing_process_is_found() -> None:
    flat, warm, growing = [100.0] * 100, [60.0, 90.0, *[100.0] * 98], [*map(float, range(100, 200))]
    assert not memory_growth(life(warm, flat))
    assert not memory_growth(life(growing[:30], growing[:30]))  # not long enough to tell
    assert ["worker" in one for one in memory_growth(life(growing, flat))] == [True]
    assert ["worker" in one for one in memory_growth(life(flat, growing))] == [False]
    found = outcome()
    found.memory = life(growing, growing)
    assert found.anomalies == {"memory grew": 2}


# Stalled queries


def test_stalled_query_is_found_once(tmp_path: Path) -> None:
    lines = [{"event": "started", "at": 0.0, "serial": 1}]
    for at in range(5, 2 * int(STALLED), 5):
        for query in QUERIES:
            if query != "full" or at < 20:
                lines.append({"event": "batch", "at": at, "query": query, "rows": 1, "end": at})
    lines.append({"event": "started", "at": 2 * STALLED, "serial": 2})
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = outcome()
    found.events = read_events(file)
    assert found.events.stalls == ["full: no micro-batch after 3"]
    assert found.anomalies == {"stalled": 1}


# Leaks


def test_leaks_are_named(tmp_path: Path) -> None:
    with Servers(1, tmp_path) as servers:
        url = servers.url

        def wait_for(*left: str) -> None:
            # The connection of the request itself is closed shortly after.
            wait_until(lambda: find_leaks(servers, 0) == [*left], f"{left} left")

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
        run(connect(servers.proxy_urls[0], "connection: proxy of n1", "connection: n1 forgotten"))
        assert not find_leaks(servers, 60)
        servers.servers["n1"].kill()
        (text,) = find_leaks(servers, 0)
        assert "could not list" in text
