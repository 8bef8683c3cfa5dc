"""Bad input of ``nats_stream``: one error each, which names what to change."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    JetStreamNotEnabledError,
    NatsSourceError,
    NoMatchingStreamError,
    OffsetError,
    OptionError,
    StreamNotFoundError,
)
from nats_stream_source.options import Mode, stream_options
from nats_stream_source.rows.offsets import ONE_STREAM, Offset, Position
from tests.support.nats.buckets import publish
from tests.support.nats.streams import create_stream
from tests.support.query_driver.driver import OffsetJson, new_query, sequences

SECRET = "hunter2-is-secret"
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


# -- options: found when the source is loaded, before anything connects ---------------------------

REFUSED: dict[str, tuple[dict[str, str | None], type[NatsSourceError], str]] = {
    "no stream": ({"stream": None}, OptionError, "'stream' is missing.*or 'subject'"),
    "no servers": ({"servers": None}, OptionError, "'servers' is missing"),
    "both": ({"subject": "a"}, OptionError, "'stream' and 'subject' contradict"),
    "a bucket's option": ({"bucket": "b"}, OptionError, "unknown option 'bucket'"),
    "keys": ({"keys": "b"}, OptionError, "unknown option 'keys'"),
    "unknown, near": ({"filterSubject": "a"}, OptionError, "did you mean 'filterSubjects'"),
    "policy": ({"deliverPolicy": "first"}, OptionError, "'deliverPolicy'.*one of all, new, last,"),
    "policy without sequence": (
        {"deliverPolicy": "by_start_sequence"},
        OptionError,
        "'startSequence' is missing: deliverPolicy=by_start_sequence requires it",
    ),
    "policy without time": (
        {"deliverPolicy": "by_start_time"},
        OptionError,
        "'startTime' is missing",
    ),
    "policy with another's sequence": (
        {"deliverPolicy": "new", "startSequence": "4"},
        OptionError,
        "'deliverPolicy' and 'startSequence' contradict",
    ),
    "policy by time with a sequence": (
        {"deliverPolicy": "by_start_time", "startSequence": "4"},
        OptionError,
        "'deliverPolicy' and 'startSequence' contradict",
    ),
    "two beginnings": (
        {"startSequence": "4", "startTime": "2026-11-21T08:00:00Z"},
        OptionError,
        "'startSequence' and 'startTime' contradict",
    ),
    "sequence 0": ({"startSequence": "0"}, OptionError, "'startSequence'.*smaller than 1"),
    "negative": ({"startSequence": "-1"}, OptionError, "'startSequence'.*smaller than 1"),
    "too large": ({"startSequence": str(2**63)}, OptionError, "larger than a sequence"),
    "no number": ({"startSequence": "1e3"}, OptionError, "'1e3' is not an integer"),
    "no time": ({"startTime": "yesterday"}, OptionError, "'startTime'.*for example"),
    "no zone": ({"startTime": "2026-11-21T08:00:00"}, OptionError, "'startTime'"),
    "no such day": ({"startTime": "2026-02-30T08:00:00Z"}, OptionError, "'startTime'"),
    "an end": ({"endSequence": "9"}, OptionError, "'endSequence' is for spark.read, this is"),
    "an end in time": (
        {"endTime": "2026-11-21T08:00:00Z"},
        OptionError,
        "'endTime' is for spark.read, this is spark.readStream",
    ),
    "headersOnly": ({"headersOnly": "1"}, OptionError, "'headersOnly'.*neither true nor false"),
    "includeHeaders": ({"includeHeaders": "x"}, OptionError, "'includeHeaders'.*neither"),
    "failOnDataLoss": ({"failOnDataLoss": ""}, OptionError, "'failOnDataLoss'.*neither"),
    "minLastSequence": ({"minLastSequence": "0"}, OptionError, "'minLastSequence'.*smaller"),
    "no rows": ({"maxRowsPerTrigger": "0"}, OptionError, "'maxRowsPerTrigger'.*smaller"),
    "no bytes": ({"maxBytesPerTrigger": "-1k"}, OptionError, "'maxBytesPerTrigger'.*smaller"),
    "no tasks": ({"minPartitions": "0"}, OptionError, "'minPartitions'.*smaller"),
    "more tasks than rows": (
        {"minPartitions": "3", "maxRowsPerTrigger": "2"},
        OptionError,
        "'minPartitions' and 'maxRowsPerTrigger' contradict",
    ),
    "a subject for a stream": ({"stream": "orders.new"}, InvalidNameError, "'subject' looks a str"),
    "a stream with a space": ({"stream": "a b"}, InvalidNameError, "not a stream's name"),
    "an empty stream": ({"stream": ""}, OptionError, "'stream'.*empty string"),
    "a stream of white space": ({"stream": " "}, InvalidNameError, "not a stream's name"),
    "an empty filter": ({"filterSubjects": "a,,b"}, OptionError, "empty element"),
    "an empty token": ({"filterSubjects": "a..b"}, InvalidNameError, "'a..b' is not a subject"),
    "a dot at the end": ({"filterSubjects": "a."}, InvalidNameError, "'a.' is not a subject"),
    "half a wildcard": ({"filterSubjects": "a*"}, InvalidNameError, "'a\\*' is not a subject"),
    "a wildcard too early": ({"filterSubjects": "a.>.b"}, InvalidNameError, "is not a subject"),
    "overlapping": (
        {"filterSubjects": "a.*,b,a.1"},
        ConfigurationError,
        "'a.\\*' and 'a.1' overlap.*'filterSubjects'",
    ),
    "a subject and filters": (
        {"stream": None, "subject": "a", "filterSubjects": "b"},
        OptionError,
        "'subject' and 'filterSubjects' contradict",
    ),
    "a password alone": ({"password": SECRET}, OptionError, "'user' and 'password' belong"),
    "a misspelt password": ({"pasword": SECRET}, OptionError, "did you mean 'password'"),
}


@pytest.mark.parametrize(("options", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_options(options: dict[str, str | None], error: type[NatsSourceError], text: str) -> None:
    given = {name: value for name, value in (BASE | options).items() if value is not None}
    with pytest.raises(error) as raised:
        stream_options(given, Mode.STREAMING)
    assert re.search(text, str(raised.value), re.DOTALL), raised.value
    assert SECRET not in str(raised.value)


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


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda json: json.update(v=3), "format is 3, expected 2 or lower; install"),
    "no version": (lambda json: json.pop("v"), "expected an offset of this source"),
    "a text as version": (lambda json: json.update(v="1"), "expected an offset of this source"),
    "empty": (lambda json: json.clear(), "expected an offset of this source"),
    "no stream": (lambda json: json.pop("stream"), "field 'stream' is missing"),
    "no time": (lambda json: json.pop("time"), "field 'time' is missing"),
    "no filter": (lambda json: json.pop("filter"), "field 'filter' is missing"),
    "a text as sequence": (
        lambda json: json.update(stream_seq="5"),
        "stream_seq='5', expected int",
    ),
    "a fraction": (lambda json: json.update(stream_seq=5.0), "stream_seq=5.0, expected int"),
    "a truth": (lambda json: json.update(origin=True), "origin=True, expected int"),
    "a number as time": (lambda json: json.update(time=5), "time=5, expected str"),
    "a text as filter": (lambda json: json.update(filter="a"), "filter='a', expected list"),
    "a beginning behind the end": (
        lambda json: json.update(origin=9),
        "expected 0 <= origin <= stream_seq and epoch >= 0",
    ),
    "negative": (
        lambda json: json.update(stream_seq=-1, origin=-1),
        "expected 0 <= origin <= stream_seq and epoch >= 0",
    ),
    "a negative epoch": (
        lambda json: json.update(epoch=-1),
        "expected 0 <= origin <= stream_seq and epoch >= 0",
    ),
    "null": (lambda json: json.update(created=None), "created=None, expected str"),
    "a filter of numbers": (
        lambda json: json.update(filter=[1]),
        r"filter=\[1\], expected a list of str",
    ),
    "a time that is none": (
        lambda json: json.update(time="soon"),
        "time='soon', expected an RFC 3339 timestamp",
    ),
}


@pytest.mark.parametrize(("edit", "text"), EDITS.values(), ids=EDITS)
def test_offset_edited_by_hand(edit: Callable[[dict[str, Any]], object], text: str) -> None:
    position = Position("2026-11-20T23:55:01Z", 0, 0, 5, "2026-11-20T23:59:12Z", 5, 5)
    json = Offset({"S": position}, ("a",), ONE_STREAM).to_json()
    assert Offset.parse(json).to_json() == json
    edit(json)
    with pytest.raises(OffsetError, match=text):
        Offset.parse(json)


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
