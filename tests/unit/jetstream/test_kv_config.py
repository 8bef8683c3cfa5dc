"""ADR-8's bucket properties as a stream's configuration, and back."""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.kv.config import (
    BucketStatus,
    ExternalSource,
    KeyValueConfig,
    Republish,
)
from nats_stream_source.jetstream.stream_info import StreamInfo

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


def test_document_example_configuration() -> None:
    """ADR-8's ``CONFIGURATION``, with today's field names (measurements.md, Servers 13)."""
    config = KeyValueConfig("CONFIGURATION", history=5).stream_config()
    assert config == {**PLAIN, "max_msgs_per_subject": 5}


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
        {
            "name": "KV_main",
            "subject_transforms": [{"src": "$KV.main.a.>", "dest": "$KV.all.a.>"}],
        },
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
                {
                    "src": "$KV.main.*.b.*.>",
                    "dest": "$KV.all.{{wildcard(1)}}.b.{{wildcard(2)}}.>",
                }
            ],
        },
    ),
    # The same bucket elsewhere has the same subjects.
    (ExternalSource("all", domain="hub"), {"name": "KV_all", "external": {"api": "$JS.hub.API"}}),
    (
        ExternalSource("all", domain="hub", keys="a.*"),
        {
            "name": "KV_all",
            "external": {"api": "$JS.hub.API"},
            "filter_subject": "$KV.all.a.*",
        },
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
    "config",
    [{"name": "ORDERS"}, {"name": "KV_x"}, {"name": "KV_x", "max_msgs_per_subject": 65}],
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
