"""Options: types, contradictions, unknown names, secrets."""

from __future__ import annotations

import re

import pytest

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.errors import ConfigurationError, InvalidNameError, OptionError
from nats_stream_source.jetstream.kv.codec import KvCodec, OnUndecodable
from nats_stream_source.options import CONNECTION, KV, kv_options

BASE = {"servers": "nats://127.0.0.1:4222", "bucket": "fleet"}


def test_defaults() -> None:
    options = kv_options(BASE)
    assert options.connection.servers == ("nats://127.0.0.1:4222",)
    assert options.connection.api_prefix == "$JS.API"
    assert (options.bucket, options.keys, options.common.max_rows) == ("fleet", (), None)
    assert options.common.fail_on_data_loss
    assert not options.include_history


def test_names_are_case_insensitive_and_lists_are_split() -> None:
    options = kv_options(
        {"SERVERS": "a:1, b:2", "bucket": "b", "KEYS": "x.*,a.>", "maxrowspertrigger": "7"}
    )
    assert options.connection.servers == ("a:1", "b:2")
    assert options.keys == ("a.>", "x.*")
    assert options.common.max_rows == 7


def test_codecs() -> None:
    options = kv_options(
        BASE | {"keyCodec": "path, base64", "valueCodec": "base64", "keys": "/a/>,/b"}
    )
    assert options.codec == KvCodec(("path", "base64"), ("base64",), OnUndecodable.FAIL)
    # The checkpoint has the filters that the server gets.
    assert options.keys == ("X3Jvb3Rf.YQ.>", "X3Jvb3Rf.Yg")
    options = kv_options(BASE | {"keyCodec": "base64", "keys": ">", "onUndecodable": "Skip"})
    assert (options.keys, options.codec.on_undecodable) == ((), OnUndecodable.SKIP)
    assert not options.added_columns
    options = kv_options(BASE | {"keyCodec": "base64", "includeRawKey": "true"})
    assert options.added_columns == {"includeRawKey"}


