"""Log lines with fields: their form, what Spark makes of them, and the rebuilds that they count."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import buckets
import pyarrow as pa
import pytest
from pyspark.logger.logger import JSONFormatter
from pyspark.sql import SparkSession
from scenario import eventually

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.connection import ConnectionSettings
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import ENDLESS, RangeRequest
from nats_stream_source.logs import field_logger, read, written
from nats_stream_source.rebuilds import rebuilds, rebuilds_in

PACKAGE = Path(__file__).parent.parent / "nats_stream_source"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": "KV_fleet", "start": "0"},
        {"error": 'no "answer" in 5 s\nat all', "path": "C:\\a b"},
        {"a": "b=c", "d": "100%", "e": "%s", "f": "\\", "g": "gap,"},
    ],
)
def test_fields_are_read_back(fields: dict[str, str]) -> None:
    assert read(f"12:00 WARN something happened {written(fields)}") == fields


def test_a_line_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = field_logger("some.module")
    log.warning("100% sure", stream="KV_a", error=ValueError("a b"), detail="", seq=None)
    log.warning("plain %d", 7)
    first, second = caplog.records
    assert first.getMessage() == '100% sure stream=KV_a error="a b"'
    assert first.name == "some.module"
    assert first.filename == Path(__file__).name  # not the logger's own
    assert second.getMessage() == "plain 7"
    shown = json.loads(JSONFormatter().format(first))
    assert shown["context"] == {"stream": "KV_a", "error": "a b"}


def test_every_module_logs_with_fields() -> None:
    """No line of the package has positional arguments: fields are what a machine can read."""
    lines = 0
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_log = isinstance(node.func.value, ast.Name) and node.func.value.id == "log"
            if of_log and node.func.attr in ("debug", "info", "warning", "error"):
                lines += 1
                assert len(node.args) == 1, f"{file}:{node.lineno}"
    assert lines > 20


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert written({"detail": "\x1b[2J"}) == 'detail="\\u001b[2J"'


# -- rebuilds -----------------------------------------------------------------------------------


@pytest.fixture
def rebuilt(shared_server: NatsServer, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """What is logged when the consumer of a read is deleted in the middle."""
    url = shared_server.url
    buckets.create_bucket(url, "torn", 1)
    buckets.put(url, "torn", "a", b"1")
    created = buckets.stream_info(url, "torn")["created"]

    def consumers() -> list[str]:
        return buckets.api(url, "CONSUMER.NAMES.KV_torn").get("consumers") or []

    async def work() -> int:
        link = Link(ConnectionSettings(servers=(url,)))
        request = RangeRequest("KV_torn", created, 0, ENDLESS, heartbeat=0.1, eager=True)
        batches = OrderedReader(link, request).batches()

        async def row() -> int:
            while not (frames := await batches.__anext__()):
                pass
            return len(frames)

        try:
            first = await row()
            for name in consumers():
                await asyncio.to_thread(buckets.api, url, f"CONSUMER.DELETE.KV_torn.{name}")
            second = asyncio.ensure_future(row())
            await asyncio.to_thread(eventually, lambda: caplog.records, "a rebuild")
            await asyncio.to_thread(buckets.put, url, "torn", "b", b"2")
            return first + await second
        finally:
            await batches.aclose()
            await link.drop()

    assert asyncio.run(work()) == 2
    (record,) = caplog.records
    return record


def test_a_rebuild_is_one_line(rebuilt: logging.LogRecord) -> None:
    assert (rebuilt.name, rebuilt.levelname) == ("nats_stream_source.jetstream.ordered", "WARNING")
    fields = read(rebuilt.getMessage())
    assert rebuilt.getMessage().startswith("consumer rebuilt stream=KV_torn ")
    assert fields["reason"] in ("consumer gone", "missed heartbeat")
    assert (fields["start"], fields["end"], fields["attempt"]) == ("0", "none", "1")
    counts = {"KV_torn": {fields["reason"]: 1}}
    assert rebuilds_in([rebuilt.getMessage()]) == counts
    # As Spark's structured logger writes it, which escapes the quotes.
    assert rebuilds_in([JSONFormatter().format(rebuilt)]) == counts


def test_what_a_server_said_is_not_taken_for_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    said = 'unknown field "x" reason=other stream=KV_b'
    for detail in (said, "{}", '{"a": "consumer rebuilt stream=KV_b reason=x"}'):
        caplog.clear()
        field_logger("any").warning(
            "consumer rebuilt", stream="KV_a", reason="no answer", detail=detail
        )
        line = caplog.records[0].getMessage()
        shown = JSONFormatter().format(caplog.records[0])
        collected = json.dumps({"log": f"{shown}\n", "stream": "stderr"})  # as Docker keeps it
        for one in (line, f"WARN {line}", shown, f"stderr F {shown}", collected):
            assert rebuilds_in([one]) == {"KV_a": {"no answer": 1}}, one


def test_rebuilds_from_spark_s_table(spark: SparkSession) -> None:
    """Spark collects the lines of its Python workers, and the function finds ours among them.

    It reads them beside the task, so those of a task may come after it, or not at all.
    """

    def work(stream: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        def log_and_pass(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            log = field_logger("nats_stream_source.jetstream.ordered")
            for reason in ("gap", "gap", "no answer"):
                log.warning("consumer rebuilt", stream=stream, reason=reason)
            log.warning("something else", stream=stream)
            other = field_logger("another.module")
            other.warning("consumer rebuilt", stream=stream, reason="gap")
            yield from batches

        return log_and_pass

    def found() -> bool:
        attempt = f"KV_logged_{next(attempts)}"
        assert spark.range(0, 1, 1, 1).mapInArrow(work(attempt), "id long").count() == 1
        return {"gap": 2, "no answer": 1} in logged()

    def logged() -> list[Counter[str]]:
        return [of for stream, of in rebuilds(spark).items() if stream.startswith("KV_logged_")]

    attempts = itertools.count()
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    try:
        eventually(found, "the lines of a task in the table")
        assert all(of["gap"] <= 2 and of["no answer"] <= 1 for of in logged())
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
