"""Rows of buckets whose keys and values are encoded, in batches and micro-batches."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import UndecodableError
from nats_stream_source.wire.codec import decode_key, encode_key, encode_value
from tests.support.nats.buckets import create_bucket, delete, fill_bucket, put, put_many
from tests.support.query_driver.batch import Row, read_batch
from tests.support.query_driver.driver import new_query
from tests.unit.wire.codec.test_codec import CHAINS, recorded

CODECS = {"keyCodec": "path,base64", "valueCodec": "base64"}


def stored(*entries: tuple[str, bytes]) -> list[tuple[str, bytes]]:
    """Entries as ``CODECS`` stores them."""
    return [
        (encode_key(("path", "base64"), key), encode_value(("base64",), value))
        for key, value in entries
    ]


def entries(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(row["key"], row["value"], row["revision"]) for row in rows]


@pytest.fixture(scope="module")
def url(shared_server: NatsServer) -> str:
    """The server, with buckets of the same keys."""
    for name in ("north", "south"):
        create_bucket(shared_server.url, name, 5)
        written = [(f"/{name}/user:{i % 3}", b"%d" % i) for i in range(6)]
        put_many(shared_server.url, name, stored(*written, ("/other/Ω", b"\xff")))
        delete(shared_server.url, name, stored((f"/{name}/user:1", b""))[0][0])
    return shared_server.url


def test_batch(url: str) -> None:
    last = [
        ("/north/user:0", b"3", 4),
        ("/north/user:2", b"5", 6),
        ("/other/Ω", b"\xff", 7),
        ("/north/user:1", None, 8),
    ]
    assert entries(read_batch(url, bucket="north", **CODECS)) == last
    assert entries(read_batch(url, bucket="north", includeHistory=True, **CODECS)) == [
        *((f"/north/user:{i % 3}", b"%d" % i, i + 1) for i in range(6)),
        *last[2:],
    ]
    puts = read_batch(url, bucket="north", ignoreDeletes=True, metaOnly=True, **CODECS)
    assert entries(puts) == [(key, None, revision) for key, _, revision in last[:3]]
    (row,) = read_batch(url, bucket="north", keys="/other/*", includeRawKey=True, **CODECS)
    assert (row["key"], row["raw_key"]) == ("/other/Ω", "X3Jvb3Rf.b3RoZXI.zqk")
    assert list(row)[-1] == "raw_key"


def test_filters(url: str) -> None:
    assert [
        row["key"] for row in read_batch(url, bucket="north", keys="/north/user:2,/*/Ω", **CODECS)
    ] == ["/north/user:2", "/other/Ω"]
    assert read_batch(url, bucket="north", keys="/south/>", **CODECS) == []
    assert len(read_batch(url, bucket="north", keys=">", **CODECS)) == 4


def test_several_buckets(url: str) -> None:
    rows = read_batch(url, buckets="north,south", keys="/*/user:0", **CODECS)
    assert sorted((row["bucket"], row["key"], row["value"]) for row in rows) == [
        ("north", "/north/user:0", b"3"),
        ("south", "/south/user:0", b"3"),
    ]


def test_micro_batches(url: str) -> None:
    fill_bucket(url, "followed", stored(("/a b", b"1"), ("/c", b"2")), 3)
    options: dict[str, Any] = {"bucket": "followed", "keys": "/a b,/c/>", **CODECS}
    with new_query(url, **options) as query:
        assert entries(query.read_new()) == [("/a b", b"1", 1)]
        put_many(url, "followed", stored(("/c/Ω", b""), ("/d", b"4"), ("/a b", b"5")))
        assert entries(query.read_new()) == [("/c/Ω", b"", 3), ("/a b", b"5", 5)]
        offset = query.offset
    # The checkpoint has the filters of stored keys, so codecs may come and go.
    filters = ["X3Jvb3Rf.YSBi", "X3Jvb3Rf.Yw.>"]
    assert offset["filter"] == filters
    put_many(url, "followed", stored(("/a b", b"6")))
    for more in ({**CODECS}, {"keys": ",".join(filters), "keyCodec": ""}):
        given = {name: text for name, text in {**options, **more}.items() if text}
        if "keyCodec" not in given:
            del given["valueCodec"]
        with new_query(url, offset=offset, **given) as query:
            (row,) = query.read_new()
        key, value = stored(("/a b", b"6"))[0]
        decoded = ("/a b", b"6", 6) if "keyCodec" in given else (key, value, 6)
        assert entries([row]) == [decoded]


@pytest.mark.parametrize("number", range(len(recorded("buckets"))))
def test_bucket_of_kvcodec(url: str, number: int) -> None:
    """Each recorded bucket, written as kvcodec stored it: its rows have the program's keys."""
    key_codec, value_codec, calls = recorded("buckets")[number]
    bucket = f"recorded-{number}"
    create_bucket(url, bucket, 64)
    expected: list[tuple[str | None, bytes | None]] = []
    encoded: dict[str, str] = {}
    for key, operation, error, raw_key, raw_value in calls:
        if error or isinstance(key, dict):
            continue
        if operation == "delete":
            delete(url, bucket, encoded[key])
            expected.append((key, None))
            continue
        put(url, bucket, raw_key, base64.b64decode(raw_value))
        encoded[key] = raw_key
        # A key that kvcodec does not return itself: the one it returns, or none.
        expected.append((decode_key(CHAINS[key_codec], raw_key), f"v:{key}".encode()))
    options = {
        "keyCodec": ",".join(CHAINS[key_codec]),
        "valueCodec": ",".join(CHAINS[value_codec]),
        "onUndecodable": "null" if any(CHAINS[name] for name in (key_codec, value_codec)) else "",
    }
    given = {name: text for name, text in options.items() if text}
    rows = read_batch(url, bucket=bucket, includeHistory=True, **given)
    assert [(row["key"], row["value"]) for row in rows] == expected
    same = [row["key"] for row in rows if row["key"] in encoded]
    assert len(same) > 10
    if CHAINS[key_codec] in ((), ("base64",)):
        assert set(same) == set(encoded)


