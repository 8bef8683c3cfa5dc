"""Bad input: one clear error each, that names what to change, and no partial output."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer, free_port
from tests.support.nats.buckets import create_bucket, put
from tests.support.spark.scenario import (
    Create,
    Do,
    ExpectError,
    Put,
    Run,
    Scene,
    logged_offset,
    play,
    read,
)

SECRET = "hunter2-is-secret"

# -- options: found when the source is loaded, before anything connects --------------------------

NOWHERE = {"servers": "nats://127.0.0.1:1", "bucket": "fleet"}


@pytest.mark.parametrize(
    ("options", "error", "fragments"),
    [
        ({"updateOnly": "true"}, "OptionError", ("'updateonly'; did you mean 'updatesOnly'?",)),
        ({"password": SECRET}, "OptionError", ("'user' and 'password' belong together",)),
        ({"user": "me", "password": SECRET, "token": "t"}, "OptionError", ("'user' and 'token'",)),
        ({"servers": f"nats://me:{SECRET}@h:1"}, "OptionError", ("'user' and 'password', or",)),
        ({"pasword": SECRET}, "OptionError", ("did you mean 'password'?",)),
        ({"keys": "kéy"}, "InvalidNameError", ("is not a key filter",)),
        ({"keys": "a.b.>,*.b.c"}, "ConfigurationError", ("overlap",)),
    ],
    ids=str,
)
def test_options_in_spark(
    spark: SparkSession, options: dict[str, Any], error: str, fragments: tuple[str, ...]
) -> None:
    """One of each kind of error, and those with a secret; the others are those of the parser."""
    with pytest.raises(AnalysisException) as caught:
        spark.readStream.format("nats_kv").options(**(NOWHERE | options)).load()
    text = str(caught.value)
    assert f"nats_stream_source.errors.{error}: " in text
    assert_told(text, fragments)


def assert_told(text: str, fragments: tuple[str, ...]) -> None:
    for fragment in fragments:
        assert fragment in text
    assert SECRET not in text


def test_names_of_options_are_case_insensitive(scene: Scene) -> None:
    play(scene, Create(), Do(lambda scene: read(scene, {"MAXROWSPERTRIGGER": 5, "KEYS": "a"})))


# -- the server and what is on it ---------------------------------------------------------------


def fails(error: str, *fragments: str, options: dict[str, Any] | None = None) -> ExpectError:
    """A run with these options fails."""
    return ExpectError(error, fragments, Run(options or {}), absent=(SECRET,))


def test_bucket_missing(scene: Scene) -> None:
    what = f"bucket '{scene.bucket}' does not exist on {scene.url}"
    play(scene, fails("BucketNotFoundError", what, "check 'bucket', 'servers' and 'domain'"))
    assert scene.offsets() == []


def test_port_is_closed(scene: Scene) -> None:
    place = f"nats://127.0.0.1:{free_port()}"
    options = {"servers": place, "connectTimeout": 1}
    what = f"could not connect to {place} within 1 s ('connect_timeout')"
    play(scene, fails("ConnectError", what, "(option 'connectTimeout')", options=options))
    assert scene.offsets() == []


def test_port_open_without_responses(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        options = {"servers": place, "connectTimeout": 1}
        play(
            scene,
            fails(
                "ConnectError",
                f"could not connect to {place} within 1 s ('connect_timeout')",
                options=options,
            ),
        )


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


def edited(batch_id: int, edit: Callable[[dict[str, Any]], object]) -> Do:
    """Edit an offset in the checkpoint by hand."""

    def run(scene: Scene) -> None:
        path = scene.checkpoint / "offsets" / str(batch_id)
        version, spark, _ = path.read_text().splitlines()
        offset = logged_offset(path)
        edit(offset)
        path.write_text("\n".join((version, spark, json.dumps(offset))))
        # Hadoop's file system keeps a checksum beside each file.
        path.with_name(f".{batch_id}.crc").unlink(missing_ok=True)

    return Do(run)


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


def test_offsets_that_run_backwards(scene: Scene) -> None:
    def uncommit(scene: Scene) -> None:
        (scene.checkpoint / "commits" / "1").unlink()

    play(
        scene,
        Create(5),
        Put("a", "1"),
        Put("a", "2"),
        Run(),
        Put("a", "3"),
        Run(),
        Do(uncommit),
        edited(1, lambda offset: offset.update(stream_seq=1, time=None)),
        fails("OffsetError", "run backwards, from 2 to 1", "edited by hand"),
    )
