"""`follow BUCKET TABLE`: what it prints, refused command lines, errors and exit status."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer, free_port
from tests.integration.cli.command import COMMAND, command
from tests.support.delta import rows
from tests.support.nats import buckets
from tests.support.paths import ROOT
from tests.support.wait import DEADLINE, wait_until


def test_once_ends_with_rows_and_keys(nats_server: NatsServer, tmp_path: Path) -> None:
    buckets.create_bucket(nats_server.url, "fleet", 3)
    for key in "abc":
        buckets.put(nats_server.url, "fleet", key, b"1")
    buckets.delete(nats_server.url, "fleet", "a")
    words = ("fleet", str(tmp_path / "fleet"), "--servers", nats_server.url, "--once")
    assert command("follow", *words) == ("3 rows read, up to date, 2 keys\n", "")
    assert command("follow", *words) == ("0 rows read, up to date, 2 keys\n", "")
    assert os.listdir(tmp_path) == ["fleet"]


def test_metrics_and_signal(nats_server: NatsServer, tmp_path: Path) -> None:
    buckets.create_bucket(nats_server.url, "fleet")
    buckets.put(nats_server.url, "fleet", "a", b"1")
    prometheus = ("--prometheus", "127.0.0.1:0")
    process = subprocess.Popen(
        [*COMMAND, "follow", "fleet", "fleet", *("--servers", nats_server.url), *prometheus],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stderr is not None
        match = re.search(r"http://\S+/metrics", process.stderr.readline())
        assert match is not None
        url = match[0]

        def text() -> str:
            with urllib.request.urlopen(url) as response:
                return response.read().decode()

        label = 'query="follow fleet"'
        wait_until(
            lambda: f'nats_stream_source_input_rows_total{{{label},source="0"}} 1.0' in text(),
            "the row is counted",
        )
        assert f"nats_stream_source_query_active{{{label}}} 1.0" in text()
        wait_until(
            lambda: f'offsets_behind_latest{{{label},source="0",stream="KV_fleet"}} 0.0' in text(),
            "the lag is reported",
        )
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=DEADLINE)
        assert (process.returncode, errors) == (0, "")
        assert output == "1 rows read, up to date, 1 keys\n"
    finally:
        process.kill()
        process.communicate()
    assert [row["key"] for row in rows(tmp_path / "fleet")] == ["a"]


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("fleet", "lake", "--option", "keyz=a"), "keyz"),
        (("fleet", "lake", "--option", "keys"), "'keys' is not NAME=VALUE"),
        (("fleet", "lake", "--option", "outageTimeout=many"), "option 'outageTimeout'"),
        (("fleet", "lake", "--option", "minPartitions=2"), "'minPartitions' is not one of a"),
        (("fleet", "lake", "--option", "bucket=b"), "the bucket is named twice"),
        (("fleet",), "TABLE"),
        (
            ("fleet", "lake", "--commit-interval", "-1"),
            "commit_interval is -1.0, expected seconds",
        ),
        (("fleet", "lake", "--prometheus", "x"), "prometheus is 'x', expected a port"),
    ],
)
def test_wrong_command_line_has_status_2(
    words: tuple[str, ...], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["follow", *words, "--no-context"]) == 2
    assert reported in capsys.readouterr().err


def test_misspelt_bucket_has_status_2_and_leaves_no_directory(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    buckets.create_bucket(nats_server.url, "fleet")
    table = tmp_path / "lake" / "fleet"
    words = ("flet", str(table), "--servers", nats_server.url)
    output, errors = command("follow", *words, status=2)
    assert (output, "flet" in errors) == ("", True)
    assert not table.parent.exists()


def test_absent_server_is_named_at_once(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    _, errors = command("follow", "fleet", str(tmp_path / "fleet"), "--servers", url, status=1)
    assert url.removeprefix("nats://") in errors
    assert "connectTimeout" not in errors


def test_marks_for_table_of_removals_are_refused_at_start(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    buckets.create_bucket(nats_server.url, "fleet")
    words = ("fleet", str(tmp_path / "fleet"), "--servers", nats_server.url, "--once")
    command("follow", *words)
    _, errors = command("follow", *words, "--deletes", "mark", status=2)
    assert "deletes='mark'" in errors