def test_undecodable_entries(url: str, caplog: pytest.LogCaptureFixture) -> None:
    fill_bucket(url, "junk", [("YQ", b"MQ"), ("junk-", b"Mg"), ("YQ", b"??"), ("Yg", b"Mw")], 5)
    codecs: dict[str, Any] = {"keyCodec": "base64", "valueCodec": "base64"}
    with pytest.raises(UndecodableError, match="the value of entry 'YQ' of bucket 'junk'") as error:
        read_batch(url, bucket="junk", **codecs, keys="a")
    assert str(error.value).endswith("(options 'valueCodec' or 'onUndecodable')")
    caplog.clear()
    skipped = read_batch(
        url, bucket="junk", **codecs, onUndecodable="skip", includeHistory=True, minPartitions=1
    )
    assert entries(skipped) == [("a", b"1", 1), ("b", b"3", 4)]
    warnings = [record.message for record in caplog.records if "undecodable" in record.message]
    assert warnings == [
        "undecodable entries were skipped bucket=junk count=2 raw_key=junk- revision=2"
    ]
    nulls = read_batch(url, bucket="junk", **codecs, onUndecodable="null", includeRawKey=True)
    assert [(row["key"], row["raw_key"], row["value"]) for row in nulls] == [
        (None, "junk-", b"2"),
        ("a", "YQ", None),
        ("b", "Yg", b"3"),
    ]
    # One request for each sequence, and a range of a consumer.
    for count in (1, 100):
        with new_query(url, bucket="junk", **codecs, onUndecodable="skip", keys="b") as query:
            query.read_new()
            put_many(url, "junk", [("Yg", b"NA"), ("Yg", b"!")] * count)
            assert [row["value"] for row in query.read_new()][-1:] == [b"4"]
