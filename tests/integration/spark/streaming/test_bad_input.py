"""Bad input: one error each, which names what to change, and no partial output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AuthorizationError,
    BucketNotFoundError,
    JetStreamNotEnabledError,
    NatsSourceError,
    OffsetError,
    PermissionDeniedError,
    StreamNotFoundError,
)
from tests.support.nats.buckets import create_bucket, publish, put
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import configured_server
from tests.support.query_driver.driver import new_query, read_all, sequences

SECRET = "hunter2-is-secret"


# -- options: found when the source is loaded, before anything connects --------------------------

NOWHERE = {"servers": "nats://127.0.0.1:1", "bucket": "fleet"}


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        ({"updateOnly": "true"}, "OptionError", "'updateonly'; did you mean 'updatesOnly'?"),
        ({"password": SECRET}, "OptionError", "'user' and 'password' belong together"),
        ({"user": "me", "password": SECRET, "token": "t"}, "OptionError", "'user' and 'token'"),
        ({"servers": f"nats://me:{SECRET}@h:1"}, "OptionError", "'user' and 'password', or"),
        ({"pasword": SECRET}, "OptionError", "did you mean 'password'?"),
        ({"keys": "kéy"}, "InvalidNameError", "is not a key filter"),
        ({"keys": "a.b.>,*.b.c"}, "ConfigurationError", "overlap"),
    ],
    ids=str,
)
def test_options_in_spark(
    spark: SparkSession, options: dict[str, Any], error: str, fragment: str
) -> None:
    """One of each kind of error, and those with a secret; the others are those of the parser."""
    with pytest.raises(AnalysisException) as caught:
        spark.readStream.format("nats_kv").options(**(NOWHERE | options)).load()
    text = str(caught.value)
    assert f"nats_stream_source.errors.{error}: " in text
    assert fragment in text
    assert SECRET not in text


# -- without Spark: what is on the server, users and permissions, checkpoints --------------------


def refused(error: type[NatsSourceError], text: str, url: str, **options: Any) -> None:
    """The query fails with this error, whose text has no secret."""
    with pytest.raises(error, match=re.escape(text)) as caught:
        read_all(url, connectTimeout=1, **options)
    assert SECRET not in str(caught.value)


MISSING: dict[str, tuple[type[NatsSourceError], dict[str, str], tuple[str, ...]]] = {
    "bucket": (
        BucketNotFoundError,
        {"bucket": "NOWHERE"},
        ("bucket 'NOWHERE' does not exist on nats://", "check 'bucket', 'servers' and 'domain'"),
    ),
    "stream": (
        StreamNotFoundError,
        {"stream": "NOWHERE"},
        ("stream 'NOWHERE': it does not exist on nats://",),
    ),
    "domain": (
        JetStreamNotEnabledError,
        {"stream": "S", "domain": "no"},
        ("options 'domain' or 'apiPrefix'",),
    ),
}


@pytest.mark.parametrize(("error", "options", "texts"), MISSING.values(), ids=MISSING)
def test_missing(
    url: str,
    error: type[NatsSourceError],
    options: dict[str, str],
    texts: tuple[str, ...],
) -> None:
    for text in texts:
        refused(error, text, url, **options)


DENIED = {
    "info": ('publish: {deny: "$JS.API.STREAM.INFO.>"}', "$JS.API.STREAM.INFO.KV_guarded"),
    "inbox": ('subscribe: {deny: "_INBOX.>"}', "_INBOX.>"),
    "message": ('publish: {deny: "$JS.API.STREAM.MSG.GET.>"}', "$JS.API.STREAM.MSG.GET.KV_guarded"),
    "consumer": ('publish: {deny: "$JS.API.CONSUMER.CREATE.>"}', "$JS.API.CONSUMER.CREATE."),
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    """A server with users, and the bucket ``guarded`` with three entries."""
    users = [f'{{user: all, password: "{SECRET}"}}'] + [
        f'{{user: {name}, password: "{SECRET}", permissions: {{{permissions}}}}}'
        for name, (permissions, _) in DENIED.items()
    ]
    with configured_server("authorization {users: [\n" + "\n".join(users) + "\n]}\n") as server:
        url = server.url.replace("//", f"//all:{SECRET}@")
        create_bucket(url, "guarded", history=5)
        for key in ("a", "b", "c"):
            put(url, "guarded", key, b"1")
        yield server


@pytest.mark.parametrize("name", DENIED)
def test_permission_missing(guarded: NatsServer, name: str) -> None:
    # A key filter, so that the planner asks for messages too. Three entries with their history are
    # a small range, which needs no consumer; the initial values of a bucket with history do.
    given: dict[str, Any] = {"keys": "a,b", "includeHistory": name != "consumer"}
    user = {"bucket": "guarded", "user": name, "password": SECRET}
    refused(PermissionDeniedError, DENIED[name][1], guarded.url, **user, **given)


@pytest.mark.parametrize(
    "options",
    [
        {"user": "all", "password": f"{SECRET}-not"},
        {"user": "nobody", "password": SECRET},
        {"token": SECRET},
        {},
    ],
    ids=["wrong password", "unknown user", "a token", "none"],
)
def test_wrong_credentials(guarded: NatsServer, options: dict[str, str]) -> None:
    text = f"{guarded.url} refused the credentials"
    refused(AuthorizationError, text, guarded.url, bucket="guarded", **options)


def test_right_credentials(guarded: NatsServer) -> None:
    """Without this the tests above would prove little."""
    user = {"user": "all", "password": SECRET}
    assert len(read_all(guarded.url, bucket="guarded", keys="a,b", **user)) == 2


def test_checkpoint_of_another_query(url: str) -> None:
    for bucket in ("mine", "other"):
        create_bucket(url, bucket)
    put(url, "mine", "a", b"1")
    with new_query(url, bucket="mine", keys="a,b") as query:
        assert len(query.read_new()) == 1
    given: dict[str, Any] = {"offset": query.offset, "bucket": "mine"}
    for text, changed in {
        "of stream KV_mine, the query reads": {"bucket": "other", "keys": "a,b"},
        "keys=a,b, the query has keys=a,c": {"keys": "a,c"},
        "keys=a,b, the query has keys=(all)": {},
    }.items():
        refused(OffsetError, text, url, **{**given, **changed})
    assert read_all(url, **given, keys="b,a") == []  # the order says nothing


def test_looked_up_subject_is_filter(url: str, name: str) -> None:
    some = f"{name}.a"
    create_stream(url, name, f"{name}.*")
    publish(url, ((f"{name}.{'ab'[i % 2]}", b"%d" % i, None) for i in range(5)))
    with new_query(url, subject=some) as query:
        assert sequences(query.read_new()) == [1, 3, 5]
    given: dict[str, Any] = {"offset": query.offset}
    other = f"subject={some}, the query has subject={name}.b"
    refused(OffsetError, other, url, **given, subject=f"{name}.b")
    every = (f"={some}, the query has filterSubjects=(all), and", "use the same option")
    for text in every:
        refused(OffsetError, text, url, **given, stream=name)
    assert read_all(url, **given, stream=name, filterSubjects=some) == []
