"""Targets of a sink: created in an account that requires a size; that acknowledge too early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ApiError, ConfigurationError, OptionError
from nats_stream_source.options.writing import kv_write_options, stream_write_options
from nats_stream_source.spark.writing.target import prepare_target
from tests.support.nats.buckets import api
from tests.support.nats.cluster import Cluster

CONFIG = """
server_tags: ["ssd"]
accounts {
  A {
    jetstream { max_bytes_required: true, max_file: 10M, disk_max_stream_bytes: 4M }
    users: [{user: a, password: a}]
  }
}
no_auth_user: a
"""
CREATED = {
    "maxBytes": "2m",
    "compression": "s2",
    "placementTags": "ssd",
    "metadata": '{"owner": "fleet", "cost centre": "7"}',
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server whose account requires a size."""
    path: Path = tmp_path_factory.mktemp("server") / "nats.conf"
    path.write_text(CONFIG)
    with NatsServer(config=path) as server:
        yield server.url


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with 4 MB of files and 2 MB of memory for JetStream."""
    path: Path = tmp_path_factory.mktemp("server") / "nats.conf"
    path.write_text("jetstream { max_file_store: 4M, max_memory_store: 2M }")
    with NatsServer(config=path) as server:
        yield server.url


def create(url: str, target: str, **options: str) -> None:
    given = {"servers": url, "ifMissing": "create", **options}
    if target == "bucket":
        prepare_target(kv_write_options({**given, "bucket": "b"}))
    else:
        prepare_target(stream_write_options({**given, "stream": "S", "subject": "s"}))


@pytest.mark.parametrize("target", ["bucket", "stream"])
def test_creation_in_account_that_requires_size(url: str, target: str) -> None:
    with pytest.raises(ApiError, match=r"max bytes.*; set the option 'maxBytes'") as refused:
        create(url, target)
    assert refused.value.err_code == 10113
    with pytest.raises(ApiError, match=r"; set a smaller 'maxBytes'"):
        create(url, target, maxBytes="5m")
    create(url, target, **CREATED)
    name = "KV_b" if target == "bucket" else "S"
    config = api(url, f"STREAM.INFO.{name}")["config"]
    assert (config["max_bytes"], config["compression"]) == (2 << 20, "s2")
    assert config["placement"]["tags"] == ["ssd"]
    assert config["metadata"].items() >= {"owner": "fleet", "cost centre": "7"}.items()


@pytest.mark.parametrize("target", ["bucket", "stream"])
@pytest.mark.parametrize(("storage", "err_code"), [("file", 10047), ("memory", 10028)])
def test_creation_larger_than_room_of_server(
    small_server: str, target: str, storage: str, err_code: int
) -> None:
    with pytest.raises(ApiError, match=r"; set the option 'maxBytes' to a size that") as refused:
        create(small_server, target, maxBytes="5m", storage=storage, connectTimeout="0.1")
    assert refused.value.err_code == err_code


def test_creation_where_no_server_has_tags(cluster: Cluster) -> None:
    with pytest.raises(
        ApiError, match=r"set other 'placementCluster' or 'placementTags'"
    ) as refused:
        create(cluster.url, "bucket", placementTags="none")
    assert refused.value.err_code == 10005
    create(cluster.url, "bucket", placementCluster="test", replicas="3")


@pytest.mark.parametrize("name", CREATED)
def test_option_of_creation_without_ifmissing(name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' has no effect without ifMissing=create"):
        kv_write_options({"servers": "nats://x", "bucket": "b", name: CREATED[name]})


@pytest.mark.parametrize("target", ["bucket", "stream"])
def test_target_that_acknowledges_before_it_stores(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    url = shared_server.url
    name, subject = ("KV_b", "$KV.b.>") if target == "bucket" else ("S", "s")
    config = {"name": name, "subjects": [subject], "max_msgs_per_subject": 1}
    api(url, f"STREAM.CREATE.{name}", {**config, "persist_mode": "async"})
    create(url, target)
    assert "rows are acknowledged before they are stored" in caplog.text
    with pytest.raises(ConfigurationError, match=r"persist_mode is 'async'.*remove the option"):
        create(url, target, asyncPersist="fail")
