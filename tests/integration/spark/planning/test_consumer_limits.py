"""Streams and accounts that allow few consumers: a query needs one for each task that reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.jetstream.ordered import reader as ordered_reader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.rows import base
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import configured_server
from tests.support.query_driver.driver import new_query, read_all, sequences
from tests.support.wait import wait_until

COUNT = 500
ALL = list(range(1, COUNT + 1))

ACCOUNT = """
jetstream: enabled
accounts { A { jetstream { max_consumers: 1 }, users: [{user: a, password: a}] } }
no_auth_user: a
"""


@pytest.fixture(autouse=True)
def consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a range is, it takes a consumer."""
    monkeypatch.setattr(ordered_reader, "MAX_SEQUENCES", 0)


def fill(server: NatsServer, stream: str, **config: Any) -> str:
    create_stream(server.url, stream, **config)
    publish(server.url, ((f"{stream}.{i % 5}", b"%d" % i, None) for i in range(COUNT)))
    return server.url


def take(url: str, stream: str) -> None:
    """Create a consumer of another client."""
    config = {"durable_name": "other", "ack_policy": "explicit"}
    api(url, f"CONSUMER.CREATE.{stream}.other", {"stream_name": stream, "config": config})


@pytest.mark.parametrize(("most", "taken", "parts"), [(1, 0, 1), (3, 0, 3), (9, 0, 4), (3, 1, 2)])
def test_splits_at_most_consumers(
    shared_server: NatsServer, most: int, taken: int, parts: int
) -> None:
    name = f"FEW{most}-{taken}"
    url = fill(shared_server, name, max_consumers=most)
    for _ in range(taken):
        take(url, name)
    with new_query(url, stream=name, minPartitions=4) as query:
        assert sequences(query.read_new()) == ALL
        assert len(query.splits) == parts


@pytest.mark.parametrize("filters", [None, "FILTERED.1, FILTERED.2"])
def test_limit_count_needs_consumers(shared_server: NatsServer, filters: str | None) -> None:
    """Without Direct Get each rank takes one; without a consumer, sequences decide."""
    stream = "COUNTED" if filters is None else "FILTERED"
    url = fill(shared_server, stream, max_consumers=1)
    given = {"maxRowsPerTrigger": 70, "minPartitions": 2, "filterSubjects": filters}
    with new_query(url, stream=stream, **given) as query:
        batches = [batch.records for batch in query.drain()]
    expected = [seq for seq in ALL if filters is None or seq % 5 in (2, 3)]
    assert [row["sequence"] for batch in batches for row in batch] == expected
    assert all(len(batch) <= 70 for batch in batches)


@pytest.fixture
def account() -> Iterator[NatsServer]:
    with configured_server(ACCOUNT) as server:
        yield server


def test_query_waits_for_room_in_account(
    account: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = fill(account, "S")
    take(url, "S")

    def refused() -> bool:
        return any("err_code 10026" in record.getMessage() for record in caplog.records)

    def make_room() -> None:
        wait_until(refused, "a consumer to be refused", deadline=600)
        api(url, "CONSUMER.DELETE.S.other")

    room = threading.Thread(target=make_room)
    room.start()
    try:
        assert sequences(read_all(url, stream="S")) == ALL
    finally:
        room.join()
    assert refused()
    assert not api(url, "CONSUMER.NAMES.S")["consumers"]


def test_account_without_room_fails(account: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the server's number and names the setting."""
    monkeypatch.setattr(base, "RangeRequest", partial(RangeRequest, attempts=2))
    url = fill(account, "S")
    take(url, "S")
    with pytest.raises(ConsumerLimitError, match=r"10026\).*'max_consumers'") as raised:
        read_all(url, stream="S")
    assert raised.value.code == 400
