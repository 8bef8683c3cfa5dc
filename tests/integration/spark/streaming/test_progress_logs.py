"""Log lines with fields: their form, what Spark makes of them, and the rebuilds that they count."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import logging
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.logger.logger import JSONFormatter
from pyspark.sql import SparkSession

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.logs import field_logger, format_fields
from tests.support.log_fields import parse_fields
from tests.support.nats import buckets
from tests.support.paths import ROOT
from tests.support.wait import wait_until, wait_until_async

PACKAGE = ROOT / "nats_stream_source"
OPERATIONS = (ROOT / "docs/operations.md").read_text()


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
    assert parse_fields(f"12:00 WARN something happened {format_fields(fields)}") == fields


def test_log_line_has_fields(caplog: pytest.LogCaptureFixture) -> None:
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


def test_modules_log_with_fields() -> None:
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


def test_control_characters_do_not_reach_terminal() -> None:
    assert format_fields({"detail": "\x1b[2J"}) == 'detail="\\u001b[2J"'


# -- rebuilds, counted as docs/operations.md does ------------------------------------------------


def counted(directory: Path, *lines: str) -> list[str]:
    """What the documented shell command prints for an executor's log with these lines."""
    (command,) = re.findall(r"^\$ (grep (?:.*\\\n)*.*)", OPERATIONS, re.MULTILINE)
    (directory / "executor-1.stderr").write_text("".join(f"{line}\n" for line in lines))
    done = subprocess.run(
        ["sh", "-c", command], cwd=directory, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


@pytest.fixture
def rebuilt(shared_server: NatsServer, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """What is logged when the consumer of a read is deleted in the middle."""
    url = shared_server.url
    buckets.create_bucket(url, "torn", 1)
    buckets.put(url, "torn", "a", b"1")
    created = buckets.bucket_info(url, "torn")["created"]

    def consumers() -> list[str]:
        return buckets.api(url, "CONSUMER.NAMES.KV_torn").get("consumers") or []

    async def work() -> int:
        link = ReusableConnection(ConnectionSettings(servers=(url,)))
        request = RangeRequest(
            "KV_torn", KnownStream(created), 0, ENDLESS, heartbeat=0.1, eager=True
        )
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
            await wait_until_async(lambda: caplog.records, "a rebuild", deadline=600)
            await asyncio.to_thread(buckets.put, url, "torn", "b", b"2")
            return first + await second
        finally:
            await batches.aclose()
            await link.drop()

    assert asyncio.run(work()) == 2
    (record,) = caplog.records
    return record


def test_rebuild_is_one_line(rebuilt: logging.LogRecord, tmp_path: Path) -> None:
    assert (rebuilt.name, rebuilt.levelname) == (
        "nats_stream_source.jetstream.ordered.reader",
        "WARNING",
    )
    fields = parse_fields(rebuilt.getMessage())
    assert rebuilt.getMessage().startswith("consumer rebuilt stream=KV_torn ")
    assert fields["reason"] in ("consumer gone", "missed heartbeat")
    assert (fields["start"], fields["end"], fields["attempt"]) == ("0", "none", "1")
    # The second as Spark's structured logger writes it, which escapes the quotes.
    lines = [rebuilt.getMessage(), JSONFormatter().format(rebuilt), "consumer rebuilt stream=KV_to"]
    assert counted(tmp_path, *lines, "something else") == [
        f"2 consumer rebuilt stream=KV_torn reason={fields['reason']}"
    ]
    assert counted(tmp_path, "something else") == []


def test_server_text_is_not_reason(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    said = 'unknown field "x" reason=other stream=KV_b'
    for detail in (said, "{}", '{"a": "consumer rebuilt stream=KV_b reason=x"}'):
        caplog.clear()
        field_logger("any").warning(
            "consumer rebuilt",
            stream="KV_a",
            start=0,
            end=9,
            position=3,
            reason="no answer",
            attempt=1,
            detail=detail,
        )
        line = caplog.records[0].getMessage()
        shown = JSONFormatter().format(caplog.records[0])
        collected = json.dumps({"log": f"{shown}\n", "stream": "stderr"})  # as Docker keeps it
        for one in (line, f"WARN {line}", shown, f"stderr F {shown}", collected):
            assert counted(tmp_path, one) == ["1 consumer rebuilt stream=KV_a reason=no answer"]


def test_rebuilds_from_spark_s_table(spark: SparkSession) -> None:
    """Spark collects the lines of its Python workers; the documented statement counts ours.

    It reads them beside the task, so those of a task may come after it, or not at all.
    """

    def work(stream: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        def log_and_pass(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            log = field_logger("nats_stream_source.jetstream.ordered.reader")
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
        streams: dict[str, Counter[str]] = {}
        for stream, reason, rebuilds in spark.sql(statement).collect():
            if stream.startswith("KV_logged_"):
                streams.setdefault(stream, Counter())[reason] = rebuilds
        return list(streams.values())

    (statement,) = re.findall(r"```sql\n(.*?)```", OPERATIONS, re.DOTALL)

    attempts = itertools.count()
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    try:
        wait_until(found, "the lines of a task in the table", deadline=600)
        assert all(of["gap"] <= 2 and of["no answer"] <= 1 for of in logged())
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
