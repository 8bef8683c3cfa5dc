"""Options of writing: defaults, contradictions, and what to write instead."""

from __future__ import annotations

import pytest

from nats_stream_source.errors import ConfigurationError, OptionError
from nats_stream_source.jetstream.kv.codec import KvCodec
from nats_stream_source.options.writing import (
    KvWriteOptions,
    MessageId,
    OnConflict,
    StreamWriteOptions,
    kv_write_options,
    stream_write_options,
    without_query_options,
)

SERVER = {"servers": "nats://127.0.0.1:4222"}


def kv(**given: str) -> KvWriteOptions:
    return kv_write_options({**SERVER, "bucket": "fleet", **given})


def stream(**given: str) -> StreamWriteOptions:
    return stream_write_options({**SERVER, "stream": "ORDERS", **given})


def test_defaults() -> None:
    options = kv()
    assert (options.on_conflict, options.message_id) == (OnConflict.FAIL, MessageId.NONE)
    assert (options.create, options.max_in_flight) == (False, 4096)
    assert not options.codec
    assert stream().subject is None


def test_codecs() -> None:
    codec = kv(keycodec="path,base64", valueCodec="base64").codec
    assert codec == KvCodec(("path", "base64"), ("base64",))


def test_bucket_to_create() -> None:
    given = {
        "ifMissing": "CREATE",
        "history": "5",
        "replicas": "3",
        "storage": "memory",
        "ttl": "600",
        "duplicateWindow": "300",
        "limitMarkerTtl": "60",
        "maxBytes": "64m",
        "compression": "s2",
        "placementCluster": "east",
        "placementTags": "ssd, large",
    }
    config = kv(**given).config.stream_config()
    expected = {
        "max_msgs_per_subject": 5,
        "num_replicas": 3,
        "storage": "memory",
        "max_age": 600_000_000_000,
        "duplicate_window": 300_000_000_000,
        "subject_delete_marker_ttl": 60_000_000_000,
        "max_bytes": 64 << 20,
        "compression": "s2",
        "placement": {"cluster": "east", "tags": ["ssd", "large"]},
    }
    assert expected.items() <= config.items()


def test_stream_to_create() -> None:
    config = stream(ifMissing="create", subject="orders.new", ttl="600", fastIngest="true").config
    assert (config["subjects"], config["max_age"]) == (["orders.new"], 600_000_000_000)
    assert config["allow_batched"]
    assert not {"max_bytes", "compression", "placement", "metadata"} & config.keys()
    config = stream(ifMissing="create", subject="orders.new", subjects="orders.>, audit.*").config
    assert config["subjects"] == ["orders.>", "audit.*"]


CREATE = {"ifMissing": "create"}
BAD_KV = [
    ({"bucket": "a,b"}, "is a list, expected one name"),
    ({"bucket": "a.b"}, "is not a bucket name"),
    ({"stream": "S"}, "unknown option 'stream': write 'bucket'"),
    ({"onConflict": "ignore"}, "is not one of fail, skip"),
    ({"messageId": "key"}, "is not one of none, auto"),
    ({"ifMissing": "yes"}, "is not one of error, create"),
    ({"maxInFlight": "0"}, "is smaller than 1"),
    ({"maxInFlight": "10001"}, "is larger than 10000"),
    ({"history": "5"}, "'history' has no effect without ifMissing=create"),
    ({"replicas": "1"}, "'replicas' has no effect without"),
    ({"metadata": "{}"}, "'metadata' has no effect without ifMissing=create"),
    (CREATE | {"history": "65"}, "is larger than 64"),
    (CREATE | {"replicas": "6"}, "is larger than 5"),
    (CREATE | {"ttl": "0"}, "is not between 0.1 and 9,000,000,000"),
    (
        CREATE | {"ttl": "10", "duplicateWindow": "20"},
        "duplicate_window is 20.0, expected 0.1 seconds or more, at most the ttl",
    ),
    (CREATE | {"metadata": '{"a"'}, "is not a JSON object: Expecting"),
    *((CREATE | {"metadata": text}, "not a JSON object of str") for text in ('{"a": 1}', '["a"]')),
    (CREATE | {"metadata": '{"_nats.level": "9"}'}, "begins with '_nats"),
    ({"includeHeaders": "true"}, "the column 'headers' is written"),
    ({"topic": "t"}, "write 'bucket'"),
    ({"keyCodec": "rot13"}, "is not a codec, .* of base64, path; write 'base64', 'pa"),
    ({"onUndecodable": "skip"}, "it is an option of reading; remove it"),
    ({"includeRawKey": "true"}, "a column 'raw_key' of the DataFrame is ignored"),
    ({"checkpointlocation": "/tmp/x"}, r"an option of df\.writeStream"),
]
BAD_STREAM = [
    ({"stream": "a b"}, "is not a stream's name"),
    ({"bucket": "b"}, r"write format\('nats_kv'\)"),
    ({"subject": "orders.>"}, "is not a subject to publish to: it contains a wildcard"),
    (CREATE, "option 'subjects' is missing"),
    (CREATE | {"subjects": "a..b"}, "is not a subject filter"),
    (CREATE | {"subjects": "a.>,a.b"}, "overlap"),
    ({"subjects": "a"}, "'subjects' has no effect without ifMissing=create"),
    ({"onConflict": "skip"}, "does not have revisions per key"),
    ({"valueCodec": "base64"}, r"are not encoded; write format\('nats_kv'\)"),
]


@pytest.mark.parametrize(("given", "text"), BAD_KV, ids=str)
def test_options_of_bucket_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        kv(**given)


@pytest.mark.parametrize(("given", "text"), BAD_STREAM, ids=str)
def test_options_of_stream_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        stream(**given)


def test_names_are_required() -> None:
    with pytest.raises(OptionError, match="option 'bucket' is missing"):
        kv_write_options(SERVER)
    with pytest.raises(OptionError, match="option 'stream' is missing"):
        stream_write_options(SERVER)


def test_options_of_query_are_not_those_of_sink() -> None:
    assert without_query_options({**SERVER, "checkpointlocation": "/tmp/x"}) == SERVER
