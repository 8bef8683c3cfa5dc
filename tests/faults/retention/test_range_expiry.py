"""Messages that expire while a range is read: behind the reader no loss, before it one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.options import stream_options
from nats_stream_source.rows.base import Split
from nats_stream_source.rows.formats import StreamFormat
from nats_stream_source.spark.reading.split_reader import read_splits
from nats_stream_source.spark.runner import close_cached_runners
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream, stream_state
from tests.support.query_driver.driver import new_query

MANY = 12_000  # more than one batch of rows
# Who names a sequence wants all from there on; else history goes as far back as it does.
FROM_THE_FIRST = {"startSequence": "1"}


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    yield
    close_cached_runners()


def make_stream(url: str, name: str, messages: int, **config: Any) -> None:
    create_stream(url, name, **config)
    buckets.publish(url, [(f"{name}.{n % 7}", b"%d" % n, None) for n in range(messages)])


def planned(url: str, name: str, **options: str) -> tuple[dict[str, str], Split]:
    """The one split of all that the stream has, and the options of its query."""
    with new_query(url, stream=name, cores=1, **options) as query:
        assert query.plan()
        (plan,) = query.splits
    return {"servers": url, "stream": name, **options}, plan


def sequences(given: dict[str, str], plan: Split) -> list[int]:
    batches = read_splits((plan,), StreamFormat(stream_options(given)))
    return [seq for batch in batches for seq in batch["sequence"].to_pylist()]


def test_expiry_behind_reader_is_not_loss(shared_server: NatsServer) -> None:
    url = shared_server.url
    make_stream(url, "BEHIND", MANY, max_msgs=MANY)
    given, plan = planned(url, "BEHIND")
    assert (plan.range.start, plan.range.end, plan.required_from) == (0, MANY, 1)
    batches = read_splits((plan,), StreamFormat(stream_options(given)))
    found = next(batches)["sequence"].to_pylist()
    buckets.publish(url, [("BEHIND.x", b"", None)] * 3000)
    first_seq = stream_state(url, "BEHIND")["first_seq"]
    assert 1 < first_seq <= found[-1]
    for batch in batches:
        found += batch["sequence"].to_pylist()
    assert found == list(range(1, MANY + 1))


@pytest.mark.parametrize("gone", [1, 10])
@pytest.mark.parametrize("span", [20, MANY], ids=["small", "large"])
def test_expiry_before_read_is_loss(shared_server: NatsServer, span: int, gone: int) -> None:
    url, name = shared_server.url, f"BEFORE{span}-{gone}"
    make_stream(url, name, span)
    given, plan = planned(url, name, **FROM_THE_FIRST)
    buckets.api(url, f"STREAM.PURGE.{name}", {"seq": gone + 1})
    told = f"sequences 1 to {gone} aged out"
    with pytest.raises(DataLossError, match=told):
        sequences(given, plan)
    given["failOnDataLoss"] = "false"
    assert sequences(given, plan) == list(range(gone + 1, span + 1))


def test_expiry_beyond_range_is_not_counted(shared_server: NatsServer) -> None:
    url = shared_server.url
    make_stream(url, "BEYOND", 40)
    given, plan = planned(url, "BEYOND", **FROM_THE_FIRST)
    buckets.api(url, "STREAM.PURGE.BEYOND", {"seq": 31})
    plan = replace(plan, range=replace(plan.range, end=20))
    with pytest.raises(
        DataLossError,
        match=r"first sequence is 31, expected 1 or lower \(sequences 1 to 20 aged out",
    ):
        sequences(given, plan)


@pytest.mark.parametrize("span", [20, MANY], ids=["small", "large"])
def test_history_reaches_back_as_far_as_it_does(shared_server: NatsServer, span: int) -> None:
    """A query from the first message accepts expiry before its first row."""
    url, name = shared_server.url, f"HISTORY{span}"
    make_stream(url, name, span)
    given, plan = planned(url, name)
    assert plan.expiry_allowed_through == span
    buckets.api(url, f"STREAM.PURGE.{name}", {"seq": 11})
    assert sequences(given, plan) == list(range(11, span + 1))


def test_messages_after_hole_are_not_counted(shared_server: NatsServer) -> None:
    """A deleted message, and then retention that passes it behind the reader."""
    url, name = shared_server.url, "HOLE"
    make_stream(url, name, MANY, max_msgs=MANY)
    buckets.api(url, f"STREAM.MSG.DELETE.{name}", {"seq": 100})
    given, plan = planned(url, name, failOnDataLoss="true")
    batches = read_splits((plan,), StreamFormat(stream_options(given)))
    found = next(batches)["sequence"].to_pylist()
    buckets.publish(url, [(f"{name}.x", b"", None)] * 3000)
    assert 100 < stream_state(url, name)["first_seq"] < found[-1]
    with pytest.raises(DataLossError, match="sequences 100 to 100 aged out"):
        found.extend(seq for batch in batches for seq in batch["sequence"].to_pylist())
    assert found == [*range(1, 100), *range(101, MANY + 1)]
