"""Where the command takes the server and the authentication from: flags, variables, contexts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.cli.options import (
    DEFAULT_SERVER,
    ContextError,
    add_connection,
    connection,
    error_text,
)
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError, OptionError
from tests.support.nats import buckets

_SECRET = "s3cr3t-word"


class Home:
    """The directory of the ``nats`` command's files."""

    def __init__(self, path: Path) -> None:
        self.path = path / "nats"

    def context(self, name: str, *, selected: bool = False, **fields: Any) -> Path:
        """Write a context as ``nats context add`` does, with every field."""
        file = self.path / "context" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        empty = {"description": "", "url": "", "token": "", "user": "", "color_scheme": ""}
        file.write_text(json.dumps({**empty, **fields}))
        if selected:
            (self.path / "context.txt").write_text(f"{name}\n")
        return file


@pytest.fixture
def home(config_home: Path) -> Home:
    return Home(config_home)


def options(*words: str, **variables: str) -> dict[str, str]:
    """The options of the connection; the variables are those that the test names."""
    return resolved(*words, **variables)[0]


def resolved(*words: str, **variables: str) -> tuple[dict[str, str], dict[str, str]]:
    """The options, and the places that errors name."""
    parser = argparse.ArgumentParser()
    add_connection(parser)
    arguments = parser.parse_args(words)
    home = {"XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"]}
    return connection(arguments, {**home, **variables}), arguments.origins


# -- precedence ---------------------------------------------------------------------------------


def test_server_defaults_to_local() -> None:
    assert options() == {"servers": DEFAULT_SERVER}


def test_flag_before_variable_before_context(home: Home) -> None:
    """The order of the ``nats`` command, where NATS_URL also overrides ``--context``."""
    home.context("selected", selected=True, url="nats://selected:4222")
    home.context("named", url="nats://named:4222")
    assert options()["servers"] == "nats://selected:4222"
    assert options("--no-context")["servers"] == DEFAULT_SERVER
    assert options(NATS_CONTEXT="named")["servers"] == "nats://named:4222"
    assert options("--context", "named")["servers"] == "nats://named:4222"
    url = {"NATS_URL": "nats://variable:4222"}
    assert options("--context", "named", **url)["servers"] == "nats://variable:4222"
    assert options(NATS_SERVERS="nats://ours:4222", **url)["servers"] == "nats://ours:4222"
    assert options("--servers", "nats://flag:4222", **url)["servers"] == "nats://flag:4222"


def test_url_from_flag_keeps_user_of_context(home: Home) -> None:
    home.context("prod", selected=True, url="nats://prod:4222", user="u", password=_SECRET)
    found = options(NATS_URL="nats://other:4222")
    assert found == {"servers": "nats://other:4222", "user": "u", "password": _SECRET}


def test_authentication_method_is_unique(home: Home) -> None:
    home.context("prod", selected=True, creds="/keys/a.creds", jetstream_domain="hub")
    assert options()["credentials"] == "/keys/a.creds"
    found = options(NATS_USER="u", NATS_PASSWORD=_SECRET)
    assert "credentials" not in found
    assert found["user"] == "u"
    assert "user" not in options("--token", "t", NATS_USER="u", NATS_PASSWORD=_SECRET)
    found = options("--user", "me", NATS_PASSWORD=_SECRET)
    assert (found["user"], found["password"]) == ("me", _SECRET)
    assert "domain" not in options("--api-prefix", "JS.hub.API")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://u:a%40b@h:4222", {"servers": "nats://h:4222", "user": "u", "password": "a@b"}),
        ("u:p@q@h", {"servers": "nats://h:4222", "user": "u", "password": "p@q"}),
        ("tls://t0k@a,tls://t0k@b", {"servers": "tls://a:4222,tls://b:4222", "token": "t0k"}),
    ],
)
def test_url_with_authentication(url: str, expected: dict[str, str], home: Home) -> None:
    assert options(NATS_URL=url) == expected
    # As in nats.go, it replaces the method beside it.
    assert options(NATS_URL=url, NATS_CREDS="/a.creds") == expected
    home.context("c", url=url, nkey="/a.nk")
    assert options("--context", "c") == expected
    # The user belongs to the URL, so it is not used with another one.
    assert options("--context", "c", "--servers", "x") == {"servers": "x", "nkeySeedFile": "/a.nk"}


@pytest.mark.parametrize(
    "url",
    [
        f"nats://u:{_SECRET},1@h",
        f"nats://u:{_SECRET}@h:port",
        f"nats://u:1,{_SECRET}@h",
        f"nats://u:{_SECRET}@a,nats://other@b",
    ],
)
def test_password_is_not_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match="invalid value for NATS_URL") as caught:
        options(NATS_URL=url)
    assert _SECRET not in str(caught.value)
    assert main(["peek", "plant", "--servers", url]) == 2
    text = capsys.readouterr().err
    assert "NATS_URL" in text
    assert _SECRET not in text


# -- the fields of a context ----------------------------------------------------------------------


