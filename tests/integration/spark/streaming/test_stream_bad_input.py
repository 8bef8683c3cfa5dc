"""Bad input of ``nats_stream``: one error each, which names what to change."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    JetStreamNotEnabledError,
    NatsSourceError,
    NoMatchingStreamError,
    OffsetError,
    OptionError,
    StreamNotFoundError,
)
from tests.support.nats.buckets import publish
from tests.support.nats.streams import create_stream
from tests.support.query_driver.driver import OffsetJson, new_query, sequences

BASE = {"servers": "nats://127.0.0.1:1", "stream": "ORDERS"}

_names = (f"B{i}" for i in itertools.count())


@pytest.fixture
def name(shared_server: NatsServer) -> str:
    """A stream with five messages, of two subjects."""
    name = next(_names)
    url = shared_server.url
    create_stream(url, name, f"{name}.*")
    publish(url, ((f"{name}.{'ab'[i % 2]}", b"%d" % i, None) for i in range(5)))
    return name


def test_query_fails_in_spark(spark: SparkSession) -> None:
    """The named error is what the user sees, when the source is loaded."""
    with pytest.raises(AnalysisException, match="OptionError: unknown option 'filtersubject'; did"):
        spark.readStream.format("nats_stream").options(**BASE, filterSubject="a").load()


# -- what is on the server ------------------------------------------------------------------------


def test_stream_missing(shared_server: NatsServer) -> None:
    with (
        pytest.raises(StreamNotFoundError, match="stream 'NOWHERE': it does not exist on nats://"),
        new_query(shared_server.url, stream="NOWHERE") as query,
    ):
        query.read_new()
    with (
        pytest.raises(
            NoMatchingStreamError, match=r"of subject 'nowhere\.>': no stream has it, expected one"
        ),
        new_query(shared_server.url, subject="nowhere.>") as query,
    ):
        query.read_new()
    with (
        pytest.raises(JetStreamNotEnabledError, match="options 'domain' or 'apiPrefix'"),
        new_query(shared_server.url, stream="S", domain="no", connectTimeout=1) as query,
    ):
        query.read_new()


def test_start_time_in_future(shared_server: NatsServer, name: str) -> None:
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    when = tomorrow.strftime("%Y-%m-%dT%H:%M:%SZ")
    with (
        pytest.raises(
            OptionError, match=r"'startTime': \S+Z is in the future, expected the server's time"
        ),
        new_query(shared_server.url, stream=name, startTime=when) as query,
    ):
        query.read_new()


@pytest.mark.parametrize("beyond", [6, 9, 2**63 - 1])
def test_start_beyond_end(shared_server: NatsServer, name: str, beyond: int) -> None:
    """It waits, also over a restart, and begins exactly there."""
    with new_query(shared_server.url, stream=name, startSequence=beyond) as query:
        assert query.read_new() == []
        offset = query.offset
    assert offset["stream_seq"] == beyond - 1
    publish(shared_server.url, [(f"{name}.a", b"", None)] * 6)
    with new_query(shared_server.url, stream=name, offset=offset, startSequence=beyond) as query:
        assert sequences(query.read_new()) == [seq for seq in range(6, 12) if seq >= beyond]


# -- checkpoints ----------------------------------------------------------------------------------


def offset_of(url: str, name: str, **options: Any) -> OffsetJson:
    """Where a query stands that has read all."""
    with new_query(url, stream=name, **options) as query:
        query.read_new()
        return query.offset


def refused(url: str, name: str, offset: OffsetJson, text: str, **options: Any) -> None:
    """A query cannot resume from the offset; the right query can, and has every row."""
    with (
        pytest.raises(OffsetError, match=text),
        new_query(url, stream=name, offset=offset, **options) as query,
    ):
        query.read_new()


def test_checkpoints_of_other_queries(shared_server: NatsServer, name: str) -> None:
    url, some = shared_server.url, f"{name}.a"
    offset = offset_of(url, name)
    refused(
        url,
        name,
        {**offset, "stream": "OTHER"},
        f"of stream OTHER, the query reads {name} .*'stream' and 'subject'.*another checkpoint",
    )
    refused(
        url,
        name,
        offset,
        rf"filterSubjects=\(all\), the query has filterSubjects={some}, .*the same option",
        filterSubjects=some,
    )
    refused(url, name, offset_of(url, name, filterSubjects=some), f"filterSubjects={some}, the")
    publish(url, [(some, b"", None)])
    with new_query(url, stream=name, offset=offset) as query:
        assert sequences(query.read_new()) == [6]


def test_looked_up_subject_is_filter(shared_server: NatsServer, name: str) -> None:
    url, some = shared_server.url, f"{name}.a"
    with new_query(url, subject=some) as query:
        assert sequences(query.read_new()) == [1, 3, 5]
        offset = query.offset
    with (
        pytest.raises(OffsetError, match=f"subject={some}, the query has subject={name}.b"),
        new_query(url, offset=offset, subject=f"{name}.b") as query,
    ):
        query.read_new()
    with new_query(url, stream=name, offset=offset, filterSubjects=some) as query:
        assert query.read_new() == []


def test_offsets_that_run_backwards(shared_server: NatsServer, name: str) -> None:
    offset = offset_of(shared_server.url, name)
    with new_query(shared_server.url, stream=name, offset=offset) as query:
        with pytest.raises(OffsetError, match=r"run backwards, from 5 to 3; .* edited by hand"):
            query.plan_logged({**offset, "stream_seq": 3, "time": None})
        assert query.offset == offset


def test_offset_ahead_of_stream(shared_server: NatsServer, name: str) -> None:
    """An edited offset looks like a stream that was rolled back."""
    ahead = {**offset_of(shared_server.url, name), "stream_seq": 9}
    with (
        pytest.raises(NatsSourceError, match="was rolled back: last sequence is 5,"),
        new_query(shared_server.url, stream=name, offset=ahead) as query,
    ):
        query.read_new()
