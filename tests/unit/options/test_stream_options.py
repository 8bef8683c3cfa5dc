"""The options of ``nats_stream``, and what belongs to one way of reading only."""

from __future__ import annotations

import pytest

from nats_stream_source.errors import ConfigurationError, InvalidNameError, OptionError
from nats_stream_source.options import (
    DeliverPolicy,
    Mode,
    StartPosition,
    kv_options,
    stream_options,
)

KV = {"servers": "nats://127.0.0.1:4222", "bucket": "fleet"}
BASE = {"servers": "nats://127.0.0.1:4222", "stream": "ORDERS"}
NOON = "2026-11-21T12:00:00Z"
NOON_NS = 1_795_262_400_000_000_000

BEGINNINGS: dict[str, tuple[dict[str, str], StartPosition]] = {
    "nothing": ({}, StartPosition(DeliverPolicy.ALL)),
    "all": ({"deliverPolicy": "all"}, StartPosition(DeliverPolicy.ALL)),
    "new": ({"deliverPolicy": "New"}, StartPosition(DeliverPolicy.NEW)),
    "last": ({"deliverPolicy": "last"}, StartPosition(DeliverPolicy.LAST)),
    "last of each": (
        {"deliverPolicy": "last_per_subject"},
        StartPosition(DeliverPolicy.LAST_PER_SUBJECT),
    ),
    "a sequence": (
        {"startSequence": "7"},
        StartPosition(DeliverPolicy.BY_START_SEQUENCE, sequence=7),
    ),
    "a sequence, and the policy": (
        {"deliverPolicy": "by_start_sequence", "startSequence": "7"},
        StartPosition(DeliverPolicy.BY_START_SEQUENCE, sequence=7),
    ),
    "a time": (
        {"startTime": "2026-11-21T13:00:00+01:00"},
        StartPosition(DeliverPolicy.BY_START_TIME, time=NOON_NS),
    ),
}


