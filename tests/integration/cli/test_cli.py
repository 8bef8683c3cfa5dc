"""The command, as its users run it: a process, a real server, exit status and both outputs."""

from __future__ import annotations

import base64
import importlib
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.cli.output import text_width
from nats_stream_source.embedded import NatsServer
from tests.integration.cli.command import COMMAND, command, objects
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.paths import ROOT
from tests.unit.test_imports import HIDE


@pytest.fixture(scope="module")
def filled(shared_server: NatsServer) -> NatsServer:
    """A bucket ``plant``, a sparse bucket ``holes``, an empty one, and a stream ``ORDERS``."""
    url = shared_server.url
    buckets.create_bucket(url, "plant", 5)
    buckets.put(url, "plant", "pump", b"on")
    buckets.put(url, "plant", "fan", b"\xff\x00\x01")
    buckets.delete(url, "plant", "fan")
    buckets.put(url, "plant", "door", "zu | auf 門\n".encode())
    buckets.fill_bucket(url, "holes", ((f"k{i % 7}", b"%d" % i) for i in range(3000)), 1)
    buckets.create_bucket(url, "hay", 1)
    entries = [("needle", b"here"), *((f"straw{i}", b"") for i in range(3000))]
    buckets.put_many(url, "hay", entries)
    buckets.create_bucket(url, "empty", 1)
    for name in ("encoded", "mixed"):
        buckets.create_bucket(url, name, 3)
        buckets.put(url, name, "X3Jvb3Rf.aGFsbCAx.cHVtcA", b"b24")  # /hall 1/pump = on
        buckets.put(url, name, "ZG9vcg", b"b3Blbg")  # door = open
    buckets.put(url, "mixed", "plain", b"x")
    create_stream(url, "ORDERS", "orders.>")
    buckets.publish(url, [(f"orders.{'a' if i % 3 else 'b'}", b"%d" % i, None) for i in range(30)])
    return shared_server


@pytest.fixture
def at(filled: NatsServer) -> Iterator[list[str]]:
    """The flags for the server; no consumer is left on it afterwards."""
    yield ["--servers", filled.url]
    for stream in ("KV_plant", "KV_holes", "KV_hay", "ORDERS"):
        assert not buckets.api(filled.url, f"CONSUMER.NAMES.{stream}").get("consumers")


# -- peek ---------------------------------------------------------------------------------------


def test_peek_shows_bucket(at: list[str]) -> None:
    lines = command("peek", "plant", *at)[0].splitlines()
    assert lines[0].split() == ["key", "value", "revision", "created", "operation"]
    cells = [re.split(r"\s{2,}", line) for line in lines[1:]]
    assert [(key, value, int(revision), how) for key, value, revision, _, how in cells] == [
        ("pump", "on", 1, "PUT"),
        ("fan", "0xff0001", 2, "PUT"),
        ("fan", "-", 3, "DEL"),
        ("door", "zu | auf 門\\x0a", 4, "PUT"),
    ]


