"""Old checkpoints: this version goes on from each that an earlier one has written.

The store beside them is put back, so that streams have the creation times and messages the times
that the offsets remember. See ``golden/``.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from golden.write import Case, go_on
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer

GOLDEN = Path(__file__).with_name("golden")
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
ALL = [
    (version, name)
    for version in VERSIONS
    for name in json.loads((GOLDEN / version / "cases.json").read_text())
]


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """From a version to the address of a server that has its streams; one server each."""
    servers: dict[str, NatsServer] = {}

    def restore(version: str) -> str:
        if version not in servers:
            store = tmp_path_factory.mktemp(version)
            with tarfile.open(GOLDEN / version / "store.tar.gz") as tar:
                tar.extractall(store, filter="data")
            servers[version] = NatsServer(store=store)
            servers[version].start()
        return servers[version].url

    yield restore
    for server in servers.values():
        server.stop()


def case_of(version: str, name: str) -> tuple[Case, dict[str, Any]]:
    known = json.loads((GOLDEN / version / "cases.json").read_text())[name]
    return Case(known["format"], known["options"], known["uncommitted"]), known


def checkpoint_of(version: str, name: str, directory: Path) -> Path:
    shutil.copytree(GOLDEN / version / name / "checkpoint", directory / "checkpoint")
    return directory / "checkpoint"


@pytest.mark.parametrize(("version", "name"), ALL)
def test_it_goes_on(
    spark: SparkSession,
    restored: Callable[[str], str],
    tmp_path: Path,
    version: str,
    name: str,
) -> None:
    """What is missing comes, all of it and nothing else; what was not committed comes again."""
    url = restored(version)
    case, known = case_of(version, name)
    checkpoint = checkpoint_of(version, name, tmp_path)
    last = max(int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*"))
    assert (checkpoint / "commits" / str(last)).exists() is not case.uncommitted
    assert known["missing"], "there is something to go on with"
    assert go_on(spark, url, case, checkpoint) == known["missing"]
    assert go_on(spark, url, case, checkpoint) == []


def change_offsets(checkpoint: Path, change: dict[str, Any]) -> None:
    """Put other fields into every offset of the source."""
    for path in (checkpoint / "offsets").glob("[0-9]*"):
        *lines, offset = path.read_text().splitlines()
        path.write_text("\n".join([*lines, json.dumps({**json.loads(offset), **change})]))


def test_an_offset_with_more_fields_is_read(
    spark: SparkSession, restored: Callable[[str], str], tmp_path: Path
) -> None:
    """A later version of the same format may say more; what it says is not needed."""
    version = VERSIONS[-1]
    url = restored(version)
    case, known = case_of(version, "kv_uncommitted")
    checkpoint = checkpoint_of(version, "kv_uncommitted", tmp_path)
    change_offsets(checkpoint, {"mood": "fine", "more": {"a": [1]}})
    assert go_on(spark, url, case, checkpoint) == known["missing"]


def test_a_newer_format_is_refused(
    spark: SparkSession, restored: Callable[[str], str], tmp_path: Path
) -> None:
    version = VERSIONS[-1]
    url = restored(version)
    case, _ = case_of(version, "kv")
    checkpoint = checkpoint_of(version, "kv", tmp_path)
    change_offsets(checkpoint, {"v": 99})
    with pytest.raises(
        StreamingQueryException,
        match=r"OffsetError: the checkpoint's offset has format 99, .* up to",
    ):
        go_on(spark, url, case, checkpoint)