@pytest.mark.parametrize(("given", "beginning"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_beginnings(given: dict[str, str], beginning: StartPosition) -> None:
    assert stream_options({**BASE, **given}).start_position == beginning


def test_stream_options_all_are_parsed() -> None:
    options = stream_options(
        {
            **BASE,
            "FILTERSUBJECTS": "orders.b, orders.a.>",
            "startTime": NOON,
            "endTime": "2026-11-21T12:00:00.5Z",
            "headersOnly": "true",
            "minLastSequence": "12",
            "minPartitions": "3",
            "includeHeaders": "true",
            "failOnDataLoss": "false",
        },
        Mode.BATCH,
    )
    assert (options.stream, options.filter_subjects) == ("ORDERS", ("orders.a.>", "orders.b"))
    assert (options.end_sequence, options.end_time) == (None, NOON_NS + 500_000_000)
    assert (options.headers_only, options.min_last_sequence) == (True, 12)
    reading = options.common
    assert (reading.min_partitions, reading.max_rows, reading.max_bytes) == (3, None, None)
    assert (reading.include_headers, reading.fail_on_data_loss) == (True, False)


def test_subject_stands_for_its_stream() -> None:
    options = stream_options({"servers": "h", "subject": "orders.*"})
    assert (options.stream, options.filter_subjects) == (None, ("orders.*",))


def test_everything_needs_no_filter() -> None:
    assert stream_options({**BASE, "filterSubjects": ">"}).filter_subjects == ()


REFUSED: dict[str, tuple[dict[str, str], type[Exception], str]] = {
    "no stream": ({"stream": ""}, OptionError, "option 'stream'"),
    "a stream with a space": ({"stream": " S"}, InvalidNameError, "' S' is not a stream's name"),
    "a stream with a dot": ({"stream": "a.b"}, InvalidNameError, "'subject' looks a stream up"),
    "stream and subject": ({"subject": "a"}, OptionError, "'stream' and 'subject' contradict"),
    "an unknown option": ({"filterSubject": "a"}, OptionError, "mean 'filterSubjects'"),
    "a bucket's option": ({"keys": "a"}, OptionError, "unknown option 'keys'"),
    "an empty filter": ({"filterSubjects": "a,"}, OptionError, "empty element"),
    "a filter with a space": ({"filterSubjects": "a b"}, InvalidNameError, "'a b' is not a"),
    "half a wildcard": ({"filterSubjects": "a.b*"}, InvalidNameError, "is not a subject filter"),
    "a wildcard in the middle": ({"filterSubjects": "a.>.b"}, InvalidNameError, "is not a"),
    "filters that overlap": (
        {"filterSubjects": "a.*,a.b"},
        ConfigurationError,
        "overlap: a subject .* 'filterSubjects'",
    ),
    "an unknown policy": ({"deliverPolicy": "first"}, OptionError, "last_per_subject"),
    "no sequence": (
        {"deliverPolicy": "by_start_sequence"},
        OptionError,
        "'startSequence' is missing",
    ),
    "no time": ({"deliverPolicy": "by_start_time"}, OptionError, "'startTime' is missing"),
    "another policy": (
        {"deliverPolicy": "new", "startSequence": "3"},
        OptionError,
        "'deliverPolicy' and 'startSequence' contradict",
    ),
    "two beginnings": (
        {"startTime": NOON, "startSequence": "3"},
        OptionError,
        "'startSequence' and 'startTime' contradict",
    ),
    "two beginnings, one of them zero": (
        {"startTime": "1970-01-01T00:00:00Z", "startSequence": "3"},
        OptionError,
        "'startSequence' and 'startTime' contradict",
    ),
    "sequence zero": ({"startSequence": "0"}, OptionError, "'startSequence': '0' is smaller"),
    "a negative sequence": ({"startSequence": "-1"}, OptionError, "smaller than 1"),
    "no number": (
        {"startSequence": "ten"},
        OptionError,
        "'startSequence': 'ten' is not an integer",
    ),
    "a huge number": ({"startSequence": "9" * 30}, OptionError, "larger than a sequence"),
    "a time without a zone": (
        {"startTime": "2026-11-21T12:00:00"},
        OptionError,
        "'startTime'.*for example 2026-11-21T08:00:00Z",
    ),
    "a date": ({"startTime": "2026-11-21"}, OptionError, "for example"),
    "month 13": ({"startTime": "2026-13-21T12:00:00Z"}, OptionError, "for example"),
    "an end in a stream": ({"endSequence": "3"}, OptionError, "for spark.read, this is"),
    "an end time in a stream": ({"endTime": NOON}, OptionError, "for spark.read, this is"),
    "an empty token": ({"filterSubjects": "a..b"}, InvalidNameError, "'a..b' is not a subject"),
    "a policy by time with a sequence": (
        {"deliverPolicy": "by_start_time", "startSequence": "4"},
        OptionError,
        "'deliverPolicy' and 'startSequence' contradict",
    ),
    "a sequence that is not one": ({"minLastSequence": "x"}, OptionError, "'minLastSequence'"),
    "neither true nor false": ({"headersOnly": "1"}, OptionError, "neither true nor false"),
}


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(given: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stream_options({**BASE, **given}, Mode.STREAMING)


def test_subject_and_filters_are_refused() -> None:
    given = {"servers": BASE["servers"], "subject": "a", "filterSubjects": "b"}
    with pytest.raises(OptionError, match="'subject' and 'filterSubjects' contradict"):
        stream_options(given, Mode.STREAMING)


@pytest.mark.parametrize("name", ["servers", "stream"])
def test_option_missing_is_refused(name: str) -> None:
    given = {key: value for key, value in BASE.items() if key != name}
    with pytest.raises(OptionError, match=f"'{name}' is missing"):
        stream_options(given | {"headersOnly": "true"})


def test_subject_is_not_trimmed() -> None:
    with pytest.raises(InvalidNameError, match=r"'a\\n' is not a subject filter"):
        stream_options({"servers": BASE["servers"], "subject": "a\n"}, Mode.STREAMING)


REFUSED_IN_BATCH: dict[str, tuple[dict[str, str], str]] = {
    "rows of a micro-batch": ({"maxRowsPerTrigger": "5"}, "for spark.readStream, this is"),
    "bytes of a micro-batch": ({"maxBytesPerTrigger": "5"}, "for spark.readStream, this is"),
    "what will come": ({"deliverPolicy": "new"}, "return nothing"),
    "two ends": ({"endSequence": "5", "endTime": NOON}, "'endSequence' and 'endTime' contradict"),
    "an end before the beginning": ({"startSequence": "6", "endSequence": "5"}, "lies before"),
    "no time at all": ({"startTime": NOON, "endTime": NOON}, "does not lie after"),
    "the last up to an end": ({"deliverPolicy": "last", "endSequence": "5"}, "contradict"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED_IN_BATCH.values(), ids=REFUSED_IN_BATCH)
def test_refused_in_batch(given: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stream_options({**BASE, **given}, Mode.BATCH)


KV_REFUSED: dict[str, tuple[dict[str, str], Mode, str]] = {
    "a state in a stream": ({"asOfSequence": "5"}, Mode.STREAMING, "for spark.read, this is"),
    "a time's state in a stream": ({"asOfTime": NOON}, Mode.STREAMING, "for spark.read, this is"),
    "two states": ({"asOfSequence": "5", "asOfTime": NOON}, Mode.BATCH, "they name two states"),
    "a state and a beginning": (
        {"asOfSequence": "5", "startSequence": "3"},
        Mode.BATCH,
        "'startSequence' and 'asOfSequence' contradict",
    ),
    "a state and history": (
        {"asOfTime": NOON, "includeHistory": "true"},
        Mode.BATCH,
        "'includeHistory' and 'asOfTime' contradict",
    ),
    "what will come": ({"updatesOnly": "true"}, Mode.BATCH, "return nothing"),
    "two beginnings": (
        {"startTime": NOON, "startSequence": "3"},
        Mode.STREAMING,
        "'startSequence' and 'startTime' contradict",
    ),
    "a time and updates": (
        {"startTime": NOON, "updatesOnly": "true"},
        Mode.STREAMING,
        "'updatesOnly' and 'startTime' contradict",
    ),
    "rows of a micro-batch": ({"maxRowsPerTrigger": "5"}, Mode.BATCH, "for spark.readStream"),
}


@pytest.mark.parametrize(("given", "mode", "message"), KV_REFUSED.values(), ids=KV_REFUSED)
def test_bucket_options_refused(given: dict[str, str], mode: Mode, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        kv_options({**KV, **given}, mode)


def test_options_of_each_mode_are_parsed_without_mode() -> None:
    assert kv_options({**KV, "asOfSequence": "5"}).as_of_sequence == 5
    assert kv_options({**KV, "maxRowsPerTrigger": "5"}).common.max_rows == 5
    assert stream_options({**BASE, "endSequence": "5"}).end_sequence == 5