def test_peek_writes_json(at: list[str]) -> None:
    rows = objects(command("peek", "--json", "--bucket", "plant", *at)[0])
    assert [row.get("value") for row in rows] == ["on", None, None, "zu | auf 門\n"]
    assert base64.b64decode(str(rows[1]["value_base64"])) == b"\xff\x00\x01"
    assert rows[0]["revision"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+\.\d{6}Z", str(rows[0]["created"]))


@pytest.mark.parametrize(
    ("words", "revisions"),
    [
        ("holes -n 2", [2994, 2995]),
        ("holes -n 2 --last", [2999, 3000]),
        ("holes --last", [*range(2994, 3001)]),
        ("holes --last --keys k0", [2997]),
        ("holes --keys k1,k3", [2998, 3000]),
        ("holes --start-sequence 2999", [2999, 3000]),
        ("holes --start-sequence 2999 --last", [2999, 3000]),
        ("holes --start-sequence 9999", []),
        # The one message that matches is thousands of sequences before the end.
        ("hay --last --keys needle", [1]),
    ],
)
def test_peek_finds_rows(
    at: list[str], words: str, revisions: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", "--json", *words.split(), *at]) == 0
    assert [row["revision"] for row in objects(capsys.readouterr().out)] == revisions


def test_peek_shows_stream(at: list[str]) -> None:
    words = ("peek", "--json", "--stream", "ORDERS", "-n", "3")
    rows = objects(command(*words, "--filter-subjects", "orders.b", *at)[0])
    assert [(row["subject"], row["data"], row["sequence"]) for row in rows] == [
        ("orders.b", "0", 1),
        ("orders.b", "3", 4),
        ("orders.b", "6", 7),
    ]
    by_subject = objects(command("peek", "--json", "--subject", "orders.b", "-n", "3", *at)[0])
    assert by_subject == rows


def test_peek_decodes_keys_and_values(at: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("--key-codec", "path,base64")
    codecs = (*keys, "--value-codec", "base64", *at)

    def decoded(*words: str) -> list[tuple[object, object]]:
        assert main(["peek", *words, *codecs, "--json"]) == 0
        return [(one["key"], one["value"]) for one in objects(capsys.readouterr().out)]

    assert decoded("encoded") == [("/hall 1/pump", "on"), ("door", "open")]
    assert decoded("encoded", "--keys", "/hall 1/*") == [("/hall 1/pump", "on")]
    assert decoded("mixed", "--on-undecodable", "null")[-1] == (None, None)
    assert main(["peek", "mixed", *codecs]) == 2
    error = capsys.readouterr().err
    assert "could not decode the key of entry 'plain'" in error
    assert error.count("--key-codec") == 1
    assert main(["peek", "--stream", "KV_encoded", *keys, *at]) == 2


def test_peek_of_empty_bucket(at: list[str]) -> None:
    assert command("peek", "--bucket", "empty", *at) == ("", "no rows\n")
    assert command("peek", "--json", "--bucket", "empty", *at) == ("", "")


def test_peek_into_closed_pipe(at: list[str]) -> None:
    words = [sys.executable, "-m", "nats_stream_source", "peek", "--json", "--bucket", "hay"]
    with subprocess.Popen(
        [*words, "-n", "3000", *at], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_letters_that_terminal_lacks(at: list[str]) -> None:
    words = ("peek", "--bucket", "plant", "--last", "-n", "1", *at)
    assert "zu | auf \\u9580" in command(*words, PYTHONIOENCODING="latin-1")[0]
    (row,) = objects(command(*words, "--json", PYTHONIOENCODING="latin-1")[0])
    assert row["value"] == "zu | auf 門\n"


def test_peek_fits_lines_of_terminal(at: list[str], filled: NatsServer) -> None:
    """A long key and a long value, also of wide characters, are cut to a line of 80 columns."""
    buckets.create_bucket(filled.url, "wide")
    buckets.put(filled.url, "wide", "a.key.of.many.tokens.with.a.long.name", "門".encode() * 200)
    primary, secondary = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, "peek", "--bucket", "wide", *at],
            stdout=secondary,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "80"},
        )
        assert process.wait(60) == 0
        text = os.read(primary, 10_000).decode()
    finally:
        os.close(primary)
        os.close(secondary)
        buckets.delete_bucket(filled.url, "wide")
    assert max(text_width(line) for line in text.splitlines()) in (79, 80)
    assert text.count("…") == 2


# -- without extras ------------------------------------------------------------------------------


def test_commands_without_pyspark(at: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = ("peek", "--bucket", "plant", "-n", "1", "--json", *at)
    assert len(objects(command(*words, PYTHONPATH=path)[0])) == 1


# -- help, errors, secrets ----------------------------------------------------------------------


def test_help_names_every_command() -> None:
    text = command("--help")[0]
    for name in ("inspect", "peek", "follow"):
        assert name in text
    for name in ("inspect", "peek"):
        text = command(name, "--help")[0]
        assert "--credentials-content" in text
        # Neither Spark nor the names of its options.
        assert not re.search(r"Spark(?! task)|tlsKeyFile|apiPrefix|every machine", text)


def test_entry_point_is_command() -> None:
    (entry,) = re.findall(
        r'^nats-stream-source = "([\w.]+):main"$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert importlib.import_module(entry).main is main


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("", 2, "COMMAND"),
        ("look", 2, "invalid choice"),
        ("peek", 2, "--bucket or --stream is missing"),
        ("peek --bucket plant --bogus", 2, "peek: unrecognized arguments: --bogus"),
        ("peek --bucket a --stream b", 2, "name one"),
        ("peek a --bucket b", 2, "named twice"),
        ("peek --bucket 'a b' @", 2, "'a b'"),
        ("peek --bucket plant -n 0 @", 2, "at least 1"),
        ("peek --bucket none @", 2, "bucket 'none' does not exist"),
        ("peek plant --start-sequence '' @", 2, "'' is not an integer"),
        ("peek --stream NONE @", 2, "could not read stream 'NONE': it does not exist"),
        ("peek --bucket plant --connect-timeout soon @", 2, "--connect-timeout: 'soon'"),
        ("inspect no/such/directory", 1, "no/such/directory"),
        ("peek --bucket plant -n ten", 2, "'ten' is not a number of at least 1"),
        ("inspect . --max-lag 0", 2, "--servers"),
        ("inspect . --max-lag -1", 2, "not a number of rows"),
        ("inspect . --prometheus", 2, "--prometheus requires a server"),
        (
            "peek --bucket plant --servers nats://127.0.0.1:9",
            1,
            "connection refused; check 'servers' (--servers)",
        ),
        ("peek --stream NONE @", 2, "; check --stream, --servers and --domain"),
        ("peek --subject no.such @", 2, "with --stream and its subjects with --filter-"),
        ("peek --bucket plant --keys a,a @", 2, "keep only the wider one in 'keys' (--keys)"),
        ("peek plant --domain a --api-prefix b", 2, " each other (--api-prefix or --domain)\n"),
        ("peek plant --tls-handshake-first true @", 2, "(--tls-handshake-first)\n"),
        ("peek plant --credentials /none @", 2, "could not read 'credentials': /none"),
        (
            "peek plant --servers nats://a.invalid",
            1,
            "could not connect to nats://a.invalid: the host name cannot be resolved",
        ),
        (
            "peek plant --user u @",
            2,
            ": 'user' and 'password' belong together: set both or neither (--user or --password)",
        ),
    ],
)
def test_errors_are_one_line(
    line: str, status: int, said: str, filled: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line.replace("@", f"--servers {filled.url}"))
    try:
        found = main(words)
    except SystemExit as exit:  # argparse's own
        found = int(str(exit.code))
    output = capsys.readouterr()
    assert (found, output.out) == (status, "")
    assert said in output.err
    assert output.err.startswith("nats-stream-source")
    assert len(output.err.splitlines()) == 1


def test_secrets_come_from_environment_and_are_not_shown(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text("authorization { user: reader, password: s3cr3t-word }\n")
    with NatsServer(config=config) as server:
        words = ("peek", "--stream", "NONE", "--servers", server.url, "--user", "reader")
        said = command(*words, status=2, NATS_PASSWORD="s3cr3t-word")[1]
        assert "does not exist" in said  # the connection was made
        said = command(*words, status=2, NATS_PASSWORD="wr0ng-word")[1]
        assert "refused" in said
        assert "wr0ng-word" not in said
        said = command(*words, "--password", "wr0ng-word", status=2, NATS_PASSWORD="s3cr3t-word")[1]
        assert "refused" in said  # a flag wins
        url = server.url.replace("nats://", "nats://reader:s3cr3t-word@")
        said = command("peek", "--stream", "X", "--servers", url, status=2)[1]
        assert "s3cr3t-word" not in said


def test_secret_is_prompted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "typed"

    monkeypatch.setattr("getpass.getpass", answer)
    words = ["peek", "--stream", "X", "--servers", "nats://127.0.0.1:9", "--user", "u"]
    assert main([*words, "--password", "-"]) == 1
    assert asked == ["password: "]


def test_secret_prompt_without_terminal_fails() -> None:
    assert command("peek", "plant", "--user", "u", "--password", "-", status=2)[1] == (
        "nats-stream-source: could not prompt for --password: it requires a terminal; use "
        "NATS_PASSWORD\n"
    )
