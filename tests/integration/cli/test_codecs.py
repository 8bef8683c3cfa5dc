"""``peek`` of a bucket whose keys and values are encoded."""

from __future__ import annotations

import json

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer
from tests.integration.cli.command import objects
from tests.support.nats import buckets

KEYS, BOTH = (
    ("--key-codec", "path,base64"),
    ("--key-codec", "path,base64", "--value-codec", "base64"),
)


@pytest.fixture(scope="module")
def server(shared_server: NatsServer) -> NatsServer:
    url = shared_server.url
    for name in ("plant", "mixed"):
        buckets.create_bucket(url, name, 3)
        buckets.put(url, name, "X3Jvb3Rf.aGFsbCAx.cHVtcA", b"b24")  # /hall 1/pump = on
        buckets.put(url, name, "ZG9vcg", b"b3Blbg")  # door = open
    buckets.put(url, "mixed", "plain", b"x")
    return shared_server


@pytest.fixture(autouse=True)
def url(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", server.url)


def test_peek(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peek", "plant", *BOTH, "--json"]) == 0
    rows = [(one["key"], one["value"]) for one in objects(capsys.readouterr().out)]
    assert rows == [("/hall 1/pump", "on"), ("door", "open")]
    assert main(["peek", "plant", *BOTH, "--keys", "/hall 1/*", "--json"]) == 0
    assert [one["value"] for one in objects(capsys.readouterr().out)] == ["on"]
    assert main(["peek", "mixed", *BOTH]) == 1
    error = capsys.readouterr().err
    assert "could not decode the key of entry 'plain'" in error
    assert error.count("--key-codec") == 1
    assert main(["peek", "mixed", *BOTH, "--on-undecodable", "null", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["key"], last["value"]) == (None, None)
    assert main(["peek", "--stream", "KV_plant", *KEYS]) == 2
