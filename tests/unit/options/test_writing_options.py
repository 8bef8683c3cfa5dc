"""Options of writing: defaults, contradictions, and what to write instead."""

from __future__ import annotations

import pytest

from nats_stream_source.errors import ConfigurationError, InvalidNameError, OptionError
from nats_stream_source.jetstream.kv.codec import KvCodec
from nats_stream_source.options.writing import (
    MessageId,
    OnConflict,
    kv_write_options,
    stream_write_options,
    without_query_options,
)

KV = {"servers": "nats://127.0.0.1:4222", "bucket": "fleet"}
STREAM = {"servers": "nats://127.0.0.1:4222", "stream": "ORDERS"}


def test_defaults() -> None:
    options = kv_write_options(KV)
    assert options.on_conflict is OnConflict.FAIL
    assert options.message_id is MessageId.NONE
    assert not options.create
    assert options.max_in_flight == 4096
    assert stream_write_options(STREAM).subject is None


def test_codecs() -> None:
    assert not kv_write_options(KV).codec
    codec = kv_write_options(KV | {"keycodec": "path,base64", "valueCodec": "base64"}).codec
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
    config = kv_write_options(KV | given).config.stream_config()
    assert config["max_msgs_per_subject"] == 5
    assert config["num_replicas"] == 3
    assert config["storage"] == "memory"
    assert config["max_age"] == 600_000_000_000
    assert config["duplicate_window"] == 300_000_000_000
    assert config["subject_delete_marker_ttl"] == 60_000_000_000
    assert config["max_bytes"] == 64 << 20
    assert config["compression"] == "s2"
    assert config["placement"] == {"cluster": "east", "tags": ["ssd", "large"]}


def test_subjects_of_stream_to_create() -> None:
    create = STREAM | {"ifMissing": "create"}
    assert stream_write_options(create | {"subject": "orders.new"}).config["subjects"] == [
        "orders.new"
    ]
    both = create | {"subject": "orders.new", "subjects": "orders.>, audit.*"}
    assert stream_write_options(both).config["subjects"] == ["orders.>", "audit.*"]


BAD_KV = [
    ({"bucket": "a,b"}, OptionError, "is a list, expected one name"),
    ({"bucket": "a.b"}, InvalidNameError, "is not a bucket name"),
    ({"stream": "S"}, OptionError, "unknown option 'stream': write 'bucket'"),
    ({"onConflict": "ignore"}, OptionError, "is not one of fail, skip"),
    ({"messageId": "key"}, OptionError, "is not one of none, auto"),
    ({"ifMissing": "yes"}, OptionError, "is not one of error, create"),
    ({"maxInFlight": "0"}, OptionError, "is smaller than 1"),
    ({"maxInFlight": "10001"}, OptionError, "is larger than 10000"),
    ({"history": "5"}, OptionError, "'history' has no effect without ifMissing=create"),
    ({"duplicateWindow": "5"}, OptionError, "'duplicateWindow' has no effect without"),
    ({"ifMissing": "create", "history": "65"}, OptionError, "is larger than 64"),
    ({"ifMissing": "create", "replicas": "6"}, OptionError, "is larger than 5"),
    ({"ifMissing": "create", "ttl": "0"}, OptionError, "is not between 0.1 and 9,000,000,000"),
    (
        {"ifMissing": "create", "ttl": "10", "duplicateWindow": "20"},
        ConfigurationError,
        "duplicate_window is 20.0, expected 0.1 seconds or more, at most the ttl",
    ),
    ({"ifMissing": "create", "metadata": '{"a"'}, OptionError, "is not a JSON object: Expecting"),
    ({"ifMissing": "create", "metadata": '{"a": 1}'}, OptionError, "is not a JSON object of str"),
    ({"ifMissing": "create", "metadata": '["a"]'}, OptionError, "is not a JSON object of str"),
    (
        {"ifMissing": "create", "metadata": '{"_nats.level": "9"}'},
        OptionError,
        "begins with '_nats",
    ),
    ({"metadata": "{}"}, OptionError, "'metadata' has no effect without ifMissing=create"),
    ({"includeHeaders": "true"}, OptionError, "the column 'headers' is written"),
    ({"topic": "t"}, OptionError, "write 'bucket'"),
    ({"keyCodec": "rot13"}, OptionError, "is not a codec, .* of base64, path; write 'base64', 'pa"),
    ({"onUndecodable": "skip"}, OptionError, "it is an option of reading; remove it"),
    ({"includeRawKey": "true"}, OptionError, "a column 'raw_key' of the DataFrame is ignored"),
    ({"failOnDataLoss": "false"}, OptionError, "it is an option of reading; remove it"),
]
BAD_STREAM = [
    ({"stream": "a b"}, InvalidNameError, "is not a stream's name"),
    ({"bucket": "b"}, OptionError, "write format\\('nats_kv'\\)"),
    ({"subject": "orders.>"}, OptionError, "is not one token"),
    ({"ifMissing": "create"}, OptionError, "option 'subjects' is missing"),
    ({"ifMissing": "create", "subjects": "a..b"}, InvalidNameError, "is not a subject filter"),
    ({"ifMissing": "create", "subjects": "a.>,a.b"}, ConfigurationError, "overlap"),
    ({"subjects": "a"}, OptionError, "'subjects' has no effect without ifMissing=create"),
    ({"onConflict": "skip"}, OptionError, "does not have revisions per key"),
    ({"valueCodec": "base64"}, OptionError, r"are not encoded; write format\('nats_kv'\)"),
]


@pytest.mark.parametrize(("given", "kind", "text"), BAD_KV)
def test_bad_options_of_bucket(given: dict[str, str], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        kv_write_options(KV | given)


@pytest.mark.parametrize(("given", "kind", "text"), BAD_STREAM)
def test_bad_options_of_stream(given: dict[str, str], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        stream_write_options(STREAM | given)


def test_names_are_required() -> None:
    servers = {"servers": "nats://127.0.0.1:4222"}
    with pytest.raises(OptionError, match="option 'bucket' is missing"):
        kv_write_options(servers)
    with pytest.raises(OptionError, match="option 'stream' is missing"):
        stream_write_options(servers)


def test_options_of_query_are_not_those_of_sink() -> None:
    given = {**KV, "checkpointlocation": "/tmp/x"}
    assert without_query_options(given) == KV
    with pytest.raises(OptionError, match=r"an option of df\.writeStream"):
        kv_write_options(given)