def test_context_fields(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("KEYS", "/keys")
    home.context(
        "prod",
        description="the plant",
        url="nats://a:4222,nats://b:4222",
        nkey="~/user.nk",
        cert="$KEYS/client.pem",
        key="file:///keys/client.key",
        ca="/keys/ca.pem",
        inbox_prefix="_INBOX.me",
        jetstream_api_prefix="JS.hub.API",
        jetstream_event_prefix="",
        tls_first=True,
        field_of_a_later_version={"a": 1},
    )
    assert options("--context", "prod") == {
        "servers": "nats://a:4222,nats://b:4222",
        "nkeySeedFile": "/home/me/user.nk",
        "tlsCertFile": "/keys/client.pem",
        "tlsKeyFile": "/keys/client.key",
        "tlsCaFile": "/keys/ca.pem",
        "inboxPrefix": "_INBOX.me",
        "apiPrefix": "JS.hub.API",
        "tlsHandshakeFirst": "true",
    }


def test_password_refers_to_variable(home: Home) -> None:
    home.context("v", user="u", password="env://PASS")
    assert options("--context", "v", PASS=_SECRET)["password"] == _SECRET


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"socks_proxy": "socks5://u:s3cr3t-word@h"}, "field 'socks_proxy' is not supported"),
        ({"nsc": "nsc://o/a/u"}, "field 'nsc' is not supported"),
        ({"creds": "op://vault/s3cr3t-word"}, "field 'creds' must be the path of a file"),
        ({"user": "u", "password": "op://s3cr3t-word"}, "field 'password' refers to op:"),
        ({"token": ["s3cr3t-word"]}, "field 'token' must be a string"),
        ({"user_jwt": "s3cr3t-word"}, "field 'user_jwt' is not supported"),
        ({"token": "env://NOT_SET"}, "field 'token' refers to an environment variable"),
        ({"token": "data:;base64,s3cr3t-word"}, "field 'token' refers to data:"),
    ],
)
def test_context_field_unusable_is_named(home: Home, fields: dict[str, Any], said: str) -> None:
    home.context("prod", **fields)
    with pytest.raises(ContextError, match="context 'prod'") as caught:
        options("--context", "prod")
    assert said in str(caught.value)
    assert _SECRET not in str(caught.value)


def test_context_with_two_methods(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.context("two", user="u", password=_SECRET, creds="/a.creds")
    assert main(["peek", "plant", "--context", "two"]) == 2
    text = capsys.readouterr().err
    assert "'credentials' and 'user' exclude each other" in text
    assert "(field creds of context two or field user of context two)" in text


def test_context_unreadable(home: Home) -> None:
    file = home.context("bad", selected=True)
    file.write_text(f'{{"token": {_SECRET}')
    for words, said in (
        (["--context", "none"], "none.json does not exist"),
        (["--context", "../bad"], "invalid name"),
        ([], "bad.json is not a JSON object"),
    ):
        with pytest.raises(ContextError, match=said) as caught:
            options(*words)
        assert _SECRET not in str(caught.value)
    file.unlink()
    with pytest.raises(ContextError, match="--no-context"):  # a selection that is out of date
        options()


# -- against a server ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with a user, and with a bucket ``plant``."""
    config = tmp_path_factory.mktemp("server") / "server.conf"
    config.write_text(f"authorization {{ user: reader, password: {_SECRET} }}\n")
    with NatsServer(config=config) as server:
        url = server.url.replace("nats://", f"nats://reader:{_SECRET}@")
        buckets.create_bucket(url, "plant")
        yield server


def test_context_opens_connection(
    home: Home, guarded: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    home.context("plant", selected=True, url=guarded.url, user="reader", password=_SECRET)
    assert main(["peek", "plant"]) == 0
    assert capsys.readouterr().err == "no rows\n"


def test_error_names_source_of_value(
    home: Home,
    guarded: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home.context("prod", url=guarded.url, user="reader", password="wr0ng")
    assert main(["peek", "plant", "--context", "prod"]) == 2
    text = capsys.readouterr().err
    assert "(field user of context prod or field password of context prod)" in text
    assert "wr0ng" not in text
    monkeypatch.setenv("NATS_URL", guarded.url.replace("://", "://reader:wr0ng@"))
    assert main(["peek", "plant"]) == 2
    text = capsys.readouterr().err
    assert "refused the credentials: check 'user' and 'password' (NATS_URL)\n" in text
    assert "wr0ng" not in text
    monkeypatch.setenv("NATS_URL", "http://h")
    assert main(["peek", "plant"]) == 2
    text = capsys.readouterr().err
    assert "invalid value for 'servers': 'http://h'" in text
    assert "(NATS_URL)" in text


def test_default_server_error_names_settings() -> None:
    error = NatsSourceError(
        "could not connect to X: refused; check 'servers'", settings=("servers",)
    )
    text = error_text(error, resolved()[1])
    assert text.endswith("(--servers, NATS_URL or a context)")
