"""Attacks on queries of Spark: the query ends with a named error, and the session continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.embedded import NatsServer
from tests.faults.attack.forged_frames import ForgedReplies, bomb
from tests.support.attack_target import attacked
from tests.support.nats.certificates import Authority
from tests.support.nats.rogue_server import Rogue, greeting
from tests.support.proxy.fault_proxy import Proxy, Verdict
from tests.support.proxy.verdicts import EVERY, FrameFault, Nth
from tests.support.spark.processes import most_memory
from tests.support.spark.streaming_query import run_to_the_end

SECRET = "xyzzy-marker"
ROWS = 100


@pytest.fixture(scope="module")
def proxy(shared_server: NatsServer) -> Iterator[Proxy]:
    with attacked(shared_server, "sparked", ROWS) as proxy:
        yield proxy


def load(spark: SparkSession, url: str, kind: str, *, stream: bool, **options: object) -> DataFrame:
    """The bucket, in either format; its values are in ``value``."""
    own = {"bucket": "sparked", "includeHistory": True}
    given = {"servers": url, **(own if kind == "nats_kv" else {"stream": "KV_sparked"}), **options}
    texts = {name: str(value) for name, value in given.items()}
    begun = (spark.readStream if stream else spark.read).format(kind).options(**texts).load()
    return begun if kind == "nats_kv" else begun.withColumnRenamed("data", "value")


def run(
    spark: SparkSession, checkpoint: Path, url: str, kind: str = "nats_kv", **options: object
) -> list[bytes]:
    values: list[bytes] = []

    def start() -> StreamingQuery:
        return (
            load(spark, url, kind, stream=True, **options)
            .writeStream.foreachBatch(
                lambda batch, _: values.extend(bytes(row.value) for row in batch.collect())
            )
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    run_to_the_end(start)
    return values


def answers_that_are_none() -> Verdict:
    """On the driver."""
    return ForgedReplies("stream_info", lambda answer: b'{"config": []}')


def acks_that_are_none() -> Verdict:
    """On the executor."""
    return Nth(EVERY[49:], lambda frame: frame.replace(b" $JS.ACK.", b" $JS.ACK.x.", 1))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "attack"),
    [
        ("nats_kv", answers_that_are_none),
        ("nats_kv", acks_that_are_none),
        ("nats_stream", acks_that_are_none),
    ],
)
def test_query_fails_and_session_continues(
    spark: SparkSession, proxy: Proxy, tmp_path: Path, kind: str, attack: Callable[[], Verdict]
) -> None:
    proxy.verdict = attack()
    try:
        with pytest.raises(StreamingQueryException, match=r"ProtocolError: "):
            run(spark, tmp_path / "checkpoint", proxy.url, kind)
    finally:
        proxy.verdict = lambda frame: True
    # The same query, once the server is itself again; and not a row was lost or doubled.
    values = run(spark, tmp_path / "checkpoint", proxy.url, kind)
    assert values == [b"%d" % i for i in range(ROWS)]


@pytest.mark.faults
@pytest.mark.parametrize("attack", [answers_that_are_none, acks_that_are_none])
def test_batch_fails_and_session_continues(
    spark: SparkSession, proxy: Proxy, attack: Callable[[], Verdict]
) -> None:
    proxy.verdict = attack()
    try:
        with pytest.raises(PySparkException, match=r"ProtocolError: "):
            load(spark, proxy.url, "nats_kv", stream=False).collect()
    finally:
        proxy.verdict = lambda frame: True
    rows = load(spark, proxy.url, "nats_kv", stream=False).collect()
    assert sorted(int(row.value) for row in rows) == list(range(ROWS))


READS: dict[str, tuple[str, dict[str, object]]] = {
    "kv": ("nats_kv", {}),
    "kv current": ("nats_kv", {"includeHistory": False}),
    "stream": ("nats_stream", {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.faults if one != "kv" else ()) for one in READS]
)
def test_header_bombs(spark: SparkSession, proxy: Proxy, tmp_path: Path, name: str) -> None:
    """Of a MB each, 100 MB in all: the rows are right, and workers hold a part of it at a time."""
    kind, options = READS[name]
    assert len(run(spark, tmp_path / "warm", proxy.url, kind, **options)) == ROWS
    before = most_memory()
    fault = proxy.verdict = huge()
    try:
        values = run(spark, tmp_path / "checkpoint", proxy.url, kind, **options)
    finally:
        proxy.verdict = lambda frame: True
    assert values == [b"%d" % i for i in range(ROWS)]
    assert fault.done >= ROWS
    assert most_memory() - before < 256 << 20


@pytest.mark.faults
@pytest.mark.parametrize("name", READS)
def test_header_bombs_in_batch(spark: SparkSession, proxy: Proxy, name: str) -> None:
    kind, options = READS[name]
    rows = load(spark, proxy.url, kind, stream=False, **options)
    assert rows.count() == ROWS
    before = most_memory()
    fault = proxy.verdict = huge()
    try:
        values = [int(row.value) for row in rows.collect()]
    finally:
        proxy.verdict = lambda frame: True
    assert sorted(values) == list(range(ROWS))
    assert fault.done >= ROWS
    assert most_memory() - before < 256 << 20


def huge() -> FrameFault:
    """All deliveries with a header block of a MB."""
    return Nth(EVERY, lambda frame: bomb(frame, 170_000))


def test_other_server_responds(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server without TLS where the options require it: the client sends nothing."""
    ca = Authority(tmp_path, "ca")
    with Rogue(greeting(auth_required=True)) as rogue:
        options = {"user": "me", "password": SECRET, "tlsCaFile": ca.path, "connectTimeout": 60}
        with pytest.raises(StreamingQueryException, match=r"TlsError: ") as caught:
            run(spark, tmp_path / "checkpoint", rogue.url, **options)
        assert rogue.received
        assert rogue.everything == b""
    out, err = capfd.readouterr()
    assert SECRET not in str(caught.value) + out + err