REFUSED: dict[str, tuple[dict[str, str], type[Exception], str]] = {
    "unknown, near": ({"includHistory": "true"}, OptionError, "did you mean 'includeHistory'"),
    "unknown, near a connection's": ({"server": "x"}, OptionError, "did you mean 'servers'"),
    "unknown, near nothing": ({"zzzzqqq": "1"}, OptionError, "'zzzzqqq'; docs/options.md"),
    "of another source": ({"batchsize": "1"}, OptionError, "write 'maxRowsPerTrigger'"),
    "more at least than at most": (
        {"minRowsPerTrigger": "10", "maxRowsPerTrigger": "9"},
        OptionError,
        "10 is more than 9",
    ),
    "a delay for nothing": (
        {"maxTriggerDelay": "10"},
        OptionError,
        "'maxTriggerDelay' has no effect without 'minRowsPerTrigger'",
    ),
    "an unknown codec": (
        {"keyCodec": "base32"},
        OptionError,
        "'keyCodec': 'base32' is not a codec, or several in their order, of base64, path; write",
    ),
    "an empty chain": ({"keyCodec": ""}, OptionError, "'keyCodec': '' is not a codec, or several"),
    "path for values": (
        {"valueCodec": "path"},
        OptionError,
        "'valueCodec': 'path' is not a codec, or several in their order, of base64; write 'base64'",
    ),
    "a filter that the codec cannot take": (
        {"keyCodec": "base64", "keys": "a.user:*"},
        InvalidNameError,
        r"could not encode key filter 'a.user:\*' with key codec 'base64': a wildcard is not",
    ),
    "filters that overlap once encoded": (
        {"keyCodec": "path", "keys": "/a,/a/"},
        ConfigurationError,
        "overlap",
    ),
    "undecodable without a codec": (
        {"onUndecodable": "skip"},
        OptionError,
        "'onUndecodable' has no effect without 'keyCodec' or 'valueCodec'; set it, or remove it",
    ),
    "raw key without a codec": (
        {"includeRawKey": "true", "valueCodec": "base64"},
        OptionError,
        "'includeRawKey' has no effect without 'keyCodec'; set it",
    ),
    "removed": ({"filterPushdown": "true"}, OptionError, "it was removed; set 'keys'"),
    "no boolean": (
        {"metaOnly": "yes"},
        OptionError,
        "invalid value for option 'metaOnly': 'yes' is not a boolean",
    ),
    "no integer": (
        {"startSequence": "1.5"},
        OptionError,
        "'startSequence': '1.5' is not an integer",
    ),
    "zero": ({"startSequence": "0"}, OptionError, "smaller than 1"),
    "negative": ({"maxRowsPerTrigger": "-4"}, OptionError, "smaller than 1"),
    "too large": ({"startSequence": str(2**63)}, OptionError, "larger than a sequence"),
    "no bytes": (
        {"maxBytesPerTrigger": "12x"},
        OptionError,
        "'maxBytesPerTrigger'.*'12x' is not a number of bytes",
    ),
    "no bytes at all": ({"maxBytesPerTrigger": "0k"}, OptionError, "smaller than 1"),
    "too many bytes": ({"maxBytesPerTrigger": f"{2**33}g"}, OptionError, "larger than"),
    "too many tasks": ({"minPartitions": "10001"}, OptionError, "larger than 10000"),
    "no tasks": ({"minPartitions": "0"}, OptionError, "smaller than 1"),
    "more tasks than rows": (
        {"minPartitions": "8", "maxRowsPerTrigger": "7"},
        OptionError,
        "7 rows do not make 8 partitions",
    ),
    "no seconds": (
        {"connectTimeout": "soon"},
        OptionError,
        "'connectTimeout': 'soon' is not a duration in seconds",
    ),
    "no time at all": ({"requestTimeout": "0"}, OptionError, "not between"),
    "infinite": ({"requestTimeout": "inf"}, OptionError, "not between"),
    "not a number": ({"requestTimeout": "nan"}, OptionError, "not between"),
    "an empty key": ({"keys": "a,,b"}, OptionError, "empty element"),
    "credentials in a URL": ({"servers": "nats://me:hunter2@h:1"}, OptionError, "'user' and"),
    "empty string": ({"user": ""}, OptionError, "empty string"),
    "a bucket with a line end": (
        {"bucket": "b\n"},
        InvalidNameError,
        r"'b\\n' is not a bucket name",
    ),
    "a bucket without a name": ({"bucket": ""}, OptionError, "empty string"),
    "a bucket with a dot": ({"bucket": "a.b"}, InvalidNameError, "'a.b' is not a bucket name"),
    "a key with a space": ({"keys": "a b"}, InvalidNameError, "not a key filter"),
    "overlapping keys": ({"keys": "a.*,a.b"}, ConfigurationError, "overlap"),
    "two beginnings": (
        {"updatesOnly": "true", "includeHistory": "true"},
        OptionError,
        "'updatesOnly' and 'includeHistory' contradict",
    ),
    "two beginnings, by sequence": (
        {"updatesOnly": "true", "startSequence": "4"},
        OptionError,
        "'updatesOnly' and 'startSequence' contradict",
    ),
    "two ways in": ({"user": "u", "password": "p", "token": "t"}, OptionError, "exclude"),
    "two ways in, by file": (
        {"credentials": "/c", "nkeySeedFile": "/n"},
        OptionError,
        "options 'credentials' or 'nkeySeedFile'",
    ),
    "a file and its content": (
        {"credentials": "/c", "credentialsContent": "secret"},
        OptionError,
        "options 'credentials' or 'credentialsContent'",
    ),
    "content that Spark would show": (
        {"credentialsContent": "hunter2"},
        OptionError,
        "'credentialsContent': the value would be shown .* Spark hides .* '# secret'$",
    ),
    "user alone": ({"user": "u"}, OptionError, "belong together"),
    "a password alone": ({"password": "p"}, OptionError, "belong together"),
    "a certificate alone": (
        {"tlsCertFile": "/c"},
        OptionError,
        "options 'tlsCertFile' or 'tlsKeyFile'",
    ),
    "a key alone": ({"tlsKeyFile": "/k"}, OptionError, "options 'tlsCertFile' or 'tlsKeyFile'"),
    "no address": ({"servers": "http://h:1"}, OptionError, "'http://h:1' is not an address"),
    "two kinds of address": ({"servers": "ws://h:1,nats://h:1"}, OptionError, "do not mix"),
    "TLS over ws": (
        {"servers": "ws://h:1", "tlsCaFile": "/ca"},
        OptionError,
        "requires TLS, and a ws:// URL does not use.*options 'tlsCaFile' or",
    ),
    "two prefixes": ({"domain": "d", "apiPrefix": "a"}, OptionError, "exclude"),
    "a domain of two tokens": ({"domain": "d.e"}, OptionError, "one token"),
    "a prefix with a wildcard": ({"apiPrefix": "a.*"}, OptionError, "wildcards"),
}


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(given: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kv_options({**BASE, **given})


@pytest.mark.parametrize("name", ["servers", "bucket"])
def test_required(name: str) -> None:
    given = {key: value for key, value in BASE.items() if key != name}
    with pytest.raises(OptionError, match=f"'{name}' is missing"):
        kv_options(given)


def test_false_contradicts_nothing() -> None:
    assert (
        kv_options({**BASE, "updatesOnly": "false", "startSequence": "3"}).start_position.sequence
        == 3
    )


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("12k", 12 << 10), (" 3M ", 3 << 20), ("2g", 2 << 30)]
)
def test_limits(text: str, count: int) -> None:
    options = kv_options({**BASE, "maxBytesPerTrigger": text, "minPartitions": "7"})
    assert (options.common.max_bytes, options.common.min_partitions) == (count, 7)
    assert (kv_options(BASE).common.max_bytes, kv_options(BASE).common.min_partitions) == (
        None,
        None,
    )


