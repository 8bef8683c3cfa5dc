"""Codecs of a bucket: which keys and filters they refuse, and the errors."""

from __future__ import annotations

import pickle

import pytest

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyNotEncodableError,
)
from nats_stream_source.jetstream.kv import codec as module
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec, SkippedEntries, kv_codec

PATH, BASE64, BOTH = kv_codec("path"), kv_codec("base64", "base64"), kv_codec("path,base64")


def test_names_and_values_without_codec() -> None:
    assert not NO_CODEC
    assert kv_codec(None, "base64")
    assert NO_CODEC.raw_key("a.b") == NO_CODEC.decoded_key("a.b") == "a.b"
    assert NO_CODEC.raw_filters(["a.*", ">"][:1]) == ("a.*",)
    assert NO_CODEC.raw_value(b"x") == NO_CODEC.decoded_value(b"x") == b"x"
    with pytest.raises(InvalidNameError, match="'a b' is not a key"):
        NO_CODEC.raw_key("a b")


def test_keys() -> None:
    assert PATH.raw_key("/a/b") == "_root_.a.b"
    assert BASE64.raw_key("user:1.Ω") == "dXNlcjox.zqk"
    assert BOTH.raw_key("/a/user:1") == "X3Jvb3Rf.YQ.dXNlcjox"


@pytest.mark.parametrize(
    ("codec", "key", "problem"),
    [
        (PATH, "a.b", "it would be stored as 'a.b', which is key 'a/b'; use that key"),
        (PATH, "/a/", "it would be stored as '_root_.a', which is key '/a'; use that key"),
        (PATH, "_root_/a", "'_root_.a', which is key '/a'"),
        (BOTH, "a.b", "it would be stored as 'YQ.Yg', which is key 'a/b'"),
    ],
)
def test_key_that_does_not_roundtrip(codec: KvCodec, key: str, problem: str) -> None:
    with pytest.raises(KeyNotEncodableError) as caught:
        codec.raw_key(key)
    assert f"could not encode key {key!r} with key codec '" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("codec", "key", "problem"),
    [
        (PATH, "user:1", "'user:1' is not a key"),
        (PATH, "/a//b", "'_root_.a..b' is not a key"),
        (BASE64, "a..b", "'YQ..Yg' is not a key"),
        (BASE64, "", "'' is not a key"),
        (BASE64, "\ud800", "surrogates not allowed"),
    ],
)
def test_key_without_stored_key(codec: KvCodec, key: str, problem: str) -> None:
    with pytest.raises(InvalidNameError, match="could not encode key") as caught:
        codec.raw_key(key)
    assert problem in str(caught.value)


def test_key_of_another_type() -> None:
    with pytest.raises(InvalidNameError, match="b'a' is not a key"):
        BASE64.raw_key(b"a")
    with pytest.raises(InvalidNameError, match="is not a key filter"):
        BASE64.raw_filters([b"a"])


def test_filters() -> None:
    assert PATH.raw_filters(["/a/*", "b/>"]) == ("_root_.a.*", "b.>")
    assert BASE64.raw_filters(["a.*.user:1"]) == ("YQ.*.dXNlcjox",)
    assert BOTH.raw_filters(["/a/>"]) == ("X3Jvb3Rf.YQ.>",)
    assert BASE64.raw_filters([">"]) == (">",)


@pytest.mark.parametrize(
    ("codec", "pattern"),
    [(BASE64, "user:*"), (BASE64, "/a/*"), (BOTH, "a*/b"), (PATH, "a*/b"), (BASE64, "a.>.b")],
)
def test_filter_refused(codec: KvCodec, pattern: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        codec.raw_filters([pattern])
    assert f"could not encode key filter {pattern!r} with key codec" in str(caught.value)
    assert "use wildcards as whole tokens, and filter the result" in str(caught.value)


def test_filters_that_overlap_when_encoded() -> None:
    """``/a`` and ``/a/`` are one stored key."""
    with pytest.raises(ConfigurationError, match="overlap"):
        PATH.raw_filters(["/a", "/a/"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("base32",), "key_codec is 'base32', which is not a codec"),
        (("",), "key_codec is '', which is not a codec"),
        ((None, "path"), "value_codec is 'path', which is not a codec, .* of base64"),
        ((None, None, "null"), "on_undecodable is 'null', expected 'fail' or 'skip'"),
    ],
)
def test_invalid_arguments(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        kv_codec(*arguments)


def test_base64_before_path_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    module._warn_of_order.cache_clear()
    for _ in range(2):
        codec = kv_codec("base64,path")
        pickle.loads(pickle.dumps(codec))
    kv_codec("path,base64")
    assert [record.message for record in caplog.records] == [
        "base64 before path: keys of several tokens do not decode codec=base64,path"
    ]
    assert codec.raw_key("a b") == "YSBi"
    with pytest.raises(KeyNotEncodableError, match="does not decode; use 'path' before 'base64'"):
        codec.raw_key("a.b")


def test_undecodable_entry_names_key_or_value() -> None:
    key = BASE64.undecodable("fleet", "plain key", 7)
    assert "could not decode the key of entry 'plain key' of bucket 'fleet', revision 7" in str(key)
    assert key.settings == ("key_codec", "on_undecodable")
    value = BASE64.undecodable("fleet", "YQ", 8)
    assert "could not decode the value of entry 'YQ'" in str(value)
    assert value.settings == ("value_codec", "on_undecodable")


def test_skipped_entries_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedEntries()
    skipped.report()
    skipped.add("fleet", "b", 2)
    skipped.add("fleet", "c", 3, count=4)
    skipped.report()
    skipped.report()
    assert [record.message for record in caplog.records] == [
        "undecodable entries were skipped bucket=fleet count=5 raw_key=b revision=2"
    ]
