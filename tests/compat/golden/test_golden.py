"""Old checkpoints: this version resumes each checkpoint that an earlier version wrote.

The store beside them is put back, so that streams have the creation times and messages the times
that the offsets remember. See this package's docstring.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.compat.golden.write import Case, by_key, go_on

GOLDEN = Path(__file__).parent
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
"""Some with the name of a story behind them: see ``write.py``."""

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


@dataclass(frozen=True)
class StoredQuery:
    """A copy of a checkpoint, with a server that has its streams.

    Attributes:
        missing: the rows that the query reads when it continues.
    """

    url: str
    case: Case
    checkpoint: Path
    missing: list[list[Any]]

    @property
    def offsets(self) -> dict[int, dict[str, Any]]:
        """The source's offset of each micro-batch in the log."""
        logged = (self.checkpoint / "offsets").glob("[0-9]*")
        return {int(path.name): json.loads(path.read_text().splitlines()[-1]) for path in logged}

    def change_offsets(self, **fields: Any) -> None:
        """Set fields of each offset of the source."""
        for path in (self.checkpoint / "offsets").glob("[0-9]*"):
            *lines, offset = path.read_text().splitlines()
            path.write_text("\n".join([*lines, json.dumps({**json.loads(offset), **fields})]))


@pytest.fixture
def stored(restored: Callable[[str], str], tmp_path: Path, version: str, name: str) -> StoredQuery:
    """The query ``name`` of ``version``, which are parameters of the test."""
    known = json.loads((GOLDEN / version / "cases.json").read_text())[name]
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / version / name / "checkpoint", checkpoint)
    case = Case(known["format"], known["options"], known["uncommitted"])
    return StoredQuery(restored(version), case, checkpoint, known["missing"])


@pytest.mark.parametrize(("version", "name"), ALL)
def test_checkpoint_resumes(spark: SparkSession, stored: StoredQuery, version: str) -> None:
    """The query reads each missing row once, and a micro-batch without a commit again."""
    logged = stored.offsets
    commits = stored.checkpoint / "commits"
    assert (commits / str(max(logged))).exists() is not stored.case.uncommitted
    assert version.endswith("-first") is not commits.exists()
    assert stored.missing, "there is something to go on with"
    found = go_on(spark, stored.url, stored.case, stored.checkpoint)
    # Buckets have no order between them.
    several = version.endswith("-several")
    assert (sorted(found, key=by_key) if several else found) == stored.missing
    assert go_on(spark, stored.url, stored.case, stored.checkpoint) == []
    # What was logged is what was read.
    assert stored.offsets.items() >= logged.items()


@pytest.mark.parametrize(
    ("version", "name"), [one for one in ALL if str(one.values[0]).endswith("-epochs")]
)
def test_data_loss_accepted_is_not_reported_again(spark: SparkSession, stored: StoredQuery) -> None:
    """In a later epoch, a query continues with failOnDataLoss as well; also where that begins."""
    logged = stored.offsets
    before, last = logged[max(logged) - 1], logged[max(logged)]
    assert (before["epoch"], last["epoch"]) == (0, 1)
    assert before["created"] != last["created"]
    assert before["stream_seq"] > last["stream_seq"]
    strict = replace(stored.case, options={**stored.case.options, "failOnDataLoss": "true"})
    assert go_on(spark, stored.url, strict, stored.checkpoint) == stored.missing
    assert {offset["epoch"] for offset in stored.offsets.values()} == {0, 1}


@pytest.mark.parametrize(("version", "name"), [(LATEST, "kv_uncommitted")])
def test_offset_with_unknown_fields_is_read(spark: SparkSession, stored: StoredQuery) -> None:
    """A later version of the same format may add fields that this version does not need."""
    stored.change_offsets(mood="fine", more={"a": [1]})
    assert go_on(spark, stored.url, stored.case, stored.checkpoint) == stored.missing


@pytest.mark.parametrize(("version", "name"), [(LATEST, "kv")])
def test_newer_offset_format_is_refused(spark: SparkSession, stored: StoredQuery) -> None:
    stored.change_offsets(v=99)
    with pytest.raises(
        StreamingQueryException,
        match=r"OffsetError: .* checkpoint's offset: format is 99, expected 2 or lower",
    ):
        go_on(spark, stored.url, stored.case, stored.checkpoint)
