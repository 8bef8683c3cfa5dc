"""Options that name several buckets or streams."""

from __future__ import annotations

import pytest

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.options import Mode, StreamSet, kv_options, stream_options

SERVER = {"servers": "nats://127.0.0.1:4222"}


def test_list_of_buckets() -> None:
    options = kv_options({**SERVER, "buckets": "ships, cars"})
    assert options.bucket is None
    assert options.buckets == StreamSet("buckets", ("cars", "ships"))
    assert str(options.buckets) == "buckets=cars,ships"
    assert [options.buckets.selects(name) for name in ("cars", "car", "carss")] == [True, 0, 0]


def test_pattern_matches_whole_names() -> None:
    options = stream_options({**SERVER, "streamPattern": "site-[0-9]+", "discoveryInterval": "5"})
    assert options.streams == StreamSet(
        "streamPattern", pattern="site-[0-9]+", discovery_interval=5.0
    )
    names = ("site-1", "site-12", "my-site-1", "site-1-old")
    assert [options.streams.selects(name) for name in names] == [True, True, False, False]


def test_single_bucket_is_not_stream_set() -> None:
    options = kv_options({**SERVER, "bucket": "cars"})
    assert (options.bucket, options.buckets) == ("cars", None)


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "one and a list": ({"bucket": "a", "buckets": "b"}, "'bucket' and 'buckets' contradict"),
    "one and a pattern": ({"bucket": "a", "bucketPattern": "b"}, "'bucket' and 'bucketPattern'"),
    "a list and a pattern": ({"buckets": "a", "bucketPattern": "b"}, "'buckets' and 'bucketPat"),
    "an empty list": ({"buckets": ""}, "'buckets'"),
    "an empty element": ({"buckets": "a,,b"}, "'buckets'.*empty element"),
    "a name twice": ({"buckets": "a,b,a"}, "'a' is named twice"),
    "a name that is no bucket": ({"buckets": "a,b.c"}, "'b.c' is not a bucket name"),
    "a pattern that does not compile": ({"bucketPattern": "a("}, "'bucketPattern'.*'a\\('"),
    "an empty pattern": ({"bucketPattern": ""}, "'bucketPattern'"),
    "an interval without a pattern": (
        {"buckets": "a", "discoveryInterval": "5"},
        "'discoveryInterval' has no effect without 'bucketPattern'",
    ),
    "a sequence of which bucket": (
        {"buckets": "a,b", "startSequence": "5"},
        "'startSequence' and 'buckets' contradict",
    ),
    "a minimum of which bucket": (
        {"bucketPattern": "a", "minLastRevision": "5"},
        "'minLastRevision' and 'bucketPattern' contradict",
    ),
    "no name at all": ({}, "'bucket' is missing"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kv_options({**SERVER, **given}, Mode.STREAMING)


def test_as_of_sequence_needs_single_bucket() -> None:
    with pytest.raises(ConfigurationError, match="'asOfSequence' and 'buckets' contradict"):
        kv_options({**SERVER, "buckets": "a,b", "asOfSequence": "5"}, Mode.BATCH)


@pytest.mark.parametrize("option", ["startSequence", "minLastSequence", "endSequence"])
def test_sequences_belong_to_one_stream(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{option}' and 'streams' contradict"):
        stream_options({**SERVER, "streams": "a,b", option: "5"}, Mode.BATCH)


def test_batch_has_no_discovery() -> None:
    given = {**SERVER, "bucketPattern": "a", "discoveryInterval": "5"}
    with pytest.raises(ConfigurationError, match="discoveryInterval"):
        kv_options(given, Mode.BATCH)


STARTS: dict[str, tuple[dict[str, str], str]] = {
    "not JSON": (
        {"startSequence": '{"a": 17,'},
        "'startSequence': .* is not a JSON object: Expect",
    ),
    "nested": ({"startSequence": '{"a": {"x": 1}}'}, "has .* for 'a', expected a sequence"),
    "a name twice": ({"startSequence": '{"a": 1, "a": 2}'}, "names 'a' twice"),
    "sequence 0": ({"startSequence": '{"a": 0, "b": 1}'}, "has 0 for 'a', which is smaller than 1"),
    "a boolean": ({"startSequence": '{"a": true}'}, "has True for 'a', expected a sequence, 'earl"),
    "another word": (
        {"startSequence": '{"a": "first"}'},
        "has 'first' for 'a', expected a sequence",
    ),
    "a time as a number": ({"startTime": '{"a": 5}'}, "has 5 for 'a', expected a timestamp, 'earl"),
    "not a time": ({"startTime": '{"a": "noon"}'}, "has 'noon' for 'a', which is not an RFC 3339"),
    "an unknown name": (
        {"startSequence": '{"a": 1, "b": 1, "c": 1}'},
        "it names 'c', which buckets=a,b does not select; remove it",
    ),
    "a missing name": (
        {"startSequence": '{"a": 1}'},
        "'b' of buckets=a,b is missing; add its start, which may be 'earliest' or 'latest'",
    ),
    "two options": (
        {"startSequence": '{"a": 1, "b": 1}', "startTime": "2026-01-01T00:00:00Z"},
        "'startSequence' and 'startTime' contradict",
    ),
    "with updatesOnly": (
        {"startSequence": '{"a": 1, "b": 1}', "updatesOnly": "true"},
        "'updatesOnly' and 'startSequence' contradict",
    ),
    "a strategy without a time": ({"startTimeStrategy": "error"}, "no effect without 'startTime'"),
    "an unknown strategy": (
        {"startTime": "2026-01-01T00:00:00Z", "startTimeStrategy": "earliest"},
        "is not one of error, latest",
    ),
}


@pytest.mark.parametrize(("given", "message"), STARTS.values(), ids=STARTS)
def test_refused_starts_by_name(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kv_options({**SERVER, "buckets": "a,b", **given}, Mode.STREAMING)


def test_starts_by_name_need_several_buckets() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the query reads one bucket; .* or set 'buckets'"
    ):
        kv_options({**SERVER, "bucket": "a", "startSequence": '{"a": 1}'}, Mode.STREAMING)


def test_latest_is_for_streaming() -> None:
    given = {**SERVER, "streams": "A", "startSequence": '{"A": "latest"}'}
    with pytest.raises(
        ConfigurationError, match=r"'latest' for 'A', which is for spark.readStream"
    ):
        stream_options(given, Mode.BATCH)


def test_end_time_lies_after_each_start() -> None:
    given = {"streams": "A", "startTime": '{"A": "2026-01-02T00:00:00Z"}'}
    with pytest.raises(ConfigurationError, match="'endTime' does not lie after 'startTime'"):
        stream_options({**SERVER, **given, "endTime": "2026-01-01T00:00:00Z"}, Mode.BATCH)
