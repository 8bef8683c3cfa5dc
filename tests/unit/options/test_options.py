"""The options of reading: types, contradictions, unknown names, secrets, several streams."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.errors import ConfigurationError, OptionError
from nats_stream_source.jetstream.kv.codec import KvCodec, OnUndecodable
from nats_stream_source.options import (
    COMMON,
    CONNECTION,
    KV,
    STREAM,
    DeliverPolicy,
    KvOptions,
    Mode,
    StartPosition,
    StreamOptions,
    StreamSet,
    kv_options,
    stream_options,
)
from nats_stream_source.options.advice import KV_ADVICE, STREAM_ADVICE

SERVER = {"servers": "nats://127.0.0.1:4222"}
NOON = "2026-11-21T12:00:00Z"
NOON_NS = 1_795_262_400_000_000_000


def kv(mode: Mode | None = None, /, **given: str) -> KvOptions:
    """The options of a query of the bucket ``fleet``, or of those that are given."""
    named = {"bucket", "buckets", "bucketPattern"} & given.keys()
    return kv_options({**SERVER, **({} if named else {"bucket": "fleet"}), **given}, mode)


def stream(mode: Mode | None = None, /, **given: str) -> StreamOptions:
    """The options of a query of the stream ``ORDERS``, or of those that are given."""
    named = {"stream", "streams", "streamPattern", "subject"} & given.keys()
    return stream_options({**SERVER, **({} if named else {"stream": "ORDERS"}), **given}, mode)


# -- parsed values ---------------------------------------------------------------------------------


def test_defaults() -> None:
    options = kv()
    assert options.connection.servers == ("nats://127.0.0.1:4222",)
    assert options.connection.api_prefix == "$JS.API"
    common = options.common
    assert (options.bucket, options.keys, options.buckets) == ("fleet", (), None)
    assert (common.max_rows_per_trigger, common.max_bytes_per_trigger) == (None, None)
    assert (common.max_trigger_delay, common.outage_timeout, common.min_partitions) == (
        *(900, 300),
        None,
    )
    assert common.fail_on_data_loss
    assert not options.include_history


def test_names_are_case_insensitive_and_lists_are_split() -> None:
    given = {"SERVERS": "a:1, b:2", "bucket": "b", "KEYS": "x.*,a.>", "maxrowspertrigger": "7"}
    options = kv_options(given)
    assert options.connection.servers == ("a:1", "b:2")
    assert options.keys == ("a.>", "x.*")
    assert options.common.max_rows_per_trigger == 7


def test_codecs() -> None:
    options = kv(keyCodec="path, base64", valueCodec="base64", keys="/a/>,/b")
    assert options.codec == KvCodec(("path", "base64"), ("base64",), OnUndecodable.FAIL)
    # The checkpoint has the filters that the server gets.
    assert options.keys == ("X3Jvb3Rf.YQ.>", "X3Jvb3Rf.Yg")
    options = kv(keyCodec="base64", keys=">", onUndecodable="Skip")
    assert (options.keys, options.codec.on_undecodable) == ((), OnUndecodable.SKIP)
    assert not options.added_columns
    assert kv(keyCodec="base64", includeRawKey="true").added_columns == {"includeRawKey"}


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("12k", 12 << 10), (" 3M ", 3 << 20), ("2g", 2 << 30)]
)
def test_size_has_unit(text: str, count: int) -> None:
    assert kv(maxBytesPerTrigger=text).common.max_bytes_per_trigger == count


def test_prefixes() -> None:
    assert kv(domain="hub").connection.api_prefix == "$JS.hub.API"
    assert kv(apiPrefix="from.a").connection.api_prefix == "from.a"


@pytest.mark.parametrize(
    ("given", "encrypted"),
    [
        *(({"servers": url}, False) for url in ("nats://h:1", "h:1", "ws://h:1")),
        *(({"servers": url}, True) for url in ("tls://h:1", "nats://h:1,tls://h:2", "wss://h:1")),
        ({"tlsCaFile": "/a"}, True),
        ({"tlsCertFile": "/c", "tlsKeyFile": "/k"}, True),
        ({"tlsHandshakeFirst": "true"}, True),
    ],
)
def test_connection_requires_tls(given: dict[str, str], encrypted: bool) -> None:
    assert kv(**given).connection.requires_tls == encrypted


def test_false_contradicts_nothing() -> None:
    assert kv(updatesOnly="false", startSequence="3").start_position.sequence == 3


@pytest.mark.parametrize(
    ("given", "position"),
    [
        ({}, StartPosition(DeliverPolicy.ALL)),
        *(
            ({"deliverPolicy": policy}, StartPosition(DeliverPolicy(policy.lower())))
            for policy in ("all", "New", "last", "last_per_subject")
        ),
        ({"startSequence": "7"}, StartPosition(DeliverPolicy.BY_START_SEQUENCE, sequence=7)),
        (
            {"deliverPolicy": "by_start_sequence", "startSequence": "7"},
            StartPosition(DeliverPolicy.BY_START_SEQUENCE, sequence=7),
        ),
        (
            {"startTime": "2026-11-21T13:00:00+01:00"},
            StartPosition(DeliverPolicy.BY_START_TIME, time=NOON_NS),
        ),
    ],
    ids=str,
)
def test_start_positions(given: dict[str, str], position: StartPosition) -> None:
    assert stream(**given).start_position == position


def test_stream_options_all_are_parsed() -> None:
    given = {
        "FILTERSUBJECTS": "orders.b, orders.a.>",
        "startTime": NOON,
        "endTime": "2026-11-21T12:00:00.5Z",
        "headersOnly": "true",
        "minLastSequence": "12",
        "minPartitions": "3",
        "includeHeaders": "true",
        "failOnDataLoss": "false",
    }
    options = stream(Mode.BATCH, **given)
    assert (options.stream, options.filter_subjects) == ("ORDERS", ("orders.a.>", "orders.b"))
    assert (options.end_sequence, options.end_time) == (None, NOON_NS + 500_000_000)
    assert (options.headers_only, options.min_last_sequence) == (True, 12)
    common = options.common
    assert (common.min_partitions, common.fail_on_data_loss) == (3, False)
    assert options.added_columns == {"includeHeaders"}


def test_subject_stands_for_its_stream() -> None:
    options = stream(subject="orders.*")
    assert (options.stream, options.filter_subjects) == (None, ("orders.*",))
    assert stream(filterSubjects=">").filter_subjects == ()


def test_options_of_each_mode_are_parsed_without_mode() -> None:
    assert kv(asOfSequence="5").as_of_sequence == 5
    assert kv(maxRowsPerTrigger="5").common.max_rows_per_trigger == 5
    assert stream(endSequence="5").end_sequence == 5


def test_list_of_buckets() -> None:
    options = kv(buckets="ships, cars")
    assert (options.bucket, options.buckets) == (None, StreamSet("buckets", ("cars", "ships")))
    assert str(options.buckets) == "buckets=cars,ships"
    assert options.buckets is not None
    assert [options.buckets.selects(name) for name in ("cars", "car", "carss")] == [True, 0, 0]


def test_pattern_matches_whole_names() -> None:
    found = stream(streamPattern="site-[0-9]+", discoveryInterval="5").streams
    assert found == StreamSet("streamPattern", pattern="site-[0-9]+", discovery_interval=5.0)
    names = ("site-1", "site-12", "my-site-1", "site-1-old")
    assert [found.selects(name) for name in names] == [True, True, False, False]
    default = stream(streamPattern="a").streams
    assert default is not None
    assert default.discovery_interval == 30


# -- refused ---------------------------------------------------------------------------------------

# A row: the options that are given, and a part of the error.
Refused = list[tuple[dict[str, str], str]]

OF_BUCKET: Refused = [
    # types
    ({"metaOnly": "yes"}, "'metaOnly': 'yes' is not a boolean: neither true nor false"),
    ({"startSequence": "1.5"}, "'startSequence': '1.5' is not an integer"),
    ({"startSequence": "0"}, "smaller than 1"),
    ({"startSequence": "-1"}, "smaller than 1; write 1 or higher .*updatesOnly=true"),
    ({"startSequence": str(2**63)}, "larger than a sequence"),
    ({"maxBytesPerTrigger": "12x"}, "'maxBytesPerTrigger'.*'12x' is not a number of bytes"),
    ({"maxBytesPerTrigger": "0k"}, "smaller than 1"),
    ({"maxBytesPerTrigger": f"{2**33}g"}, "larger than"),
    ({"minPartitions": "10001"}, "larger than 10000"),
    ({"connectTimeout": "soon"}, "'connectTimeout': 'soon' is not a duration in seconds"),
    *(({"requestTimeout": text}, "not between 0.05 and 3,600") for text in ("0", "inf", "nan")),
    ({"keys": "a,,b"}, "empty element"),
    ({"user": ""}, "empty string"),
    ({"bucket": "a,b"}, "'a,b' is a list, expected one name; write the name of one"),
    *(
        ({"keyCodec": text}, "is not a codec, or several in their order, of base64, path; write")
        for text in ("base32", "")
    ),
    ({"valueCodec": "path"}, "'path' is not a codec, .* of base64; write 'base64'"),
    ({"bucketPattern": "a("}, r"'bucketPattern'.*'a\('"),
    ({"bucketPattern": ""}, "'bucketPattern'"),
    ({"startTimeStrategy": "first", "startTime": NOON}, "is not one of error, latest"),
    # names
    ({"bucket": "b\n"}, r"'b\\n' is not a bucket name"),
    ({"bucket": ""}, "empty string"),
    ({"bucket": "a.b"}, "'a.b' is not a bucket name"),
    ({"buckets": "a,b.c"}, "'b.c' is not a bucket name"),
    ({"keys": "a b"}, "not a key filter"),
    ({"keys": "a.*,a.b"}, "overlap"),
    ({"keyCodec": "path", "keys": "/a,/a/"}, "overlap"),
    (
        {"keyCodec": "base64", "keys": "a.user:*"},
        r"could not encode key filter 'a.user:\*' with key codec 'base64': a wildcard is not",
    ),
    # the connection
    ({"servers": "nats://me:hunter2@h:1"}, "'user' and"),
    ({"servers": "http://h:1"}, "'http://h:1' is not an address"),
    ({"servers": "ws://h:1,nats://h:1"}, "do not mix"),
    ({"servers": "ws://h:1", "tlsCaFile": "/ca"}, "a ws:// URL does not use.*'tlsCaFile' or"),
    ({"user": "u", "password": "p", "token": "t"}, "exclude"),
    ({"credentials": "/c", "nkeySeedFile": "/n"}, "options 'credentials' or 'nkeySeedFile'"),
    (
        {"credentials": "/c", "credentialsContent": "secret"},
        "options 'credentials' or 'credentialsContent'",
    ),
    (
        {"credentialsContent": "hunter2"},
        "'credentialsContent': the value would be shown .* Spark hides .* '# secret'$",
    ),
    *(({name: "x"}, "belong together") for name in ("user", "password")),
    *(({name: "/x"}, "'tlsCertFile' or 'tlsKeyFile'") for name in ("tlsCertFile", "tlsKeyFile")),
    ({"domain": "d", "apiPrefix": "a"}, "exclude"),
    ({"domain": "d.e"}, "one token"),
    ({"apiPrefix": "a.*"}, "wildcards"),
    # unknown names
    ({"includHistory": "true"}, "did you mean 'includeHistory'"),
    ({"server": "x"}, "did you mean 'servers'"),
    ({"zzzzqqq": "1"}, "'zzzzqqq'; docs/options.md"),
    ({"batchsize": "1"}, "write 'maxRowsPerTrigger'"),
    ({"startingoffsets": "latest"}, "'startingoffsets': write updatesOnly=true for latest"),
    ({"stream": "S"}, r"'stream': write 'bucket', or format\('nats_stream'\)"),
    ({"kafka.bootstrap.servers": "h"}, "write 'servers'"),
    ({"provider": "nats_kv"}, "CREATE TEMPORARY VIEW name USING nats_kv OPTIONS"),
    ({"filterPushdown": "true"}, "it was removed; set 'keys'"),
    # contradictions
    ({"minRowsPerTrigger": "10", "maxRowsPerTrigger": "9"}, "10 is more than 9"),
    ({"minPartitions": "8", "maxRowsPerTrigger": "7"}, "7 rows do not make 8 partitions"),
    ({"maxTriggerDelay": "10"}, "'maxTriggerDelay' has no effect without 'minRowsPerTrigger'"),
    (
        {"onUndecodable": "skip"},
        "'onUndecodable' has no effect without 'keyCodec' or 'valueCodec'; set it, or remove it",
    ),
    ({"includeRawKey": "true", "valueCodec": "base64"}, "no effect without 'keyCodec'; set it"),
    ({"startTimeStrategy": "error"}, "no effect without 'startTime'"),
    *(
        ({"updatesOnly": "true", name: text}, f"'updatesOnly' and '{name}' contradict")
        for name, text in (("includeHistory", "true"), ("startSequence", "4"), ("startTime", NOON))
    ),
    *(
        ({"startTime": text, "startSequence": "3"}, "'startSequence' and 'startTime' contradict")
        for text in (NOON, "1970-01-01T00:00:00Z")
    ),
    ({"asOfSequence": "5"}, "for spark.read, this is"),
    ({"asOfTime": NOON}, "for spark.read, this is"),
    # several buckets
    ({"bucket": "a", "buckets": "b"}, "'bucket' and 'buckets' contradict"),
    ({"bucket": "a", "bucketPattern": "b"}, "'bucket' and 'bucketPattern'"),
    ({"buckets": "a", "bucketPattern": "b"}, "'buckets' and 'bucketPat"),
    ({"buckets": ""}, "'buckets'"),
    ({"buckets": "a,b,a"}, "'a' is named twice"),
    ({"buckets": "a", "discoveryInterval": "5"}, "no effect without 'bucketPattern'"),
    ({"buckets": "a,b", "startSequence": "5"}, "'startSequence' and 'buckets' contradict"),
    (
        {"bucketPattern": "a", "minLastRevision": "5"},
        "'minLastRevision' and 'bucketPattern' contradict",
    ),
    ({"startSequence": '{"fleet": 1}'}, r"the query reads one bucket; .* or set 'buckets'"),
]

STARTS: Refused = [
    ({"startSequence": '{"a": 17,'}, "'startSequence': .* is not a JSON object: Expect"),
    ({"startSequence": '{"a": {"x": 1}}'}, "has .* for 'a', expected a sequence"),
    ({"startSequence": '{"a": 1, "a": 2}'}, "names 'a' twice"),
    ({"startSequence": '{"a": 0, "b": 1}'}, "has 0 for 'a', which is smaller than 1"),
    ({"startSequence": '{"a": true}'}, "has True for 'a', expected a sequence, 'earl"),
    ({"startSequence": '{"a": "first"}'}, "has 'first' for 'a', expected a sequence"),
    ({"startTime": '{"a": 5}'}, "has 5 for 'a', expected a timestamp, 'earl"),
    ({"startTime": '{"a": "noon"}'}, "has 'noon' for 'a', which is not an RFC 3339"),
    ({"startSequence": '{"a": 1, "b": 1, "c": 1}'}, "'c', which buckets=a,b does not select; rem"),
    (
        {"startSequence": '{"a": 1}'},
        "'b' of buckets=a,b is missing; add its start, which may be 'earliest' or 'latest'",
    ),
    (
        {"startSequence": '{"a": 1, "b": 1}', "updatesOnly": "true"},
        "'updatesOnly' and 'startSequence' contradict",
    ),
]
"""With the buckets ``a`` and ``b``."""

OF_BUCKET_BATCH: Refused = [
    ({"asOfSequence": "5", "asOfTime": NOON}, "they name two states"),
    ({"asOfSequence": "5", "startSequence": "3"}, "'startSequence' and 'asOfSequence' contradict"),
    ({"asOfTime": NOON, "includeHistory": "true"}, "'includeHistory' and 'asOfTime' contradict"),
    ({"updatesOnly": "true"}, "return nothing"),
    ({"maxRowsPerTrigger": "5"}, "for spark.readStream"),
    ({"bucketPattern": "a", "discoveryInterval": "5"}, "discoveryInterval"),
    ({"buckets": "a,b", "asOfSequence": "5"}, "'asOfSequence' and 'buckets' contradict"),
]

OF_STREAM: Refused = [
    ({"stream": ""}, "option 'stream'"),
    ({"stream": "A,B"}, "'A,B' is a list, expected one name; write the name of"),
    ({"stream": " S"}, "' S' is not a stream's name"),
    ({"stream": "a.b"}, "'subject' looks a stream up"),
    ({"subject": "a\n"}, r"'a\\n' is not a subject filter"),
    *(
        ({"filterSubjects": text}, message)
        for text, message in (
            ("a,", "empty element"),
            ("a b", "'a b' is not a"),
            ("a.b*", "is not a subject filter"),
            ("a.>.b", "is not a"),
            ("a..b", "'a..b' is not a subject"),
            ("a.*,a.b", "overlap: a subject .* 'filterSubjects'"),
        )
    ),
    ({"stream": "A", "subject": "a"}, "'stream' and 'subject' contradict"),
    ({"subject": "a", "filterSubjects": "b"}, "'subject' and 'filterSubjects' contradict"),
    ({"startSequence": "-1"}, "smaller than 1; write 1 .*deliverPolicy=new"),
    *(
        ({"startTime": text}, "'startTime'.*for example 2026-11-21T08:00:00Z")
        for text in ("2026-11-21T12:00:00", "2026-11-21", "2026-13-21T12:00:00Z")
    ),
    ({"deliverPolicy": "first"}, "is not one of all, new, last, last_per_subject, by_start_seq"),
    ({"deliverPolicy": "by_start_sequence"}, "'startSequence' is missing"),
    ({"deliverPolicy": "by_start_time"}, "'startTime' is missing"),
    *(
        ({"deliverPolicy": policy, "startSequence": "3"}, "'deliverPolicy' and 'startSequence' con")
        for policy in ("new", "by_start_time")
    ),
    ({"startTime": NOON, "startSequence": "3"}, "'startSequence' and 'startTime' contradict"),
    ({"endSequence": "3"}, "for spark.read, this is"),
    ({"endTime": NOON}, "for spark.read, this is"),
    ({"filterSubject": "a"}, "mean 'filterSubjects'"),
    ({"keys": "a"}, "unknown option 'keys'"),
    ({"startingoffsets": "latest"}, ".*deliverPolicy=new for latest"),
    ({"bucket": "fleet"}, r"'bucket': write format\('nats_kv'\) to read a bucket"),
    ({"keyCodec": "base64"}, r"'keyCodec': the subjects and messages of a stream "),
    ({"includerawkey": "true"}, r"not encoded; write format\('nats_kv'\) to read"),
    ({"provider": "x"}, "VIEW name USING nats_stream OPTIONS .* stream '...'"),
]

OF_STREAM_BATCH: Refused = [
    ({"maxBytesPerTrigger": "5"}, "for spark.readStream, this is"),
    ({"deliverPolicy": "new"}, "return nothing"),
    ({"endSequence": "5", "endTime": NOON}, "'endSequence' and 'endTime' contradict"),
    ({"startSequence": "6", "endSequence": "5"}, "lies before"),
    ({"startTime": NOON, "endTime": NOON}, "does not lie after"),
    (
        {"streams": "A", "startTime": '{"A": "2026-11-22T00:00:00Z"}', "endTime": NOON},
        "'endTime' does not lie after 'startTime'",
    ),
    ({"deliverPolicy": "last", "endSequence": "5"}, "contradict"),
    *(
        ({"streams": "a,b", option: "5"}, f"'{option}' and 'streams' contradict")
        for option in ("startSequence", "minLastSequence", "endSequence")
    ),
    (
        {"streams": "A", "startSequence": '{"A": "latest"}'},
        r"'latest' for 'A', which is for spark.readStream",
    ),
]


REFUSED = [
    *((kv, Mode.STREAMING, *row) for row in OF_BUCKET),
    *((kv, Mode.STREAMING, {"buckets": "a,b", **given}, text) for given, text in STARTS),
    *((kv, Mode.BATCH, *row) for row in OF_BUCKET_BATCH),
    *((stream, Mode.STREAMING, *row) for row in OF_STREAM),
    *((stream, Mode.BATCH, *row) for row in OF_STREAM_BATCH),
]


@pytest.mark.parametrize(
    ("parse", "mode", "given", "message"),
    REFUSED,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_are_refused(
    parse: Callable[..., object], mode: Mode, given: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(mode, **given)


def test_value_of_another_type_is_refused_by_its_name() -> None:
    with pytest.raises(OptionError, match="'keys': it is a list, expected a text, number or"):
        kv_options({**SERVER, "bucket": "fleet", "keys": ["a"]})


@pytest.mark.parametrize(("parse", "name"), [(kv_options, "bucket"), (stream_options, "stream")])
def test_required_options(parse: type, name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' is missing"):
        parse(SERVER)
    with pytest.raises(OptionError, match="'servers' is missing"):
        parse({name: "X"})
    # Spark reads a table of CREATE TABLE without its options.
    with pytest.raises(OptionError, match=r"no option is set, .*CREATE TEMPORARY VIEW name USING"):
        parse({})


def test_pattern_without_start_of_streams() -> None:
    assert kv(bucketPattern="a.*", startSequence="{}").start_position.by_name == {}


# -- secrets, the tables ---------------------------------------------------------------------------


def test_secrets_stay_out_of_repr_and_errors() -> None:
    options = kv(user="me", password="hunter2")
    assert "hunter2" not in repr(options)
    assert options.connection.password == "hunter2"
    for servers in ("nats://me:hunter2@h:1", "nats://me:hunter2@h:1,", "nats://me:hun,ter2@h:1"):
        with pytest.raises(OptionError) as caught:
            kv(servers=servers)
        assert "hun" not in str(caught.value)
    settings = ConnectionSettings(servers=("nats://me:hunter2@127.0.0.1:4222",))
    assert "hunter2" not in repr(settings)
    assert settings.server_list == "nats://127.0.0.1:4222"
    with pytest.raises(OptionError) as caught:
        kv(token="")
    assert "''" not in str(caught.value)
    with pytest.raises(OptionError) as caught:
        kv(credentialsContent="hunter2")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(kv(credentialsContent="hunter2 # secret"))


def test_spark_hides_every_secret_option() -> None:
    """By its name; or, if the name does not match Spark's words, the value must match one."""
    for option in CONNECTION:
        if option.secret and option.name != "servers":
            named = re.search("secret|password|token", option.name, re.IGNORECASE)
            assert named or option.name == "credentialsContent"


def test_options_have_unique_names_and_descriptions() -> None:
    for table in (CONNECTION + KV, CONNECTION + STREAM):
        names = [option.name.lower() for option in table]
        assert len(set(names)) == len(names)
        assert all(option.description and option.kind for option in table)


def test_advice_is_for_unknown_names_and_names_options() -> None:
    own = {option.name.lower() for option in CONNECTION + COMMON}
    of_kv = own | {option.name.lower() for option in KV}
    of_stream = own | {option.name.lower() for option in STREAM}
    for_kv, for_stream = ({name.lower() for name in one} for one in (KV_ADVICE, STREAM_ADVICE))
    assert not of_kv & for_kv
    assert not of_stream & for_stream
    # Each format has advice for every option of the other.
    assert of_stream - of_kv <= for_kv
    assert of_kv - of_stream <= for_stream
