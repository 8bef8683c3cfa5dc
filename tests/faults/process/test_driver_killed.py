"""The driver is killed between reading a micro-batch and committing it.

One driver with a query for each case: it takes seconds to start. The queries resume in the session
of the tests, from the same checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.faults.process.crash_point_driver import stopping_driver, stored_rows
from tests.support.nats.buckets import bucket_state, create_bucket, put
from tests.support.spark.scenario import (
    ExpectRows,
    Run,
    Scene,
    play,
)
from tests.support.wait import wait_until


@dataclass(frozen=True)
class Crash:
    """A query that is killed in micro-batch ``block_on``, and its continuation.

    Attributes:
        options, then_options: of the source before and after.
        block_on: the micro-batch that is read and not committed.
        before: what the bucket holds when the query starts; ``during``: what is written when its
            first micro-batch is through; ``later``: what is written after the crash.
        rows: all that the restarted query delivers.
    """

    options: dict[str, str]
    block_on: int
    rows: tuple[str, ...]
    during: tuple[str, ...] = ()
    then_options: dict[str, str] | None = None
    before: tuple[str, ...] = ("a", "b", "a", "c", "b")
    later: tuple[str, ...] = ("d", "a")


LATER_ROWS = ("6 PUT d=6", "7 PUT a=7")

CRASHES = {
    "first": Crash(
        {},
        0,
        (
            "3 PUT a=3 initial",
            "4 PUT c=4 initial",
            "5 PUT b=5 initial",
            "6 PUT d=6",
            "7 PUT e=7",
        ),
        later=("d", "e"),
    ),
    "later": Crash(
        {"includeHistory": "true"},
        1,
        ("6 PUT x=6", "7 PUT a=7", "8 PUT d=8", "9 PUT a=9"),
        during=("x", "a"),
    ),
    # The new initial offset is 7, the logged one 5: what is between must come.
    "updates": Crash({"updatesOnly": "true"}, 0, LATER_ROWS),
    # As an updatesOnly query whose first range, (2, 5], was logged: the new initial offset is 7.
    "updates, logged": Crash(
        {"startSequence": "3"},
        0,
        ("3 PUT a=3 initial", "4 PUT c=4 initial", "5 PUT b=5 initial", *LATER_ROWS),
        then_options={"updatesOnly": "true"},
    ),
}


@pytest.fixture(scope="module")
def crashed(
    shared_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, Path]]:
    """One driver with all queries of CRASHES, killed; each one's bucket and directory."""
    root = tmp_path_factory.mktemp("crash")
    url = shared_server.url
    places = {name: (f"crash{i}", root / str(i)) for i, name in enumerate(CRASHES)}
    for name, (bucket, directory) in places.items():
        directory.mkdir()
        create_bucket(url, bucket, history=10)
        put_numbered(url, bucket, CRASHES[name].before)
    queries = [
        {
            "format": "nats_kv",
            "options": {"bucket": bucket, **CRASHES[name].options},
            "directory": str(directory),
            "streaming": True,
            "point": "written",
            "batch": CRASHES[name].block_on,
        }
        for name, (bucket, directory) in places.items()
    ]
    request = root / "request.json"
    asked = {"servers": url, "hides_formats": True, "queries": queries}
    with stopping_driver(request, **asked) as process:

        def alive() -> None:
            assert process.poll() is None, request.with_suffix(".log").read_text()[-3000:]

        for name, (bucket, directory) in places.items():
            if CRASHES[name].during:
                committed = directory / "checkpoint" / "commits" / "0"
                wait_until(
                    committed.exists,
                    f"the first micro-batch of {name!r}",
                    alive=alive,
                    deadline=600,
                )
                put_numbered(url, bucket, CRASHES[name].during)
            read = (directory / "at").exists
            wait_until(read, f"the micro-batch of {name!r} to be read", alive=alive, deadline=600)
    for name, (_, directory) in places.items():
        assert not (directory / "checkpoint" / "commits" / str(CRASHES[name].block_on)).exists()
    return places


def put_numbered(url: str, bucket: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        put(url, bucket, key, b"%d" % (bucket_state(url, bucket)["last_seq"] + 1))


@pytest.mark.parametrize("name", CRASHES)
def test_driver_is_killed(
    spark: SparkSession,
    shared_server: NatsServer,
    crashed: dict[str, tuple[str, Path]],
    name: str,
) -> None:
    """The micro-batch that was read and not committed is repeated with the same rows."""
    crash = CRASHES[name]
    bucket, directory = crashed[name]
    put_numbered(shared_server.url, bucket, crash.later)
    scene = Scene(spark, shared_server, bucket, directory)
    play(
        scene,
        Run(crash.options if crash.then_options is None else crash.then_options),
        ExpectRows(*crash.rows),
    )
    again = [[row.revision, row.value.decode()] for row in scene.batches[crash.block_on]]
    assert again == stored_rows(directory, str(crash.block_on))


@pytest.mark.spark  # beside those that need the same killed driver
def test_register_where_spark_finds_nothing_by_itself(
    crashed: dict[str, tuple[str, Path]],
) -> None:
    """The killed driver's Spark did not find the format, and had it after ``register``."""
    (directory,) = {directory.parent for _, directory in crashed.values()}
    assert "[DATA_SOURCE_NOT_FOUND]" in (directory / "lookup").read_text()
