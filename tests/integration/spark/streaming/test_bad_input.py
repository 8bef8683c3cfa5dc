"""Bad input: one error each, which names what to change, and no partial output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import JetStreamNotEnabledError, OffsetError, StreamNotFoundError
from tests.support.nats.buckets import create_bucket, publish, put
from tests.support.nats.streams import create_stream
from tests.support.query_driver.driver import new_query, sequences
from tests.support.spark.scenario import Action, Create, ExpectError, Put, Run, Scene, play, read

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


# -- the server and what is on it ---------------------------------------------------------------


def fails(error: str, *fragments: str, options: dict[str, Any] | None = None) -> Action:
    """A run with these options fails."""
    return ExpectError(error, fragments, Run(options or {}), absent=(SECRET,))


def test_bucket_missing(scene: Scene) -> None:
    what = f"bucket '{scene.bucket}' does not exist on {scene.url}"
    play(scene, fails("BucketNotFoundError", what, "check 'bucket', 'servers' and 'domain'"))
    assert scene.offsets() == []


# -- users and permissions ----------------------------------------------------------------------

DENIED = {
    "info": ('publish: {deny: "$JS.API.STREAM.INFO.>"}', "$JS.API.STREAM.INFO.KV_guarded"),
    "inbox": ('subscribe: {deny: "_INBOX.>"}', "_INBOX.>"),
    "message": ('publish: {deny: "$JS.API.STREAM.MSG.GET.>"}', "$JS.API.STREAM.MSG.GET.KV_guarded"),
    "consumer": ('publish: {deny: "$JS.API.CONSUMER.CREATE.>"}', "$JS.API.CONSUMER.CREATE."),
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with users, and the bucket ``guarded`` with three entries."""
    users = [f'{{user: all, password: "{SECRET}"}}'] + [
        f'{{user: {name}, password: "{SECRET}", permissions: {{{permissions}}}}}'
        for name, (permissions, _) in DENIED.items()
    ]
    config = tmp_path_factory.mktemp("guarded") / "server.conf"
    config.write_text("authorization {users: [\n" + "\n".join(users) + "\n]}\n")
    with NatsServer(config=config) as server:
        url = server.url.replace("//", f"//all:{SECRET}@")
        create_bucket(url, "guarded", history=5)
        for key in ("a", "b", "c"):
            put(url, "guarded", key, b"1")
        yield server


@pytest.fixture
def guarded_scene(spark: SparkSession, guarded: NatsServer, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(spark, guarded, "guarded", tmp_path)
    try:
        yield scene
    finally:
        scene.close()


@pytest.mark.parametrize("name", DENIED)
def test_permission_missing(guarded_scene: Scene, name: str) -> None:
    # A key filter, so that the planner asks for messages too. Three entries with their history are
    # a small range, which needs no consumer; the initial values of a bucket with history do.
    history = name != "consumer"
    options = {"user": name, "password": SECRET, "keys": "a,b", "includeHistory": history}
    play(guarded_scene, fails("PermissionDeniedError", DENIED[name][1], options=options))
    assert guarded_scene.rows == []


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
def test_wrong_credentials(guarded_scene: Scene, options: dict[str, str]) -> None:
    refused = f"{guarded_scene.url} refused the credentials"
    play(guarded_scene, fails("AuthorizationError", refused, options=options))
    assert guarded_scene.offsets() == []


def test_right_credentials(guarded_scene: Scene) -> None:
    """Without this the tests above would prove little. Checkpoint and plan hold no secret."""
    options = {"user": "all", "password": SECRET, "keys": "a,b"}
    play(guarded_scene, Run(options))
    # As DataFrame.explain prints it, which has no way to return it.
    plan = read(guarded_scene, options)._jdf.queryExecution().toString()
    assert "guarded" in plan
    assert SECRET not in plan
    assert len(guarded_scene.rows) == 2
    for path in guarded_scene.checkpoint.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


# -- checkpoints --------------------------------------------------------------------------------


def test_checkpoint_of_another_query(scene: Scene) -> None:
    another = {"keys": "a,b", "bucket": f"{scene.bucket}_other"}
    create_bucket(scene.url, another["bucket"])
    play(
        scene,
        Create(),
        Put("a", "1"),
        Run({"keys": "a,b"}),
        fails("OffsetError", f"of stream KV_{scene.bucket}, the query reads", options=another),
        fails("OffsetError", "keys=a,b, the query has keys=a,c", options={"keys": "a,c"}),
        fails("OffsetError", "keys=a,b, the query has keys=(all)"),
        Run({"keys": "b,a"}),  # the order says nothing
    )
    assert len(scene.rows) == 1


@pytest.fixture
def name(shared_server: NatsServer, name: str) -> str:
    """A stream with five messages, of two subjects."""
    url = shared_server.url
    create_stream(url, name, f"{name}.*")
    publish(url, ((f"{name}.{'ab'[i % 2]}", b"%d" % i, None) for i in range(5)))
    return name


# -- streams, without Spark: what is on the server, then checkpoints -------------------------------


def test_stream_missing(shared_server: NatsServer) -> None:
    with (
        pytest.raises(StreamNotFoundError, match="stream 'NOWHERE': it does not exist on nats://"),
        new_query(shared_server.url, stream="NOWHERE") as query,
    ):
        query.read_new()
    with (
        pytest.raises(JetStreamNotEnabledError, match="options 'domain' or 'apiPrefix'"),
        new_query(shared_server.url, stream="S", domain="no", connectTimeout=1) as query,
    ):
        query.read_new()


def test_looked_up_subject_is_filter(shared_server: NatsServer, name: str) -> None:
    url, some = shared_server.url, f"{name}.a"
    with new_query(url, subject=some) as query:
        assert sequences(query.read_new()) == [1, 3, 5]
        offset = query.offset
    with (
        pytest.raises(OffsetError, match=f"subject={some}, the query has subject={name}.b"),
        new_query(url, offset=offset, subject=f"{name}.b") as query,
    ):
        query.read_new()
    with (
        pytest.raises(OffsetError, match=rf"={some}, the query has filterSubjects=\(all\), .*same"),
        new_query(url, offset=offset, stream=name) as query,
    ):
        query.read_new()
    with new_query(url, stream=name, offset=offset, filterSubjects=some) as query:
        assert query.read_new() == []
