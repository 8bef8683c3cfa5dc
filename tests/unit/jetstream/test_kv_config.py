"""Names, filters, properties and codecs of buckets (ADR-8), and prefixes (ADR-19)."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyNotEncodableError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.kv import codec as module
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec, SkippedEntries, kv_codec
from nats_stream_source.jetstream.kv.config import (
    BucketStatus,
    ExternalSource,
    KeyValueConfig,
    Republish,
)
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import (
    api_prefix,
    covers,
    key_subject,
    overlap,
    stream_of,
    validate_bucket,
    validate_filter,
    validate_filters,
    validate_key,
    validate_written_key,
    write_subject,
)


@pytest.mark.parametrize("name", ["fleet", "A-b_9", "KV_x"])
def test_buckets(name: str) -> None:
    assert stream_of(name) == f"KV_{name}"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a*", "ä", "a\n", "../x"])
def test_bucket_names_invalid(name: str) -> None:
    with pytest.raises(InvalidNameError, match="bucket"):
        validate_bucket(name)


@pytest.mark.parametrize("pattern", [">", "*", "a.*", "*.b", "a.>", "a.*.c.>"])
def test_filters_valid(pattern: str) -> None:
    assert validate_filter(pattern) == pattern


@pytest.mark.parametrize("pattern", [">.a", "a>", "a*b", "**", "a.>.b", "*.", ".>"])
def test_filters_invalid(pattern: str) -> None:
    with pytest.raises(InvalidNameError):
        validate_filter(pattern)


def accepts(validate: Callable[[str], str], name: str) -> bool:
    try:
        return validate(name) == name
    except InvalidNameError:
        return False


@given(st.text(alphabet="ab./=_kv- \n*ä", max_size=8))
@example("_kv.x")
@example("a\n")
@example("a..b")
@example("a/b=c_d-e")
def test_keys_match_pattern_of_document(key: str) -> None:
    """ADR-8's pattern and sentence, plus the server's rule that no token is empty."""
    allowed = (
        re.fullmatch(r"\A[-/_=\.a-zA-Z0-9]+\Z", key) is not None
        and not key.startswith(".")
        and not key.endswith(".")
        and ".." not in key
    )
    assert accepts(validate_key, key) is allowed
    assert accepts(validate_written_key, key) is (allowed and not key.startswith("_kv"))
    if "*" not in key:
        assert accepts(validate_filter, key) is allowed


_TOKENS = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3)
_PATTERNS = st.builds(
    lambda tokens, tail: ".".join([*tokens, *tail]), _TOKENS, st.sampled_from([[], [">"]])
)


def matches(pattern: str, subject: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(expression, subject) is not None


@given(_PATTERNS, _PATTERNS)
def test_overlap_is_subject_that_both_match(one: str, other: str) -> None:
    words = ["a", "b", "c"]
    subjects = [*words]
    for _ in range(4):
        subjects += [f"{s}.{w}" for s in subjects for w in words if s.count(".") < 4]
        subjects = list(dict.fromkeys(subjects))
    both = any(matches(one, s) and matches(other, s) for s in subjects)
    assert overlap(one, other) is both


def test_validate_filters_names_both() -> None:
    assert validate_filters(["b", "a"]) == ("b", "a")
    with pytest.raises(ConfigurationError, match=r"'a\.\*' and 'a\.b' overlap"):
        validate_filters(["a.*", "a.b"])


def test_prefixes() -> None:
    assert api_prefix() == "$JS.API"
    assert api_prefix("fromA") == api_prefix("fromA.") == "fromA"
    assert api_prefix(domain="hub") == "$JS.hub.API"
    for bad in ("a..b", "a.*", "a b"):
        with pytest.raises(ConfigurationError):
            api_prefix(bad)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("$JS.API", "$KV.bin."),
        ("JS.from-acc1", "JS.from-acc1.$KV.bin."),
        ("$JS.hub.API", "$JS.hub.API.$KV.bin."),
        ("fromA", "fromA.$KV.bin."),
    ],
)
def test_write_subjects(prefix: str, expected: str) -> None:
    """ADR-19, "KV Example"."""
    assert write_subject(key_subject("bin", ""), prefix) == expected


_SUBJECT = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("wide", "narrow", "does"),
    [
        (">", "a", True),
        (">", "a.>", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.*", "a.b", True),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("*.b", "a.*", False),
        ("a.*", "a.*", True),
        ("a", "a.b", False),
    ],
)
def test_covers(wide: str, narrow: str, does: bool) -> None:
    assert covers(wide, narrow) is does


@given(_PATTERNS, _PATTERNS, _SUBJECT)
def test_subject_matched_by_narrow_filter_matches_wide(
    wide: str, narrow: str, subject: str
) -> None:
    if covers(wide, narrow) and covers(narrow, subject):
        assert covers(wide, subject)


# ADR-8's ``CONFIGURATION``, with today's field names (measurements.md, Servers 13).
PLAIN: dict[str, Any] = {
    "name": "KV_CONFIGURATION",
    "subjects": ["$KV.CONFIGURATION.>"],
    "description": "",
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs_per_subject": 1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msg_size": -1,
    "storage": "file",
    "discard": "new",
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "allow_rollup_hdrs": True,
    "deny_delete": True,
    "allow_direct": True,
}


PROPERTIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"history": 64}, {"max_msgs_per_subject": 64}),
    ({"description": "cars"}, {"description": "cars"}),
    ({"max_value_size": 100}, {"max_msg_size": 100}),
    ({"max_bytes": 1 << 20}, {"max_bytes": 1 << 20}),
    ({"storage": "memory"}, {"storage": "memory"}),
    ({"replicas": 3}, {"num_replicas": 3}),
    ({"compression": True}, {"compression": "s2"}),
    ({"metadata": {"a": "b"}}, {"metadata": {"a": "b"}}),
    ({"placement": {"cluster": "x", "tags": ["y"]}},) * 2,
    # The duplicate window is no longer than messages live, and never longer than two minutes.
    ({"ttl": 119}, {"max_age": 119_000_000_000, "duplicate_window": 119_000_000_000}),
    ({"ttl": 120}, {"max_age": 120_000_000_000}),
    ({"ttl": 3600.5}, {"max_age": 3_600_500_000_000}),
    (
        {"limit_marker_ttl": 60},
        {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60_000_000_000},
    ),
    (
        {"republish": Republish(">", "copy.>", headers_only=True)},
        {"republish": {"src": ">", "dest": "copy.>", "headers_only": True}},
    ),
]


@pytest.mark.parametrize(("given", "expected"), PROPERTIES)
def test_properties(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = KeyValueConfig("CONFIGURATION", **given)
    assert config.stream_config() == {**PLAIN, **expected}
    assert KeyValueConfig.of(config.stream_config()) == config


MIRRORS: list[tuple[ExternalSource, dict[str, Any]]] = [
    (ExternalSource("main"), {"name": "KV_main"}),
    (ExternalSource("main", domain="hub"), {"name": "KV_main", "external": {"api": "$JS.hub.API"}}),
    (
        ExternalSource("main", api_prefix="fromA", deliver_prefix="forI.d"),
        {"name": "KV_main", "external": {"api": "fromA", "deliver": "forI.d"}},
    ),
    (ExternalSource("main", keys="a.>"), {"name": "KV_main", "filter_subject": "$KV.main.a.>"}),
    (ExternalSource("main", start_seq=7), {"name": "KV_main", "opt_start_seq": 7}),
]


@pytest.mark.parametrize(("upstream", "expected"), MIRRORS)
def test_mirrors(upstream: ExternalSource, expected: dict[str, Any]) -> None:
    config = KeyValueConfig("copy", mirror=upstream).stream_config()
    assert config["mirror"] == expected
    assert config["mirror_direct"] is True
    assert "subjects" not in config, "a mirror takes no messages of its own"
    assert KeyValueConfig.of(config).stream_config() == config


ALL_OF_MAIN = {"src": "$KV.main.>", "dest": "$KV.all.>"}
SOURCES: list[tuple[ExternalSource, dict[str, Any]]] = [
    (ExternalSource("main"), {"name": "KV_main", "subject_transforms": [ALL_OF_MAIN]}),
    (
        ExternalSource("main", keys="a.>"),
        {"name": "KV_main", "subject_transforms": [{"src": "$KV.main.a.>", "dest": "$KV.all.a.>"}]},
    ),
    (
        ExternalSource("main", domain="hub"),
        {
            "name": "KV_main",
            "external": {"api": "$JS.hub.API"},
            "subject_transforms": [ALL_OF_MAIN],
        },
    ),
    (
        ExternalSource("main", keys="*.b.*.>"),
        {
            "name": "KV_main",
            "subject_transforms": [
                {"src": "$KV.main.*.b.*.>", "dest": "$KV.all.{{wildcard(1)}}.b.{{wildcard(2)}}.>"}
            ],
        },
    ),
    # The same bucket elsewhere has the same subjects.
    (ExternalSource("all", domain="hub"), {"name": "KV_all", "external": {"api": "$JS.hub.API"}}),
    (
        ExternalSource("all", domain="hub", keys="a.*"),
        {"name": "KV_all", "external": {"api": "$JS.hub.API"}, "filter_subject": "$KV.all.a.*"},
    ),
]


@pytest.mark.parametrize(("upstream", "expected"), SOURCES)
def test_sources(upstream: ExternalSource, expected: dict[str, Any]) -> None:
    config = KeyValueConfig("all", sources=[upstream]).stream_config()
    assert config["sources"] == [expected]
    assert config["subjects"] == ["$KV.all.>"]
    assert KeyValueConfig.of(config).stream_config() == config


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"history": 0}, "1 to 64"),
    ({"history": 65}, "1 to 64"),
    ({"replicas": 0}, "1 to 5"),
    ({"replicas": 6}, "1 to 5"),
    ({"storage": "tape"}, "'file' or 'memory'"),
    ({"ttl": 0}, "0.1 seconds or more"),
    ({"ttl": -1}, "0.1 seconds or more"),
    ({"ttl": 1e-10}, "0.1 seconds or more"),
    ({"ttl": float("nan")}, "0.1 seconds or more"),
    ({"ttl": float("inf")}, "None for no limit"),
    ({"limit_marker_ttl": float("inf")}, "at least 1 second"),
    ({"max_bytes": 0}, "more than 0"),
    ({"max_value_size": -1}, "more than 0"),
    ({"limit_marker_ttl": 0.5}, "at least 1 second"),
    ({"mirror": ExternalSource("x"), "sources": [ExternalSource("y")]}, "not both"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_properties(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        KeyValueConfig("b", **given)


def test_wrong_names() -> None:
    with pytest.raises(InvalidNameError):
        KeyValueConfig("a.b")
    with pytest.raises(InvalidNameError):
        ExternalSource("a b")
    with pytest.raises(InvalidNameError):
        ExternalSource("a", keys=">.x")
    with pytest.raises(ConfigurationError, match=r"\$JS.hub.API"):
        ExternalSource("a", domain="hub", api_prefix="fromA")


@pytest.mark.parametrize(
    "config", [{"name": "ORDERS"}, {"name": "KV_x"}, {"name": "KV_x", "max_msgs_per_subject": 65}]
)
def test_config_of_other_stream(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedStreamError, match="is not a bucket"):
        KeyValueConfig.of(config)


def test_server_metadata_is_not_bucket_metadata() -> None:
    config = {**PLAIN, "metadata": {"_nats.req.level": "0", "mine": "x"}}
    assert KeyValueConfig.of(config).metadata == {"mine": "x"}


def test_status() -> None:
    state = {"messages": 3, "bytes": 99, "first_seq": 1, "last_seq": 7}
    answer = {"config": {**PLAIN, "max_age": 5_000_000_000}, "state": state, "created": "x"}
    status = BucketStatus.of(answer)
    assert (status.bucket, status.values, status.bytes) == ("CONFIGURATION", 3, 99)
    assert (status.history, status.ttl, status.last_revision) == (1, 5, 7)
    assert status.backing_store == "JetStream"
    assert status.stream_info is answer


def test_bucket_read_and_write_locations() -> None:
    """ADR-19: a mirror keeps the upstream's subjects; writes are sent to the upstream."""

    def bucket(config: KeyValueConfig) -> Bucket:
        stream = config.stream_config()
        return Bucket.of(StreamInfo(stream["name"], "", 0, 0, None, 0, 0, 0, stream))

    own = bucket(KeyValueConfig("b"))
    assert (own.prefix, own.write_prefix("$JS.API")) == ("$KV.b.", "$KV.b.")
    assert own.write_prefix("fromA") == "fromA.$KV.b."
    near = bucket(KeyValueConfig("copy", mirror=ExternalSource("main")))
    assert (near.prefix, near.write_prefix("$JS.API")) == ("$KV.main.", "$KV.main.")
    assert near.write_prefix("fromA") == "fromA.$KV.main."
    far = bucket(KeyValueConfig("copy", mirror=ExternalSource("main", domain="hub")))
    assert far.prefix == "$KV.main."
    assert far.write_prefix("$JS.API") == "$JS.hub.API.$KV.main."
    assert far.write_prefix("fromA") == "$JS.hub.API.$KV.main."
    assert not own.allows_message_ttl
    assert bucket(KeyValueConfig("b", limit_marker_ttl=1)).allows_message_ttl


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
    ("codec", "key", "error", "problem"),
    [
        (PATH, "a.b", KeyNotEncodableError, "stored as 'a.b', which is key 'a/b'; use that key"),
        (PATH, "/a/", KeyNotEncodableError, "stored as '_root_.a', which is key '/a'; use that"),
        (PATH, "_root_/a", KeyNotEncodableError, "'_root_.a', which is key '/a'"),
        (BOTH, "a.b", KeyNotEncodableError, "it would be stored as 'YQ.Yg', which is key 'a/b'"),
        (PATH, "user:1", InvalidNameError, "'user:1' is not a key"),
        (PATH, "/a//b", InvalidNameError, "'_root_.a..b' is not a key"),
        (BASE64, "a..b", InvalidNameError, "'YQ..Yg' is not a key"),
        (BASE64, "", InvalidNameError, "'' is not a key"),
        (BASE64, "\ud800", InvalidNameError, "surrogates not allowed"),
    ],
)
def test_key_that_has_no_stored_key_of_its_own(
    codec: KvCodec, key: str, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error) as caught:
        codec.raw_key(key)
    assert f"could not encode key {key!r} with key codec '" in str(caught.value)
    assert problem in str(caught.value)


def test_key_of_another_type() -> None:
    with pytest.raises(InvalidNameError, match="b'a' is not a key"):
        BASE64.raw_key(b"a")
    with pytest.raises(InvalidNameError, match="is not a key filter"):
        BASE64.raw_filters([b"a"])


def test_filters_encoded() -> None:
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
