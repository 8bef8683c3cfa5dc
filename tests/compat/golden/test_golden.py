"""Old checkpoints: this version goes on from each that an earlier one has written.

The store beside them is put back, so that streams have the creation times and messages the times
that the offsets remember. See this package's docstring.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.compat.golden.dataset import Case, by_key, go_on

GOLDEN = Path(__file__).parent
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
"""Some with the name of a story behind them: see ``histories.py``."""

LATEST = max(version for version in VERSIONS if "-" not in version)
ALL = [
    pytest.param(version, name, marks=pytest.mark.faults if "-" in version else ())
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


def offsets(checkpoint: Path) -> dict[int, dict[str, Any]]:
    """The source's offset of each micro-batch in the log."""
    logged = (checkpoint / "offsets").glob("[0-9]*")
    return {int(path.name): json.loads(path.read_text().splitlines()[-1]) for path in logged}


@pytest.mark.parametrize(("version", "name"), ALL)
def test_checkpoint_resumes(
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
    logged = offsets(checkpoint)
    assert (checkpoint / "commits" / str(max(logged))).exists() is not case.uncommitted
    assert version.endswith("-first") is not (checkpoint / "commits").exists()
    assert known["missing"], "there is something to go on with"
    found = go_on(spark, url, case, checkpoint)
    # Buckets have no order between them.
    assert (sorted(found, key=by_key) if version.endswith("-several") else found) == known[
        "missing"
    ]
    assert go_on(spark, url, case, checkpoint) == []
    # What was logged is what was read.
    assert offsets(checkpoint).items() >= logged.items()


@pytest.mark.parametrize(
    ("version", "name"), [one for one in ALL if str(one.values[0]).endswith("-epochs")]
)
def test_data_loss_accepted_is_not_reported_again(
    spark: SparkSession,
    restored: Callable[[str], str],
    tmp_path: Path,
    version: str,
    name: str,
) -> None:
    """In a later epoch, a query goes on with failOnDataLoss as well; also where that begins."""
    url = restored(version)
    case, known = case_of(version, name)
    checkpoint = checkpoint_of(version, name, tmp_path)
    logged = offsets(checkpoint)
    before, last = logged[max(logged) - 1], logged[max(logged)]
    assert (before["epoch"], last["epoch"]) == (0, 1)
    assert before["created"] != last["created"]
    assert before["stream_seq"] > last["stream_seq"]
    strict = replace(case, options={**case.options, "failOnDataLoss": "true"})
    assert go_on(spark, url, strict, checkpoint) == known["missing"]
    assert {offset["epoch"] for offset in offsets(checkpoint).values()} == {0, 1}


def change_offsets(checkpoint: Path, change: dict[str, Any]) -> None:
    """Put other fields into every offset of the source."""
    for path in (checkpoint / "offsets").glob("[0-9]*"):
        *lines, offset = path.read_text().splitlines()
        path.write_text("\n".join([*lines, json.dumps({**json.loads(offset), **change})]))


def test_offset_with_unknown_fields_is_read(
    spark: SparkSession, restored: Callable[[str], str], tmp_path: Path
) -> None:
    """A later version of the same format may say more; what it says is not needed."""
    version = LATEST
    url = restored(version)
    case, known = case_of(version, "kv_uncommitted")
    checkpoint = checkpoint_of(version, "kv_uncommitted", tmp_path)
    change_offsets(checkpoint, {"mood": "fine", "more": {"a": [1]}})
    assert go_on(spark, url, case, checkpoint) == known["missing"]


def test_newer_offset_format_is_refused(
    spark: SparkSession, restored: Callable[[str], str], tmp_path: Path
) -> None:
    version = LATEST
    url = restored(version)
    case, _ = case_of(version, "kv")
    checkpoint = checkpoint_of(version, "kv", tmp_path)
    change_offsets(checkpoint, {"v": 99})
    with pytest.raises(
        StreamingQueryException,
        match=r"OffsetError: .* checkpoint's offset: format is 99, expected 2 or lower",
    ):
        go_on(spark, url, case, checkpoint)
