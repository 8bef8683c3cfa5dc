"""``ls``: buckets with their limits, and keys."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.cli.output import text_width
from nats_stream_source.embedded import NatsServer
from tests.integration.cli.command import COMMAND, command, objects
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.paths import ROOT

_HOUR = 3_600_000_000_000  # nanoseconds


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """A server of the module's own: ``ls`` shows all of its buckets."""
    with NatsServer() as server:
        url = server.url
        buckets.create_bucket(url, "plant", 5, max_age=25 * _HOUR, description="pumps of hall 3")
        buckets.put(url, "plant", "hall.pump", b"on")
        buckets.put(url, "plant", "hall.fan", b"on")
        buckets.put(url, "plant", "door", b"x" * 2000)
        buckets.put(url, "plant", "door", b"open")
        buckets.delete(url, "plant", "hall.fan")
        buckets.create_bucket(url, "empty")
        create_stream(url, "ORDERS", "orders.>")
        yield server


@pytest.fixture
def url(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NATS_URL", server.url)
    return server.url


def test_buckets(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    names, *lines = capsys.readouterr().out.splitlines()
    assert names.split("  ")[0] == "bucket"
    cells = [re.split(r"\s{2,}", line) for line in (names, *lines)]
    assert cells[0] == [
        *("bucket", "values", "size", "history", "ttl", "replicas", "last update", "description"),
    ]
    assert cells[1] == ["empty", "0", "0 B", "1", "-", "1", "-", "-"]
    assert cells[2][:2] == ["plant", "5"]
    assert re.fullmatch(r"2\.\d KiB", cells[2][2])
    assert cells[2][3:6] == ["5", "1d1h", "1"]
    assert cells[2][6].endswith(" ago")
    assert cells[2][7] == "pumps of hall 3"
    assert main(["ls", "-n"]) == 0
    assert capsys.readouterr().out == "empty\nplant\n"


def test_buckets_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--json"]) == 0
    empty, plant = objects(capsys.readouterr().out)
    state = buckets.bucket_info(url, "plant")
    assert plant.pop("last_update") == state["state"]["last_ts"]
    assert plant == {
        "bucket": "plant",
        "description": "pumps of hall 3",
        "values": 5,
        "bytes": state["state"]["bytes"],
        "history": 5,
        "ttl_seconds": 25 * 3600,
        "replicas": 1,
        "storage": "file",
        "created": state["created"],
        "last_revision": 5,
    }
    assert (empty["ttl_seconds"], empty["last_update"]) == (None, None)


def test_keys(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the keys that were deleted."""
    for words, keys in (
        ([], "door\nhall.pump\n"),
        (["hall.>"], "hall.pump\n"),
        (["hall.*", "door"], "door\nhall.pump\n"),
    ):
        assert main(["ls", "plant", *words]) == 0
        assert capsys.readouterr().out == keys
    assert main(["ls", "plant", "-v"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["key", "revision", "created"]
    assert [row[:2] for row in rows[1:]] == [["door", "4"], ["hall.pump", "1"]]
    assert main(["ls", "plant", "--json", "door"]) == 0
    (door,) = objects(capsys.readouterr().out)
    assert (door["key"], door["revision"]) == ("door", 4)
    assert not buckets.consumers(url, "plant")


def test_list_of_empty_account_is_empty(url: str) -> None:
    """A program that reads the output must not take a message for a key."""
    assert command("ls", "empty") == ("", "no keys\n")
    assert command("ls", "empty", "--json")[0] == ""


def test_streams_exceed_one_page(
    capsys: pytest.CaptureFixture[str], nats_server: NatsServer
) -> None:
    """The server lists at most 256 streams at a time."""
    names = [f"b{i:03}" for i in range(260)]
    for name in names:
        buckets.create_bucket(nats_server.url, name, storage="memory")
    assert main(["ls", "-n", "--servers", nats_server.url]) == 0
    assert capsys.readouterr().out.splitlines() == names


def test_rows_fit_lines_of_terminal(url: str) -> None:
    """A long key and a long value, also of wide characters, are cut to a line of 80 columns."""
    buckets.create_bucket(url, "wide")
    buckets.put(url, "wide", "a.key.of.many.tokens.with.a.long.name", "門".encode() * 200)
    primary, secondary = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, "peek", "--bucket", "wide"],
            stdout=secondary,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "80"},
        )
        assert process.wait(60) == 0
        text = os.read(primary, 10_000).decode()
    finally:
        os.close(primary)
        os.close(secondary)
        buckets.delete_bucket(url, "wide")
    assert max(text_width(line) for line in text.splitlines()) in (79, 80)
    assert text.count("…") == 2