def test_prefixes() -> None:
    assert kv_options({**BASE, "domain": "hub"}).connection.api_prefix == "$JS.hub.API"
    assert kv_options({**BASE, "apiPrefix": "from.a"}).connection.api_prefix == "from.a"


def test_secrets_stay_out_of_repr_and_errors() -> None:
    options = kv_options({**BASE, "user": "me", "password": "hunter2"})
    assert "hunter2" not in repr(options)
    assert options.connection.password == "hunter2"
    for servers in ("nats://me:hunter2@h:1", "nats://me:hunter2@h:1,", "nats://me:hun,ter2@h:1"):
        with pytest.raises(OptionError) as caught:
            kv_options({**BASE, "servers": servers})
        assert "hun" not in str(caught.value)
    settings = ConnectionSettings(servers=("nats://me:hunter2@127.0.0.1:4222",))
    assert "hunter2" not in repr(settings)
    assert settings.server_list == "nats://127.0.0.1:4222"
    with pytest.raises(OptionError) as caught:
        kv_options({**BASE, "token": ""})
    assert "''" not in str(caught.value)
    with pytest.raises(OptionError) as caught:
        kv_options({**BASE, "credentialsContent": "hunter2"})
    assert "hunter2" not in str(caught.value)
    options = kv_options({**BASE, "credentialsContent": "hunter2 # secret"})
    assert "hunter2" not in repr(options)


def test_spark_hides_every_secret_option() -> None:
    """By its name; or, if the name does not match Spark's words, the value must match one."""
    for option in CONNECTION:
        if option.secret and option.name != "servers":
            named = re.search("secret|password|token", option.name, re.IGNORECASE)
            assert named or option.name == "credentialsContent"


ENCRYPTED = {
    "nats://h:1": False,
    "h:1": False,
    "tls://h:1": True,
    "nats://h:1,tls://h:2": True,
    "ws://h:1": False,
    "wss://h:1": True,
}


@pytest.mark.parametrize(("servers", "encrypted"), ENCRYPTED.items())
def test_addresses_require_tls(servers: str, encrypted: bool) -> None:
    assert kv_options({**BASE, "servers": servers}).connection.requires_tls == encrypted


@pytest.mark.parametrize(
    "given",
    [{"tlsCaFile": "/a"}, {"tlsCertFile": "/c", "tlsKeyFile": "/k"}, {"tlsHandshakeFirst": "true"}],
)
def test_options_require_tls(given: dict[str, str]) -> None:
    assert kv_options({**BASE, **given}).connection.requires_tls


def test_options_have_unique_names_and_descriptions() -> None:
    names = [option.name.lower() for option in CONNECTION + KV]
    assert len(set(names)) == len(names)
    assert all(option.description and option.kind for option in CONNECTION + KV)
