"""``nats_stream`` without Spark: messages that aged out, and streams that were re-created."""

from __future__ import annotations

import logging

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.integration.spark.reading.streams import fill, read
from tests.support.nats.buckets import api
from tests.support.nats.streams import create_stream, stream_state
from tests.support.query_driver.driver import new_query, sequences


@pytest.mark.parametrize("policy", ["new", "all"])
def test_messages_aged_out_before_first_row(
    shared_server: NatsServer, name: str, policy: str
) -> None:
    """What came after the query's beginning is not history, though nothing was read yet."""
    url = shared_server.url
    create_stream(url, name, max_msgs=4)
    fill(url, name, 3 if policy == "new" else 0)
    with new_query(url, stream=name, deliverPolicy=policy) as query:
        offset = query.offset
    fill(url, name, 10)
    with (
        pytest.raises(DataLossError, match=f"{offset['stream_seq'] + 1} to"),
        new_query(url, stream=name, offset=offset, deliverPolicy=policy) as query,
    ):
        query.read_new()


def test_history_removed_before_it_is_read(shared_server: NatsServer, name: str) -> None:
    """A stream at its limit removes its first messages while a query starts."""
    url = shared_server.url
    create_stream(url, name, max_msgs=10)
    fill(url, name, 20)
    with new_query(url, stream=name) as query:
        assert query.offset["initial_through"] == 20
        fill(url, name, 5)
        assert sequences(query.read_new()) == list(range(16, 26))


def test_start_aged_out(shared_server: NatsServer, name: str) -> None:
    """Who names a sequence wants it."""
    url = shared_server.url
    create_stream(url, name, max_msgs=4)
    fill(url, name, 10)
    with pytest.raises(DataLossError, match="sequences 3 to 6 aged out"):
        read(url, name, startSequence=3)
    assert sequences(read(url, name, startSequence=3, failOnDataLoss=False)) == [7, 8, 9, 10]


@pytest.mark.parametrize("kept", [-1, 2])
def test_data_loss_after_last_per_subject(shared_server: NatsServer, name: str, kept: int) -> None:
    """Every later message counts, unless the stream itself drops what is superseded."""
    url = shared_server.url
    create_stream(url, name, max_msgs_per_subject=kept)
    fill(url, name, 6, subjects=2)
    with new_query(url, stream=name, deliverPolicy="last_per_subject") as query:
        assert sequences(query.read_new()) == [5, 6]
        assert query.splits[0].range.last_per_subject
        fill(url, name, 8, subjects=2)
        api(url, f"STREAM.PURGE.{name}", {"seq": 11})
        if kept == -1:
            with pytest.raises(DataLossError, match="7 to 10 aged out"):
                query.read_new()
        else:
            assert sequences(query.read_new()) == [11, 12, 13, 14]


def test_filter_covering_stream_detects_loss(
    shared_server: NatsServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a narrower one, the stream does not show whether it was a loss."""
    url = shared_server.url
    create_stream(url, name)
    for subject in (f"{name}.>", f"{name}.1"):
        fill(url, name, 6)
        with new_query(url, subject=subject) as query:
            query.read_new()
            fill(url, name, 6)
            api(url, f"STREAM.PURGE.{name}", {"seq": stream_state(url, name)["last_seq"]})
            if subject.endswith(">"):
                with pytest.raises(DataLossError, match="aged out"):
                    query.read_new()
            else:
                with caplog.at_level(logging.WARNING):
                    assert query.read_new() == []
                assert f"whether subject={subject} matched any of them is unknown" in caplog.text


def test_stream_recreated_while_waiting(shared_server: NatsServer, name: str) -> None:
    """A query that waits for a sequence to come does not wait in another stream."""
    url = shared_server.url
    create_stream(url, name)
    with new_query(url, stream=name, startSequence=5) as query:
        assert query.read_new() == []
        fill(url, name, 3)
        assert query.read_new() == []
        api(url, f"STREAM.DELETE.{name}")
        create_stream(url, name)
        fill(url, name, 7)
        with pytest.raises(DataLossError, match="deleted and re-created"):
            query.read_new()
