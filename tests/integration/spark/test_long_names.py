"""Keys and subjects beyond the server's limit: every format and the command name them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import MessageTooLargeError, NameTooLongError
from nats_stream_source.options.writing import kv_write_options, stream_write_options
from nats_stream_source.spark.writing.task import write_task
from tests.support.nats.buckets import create_bucket, put
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import limited_server
from tests.support.query_driver.batch import read_batch
from tests.support.query_driver.driver import read_all

LONG = "k" * 4096
READS: dict[str, dict[str, Any]] = {
    "values": {"bucket": "b", "keys": LONG},
    "two keys": {"bucket": "b", "keys": f"{LONG},other"},
    "history": {"bucket": "b", "keys": LONG, "includeHistory": True},
    "subject": {"subject": f"S.{LONG}"},
    "filters": {"stream": "S", "filterSubjects": f"S.{LONG},S.other"},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with NatsServer() as server:
        create_bucket(server.url, "b", history=5)
        put(server.url, "b", "other", b"v")
        create_stream(server.url, "S", allow_batched=True)
        yield server.url


@pytest.mark.parametrize("options", READS.values(), ids=READS)
def test_filter_too_long_for_line(url: str, options: dict[str, Any]) -> None:
    expected = r"4,09\d|4,1\d\d bytes, expected a line of at most 4,096.*'maxControlLine'"
    for read in (read_all, read_batch):
        with pytest.raises(NameTooLongError, match=expected):
            read(url, **options)


@pytest.fixture(scope="module")
def limited_url() -> Iterator[str]:
    with limited_server() as url:
        yield url


FAST = {"stream": "S", "fastIngest": "true"}
SINKS: dict[str, tuple[Any, dict[str, str], str, str]] = {
    "bucket": (kv_write_options, {"bucket": "b"}, "key", "value"),
    "stream": (stream_write_options, {"stream": "S"}, "subject", "data"),
    "fast ingest": (stream_write_options, FAST, "subject", "data"),
}
each_sink = pytest.mark.parametrize(
    ("parse", "options", "name", "value"), SINKS.values(), ids=SINKS
)


@each_sink
def test_name_of_row_too_long_for_line(
    url: str, parse: Any, options: dict[str, str], name: str, value: str
) -> None:
    rows = pa.RecordBatch.from_pydict({name: ["S.a", f"S.{LONG}"], value: [b"1", b"2"]})
    subject = r"\$KV\.b\.S\.kkk" if name == "key" else r"S\.kkk"
    with pytest.raises(NameTooLongError, match=rf"subject '{subject}.* \(option 'maxControlLine'"):
        write_task(parse({"servers": url, **options}), iter([rows]), job="job", partition=0)


@each_sink
def test_row_larger_than_max_payload_of_account(
    limited_url: str, parse: Any, options: dict[str, str], name: str, value: str
) -> None:
    rows = pa.RecordBatch.from_pydict({name: ["S.a", "S.b"], value: [b"1", b"x" * 1001]})
    with pytest.raises(MessageTooLargeError, match=r"row 1 .*'S\.b'.*expected at most 1000"):
        write_task(parse({"servers": limited_url, **options}), iter([rows]), job="j", partition=0)


@pytest.mark.parametrize("place", [["b", "--keys"], ["--stream", "S", "--filter-subjects"]])
def test_filter_of_command_too_long_for_line(
    url: str, place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", *place, LONG, "--servers", url]) != 0
    assert "bytes, expected a line of at most 4,096 bytes" in capsys.readouterr().err
