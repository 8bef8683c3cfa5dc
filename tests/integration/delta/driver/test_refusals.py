"""What the driver refuses before anything is written, and the limit of its index."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from nats_stream_source.delta.limits import IndexLimit
from nats_stream_source.delta.tables import EngineRefusedError
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.driver.test_partitions import partition_by
from tests.integration.delta.merge_model import put

FIRST = [put(f"k{number}", number + 1) for number in range(10)]
Action = dict[str, Any]


def change_actions(path: Path, kind: str, change: Callable[[Action], Any]) -> None:
    """Change the actions of a kind in the first entry of the log, as another writer puts them."""
    entry = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if kind in action:
            change(action[kind])
    entry.write_text("".join(f"{json.dumps(action)}\n" for action in actions))


def with_property(name: str, value: str) -> Callable[[Action], Any]:
    return lambda metadata: metadata["configuration"].update({name: value})


def with_column(kind: str, metadata: dict[str, Any]) -> Callable[[Action], Any]:
    def change(of_table: Action) -> None:
        schema = json.loads(of_table["schemaString"])
        column = {"name": "other", "type": kind, "nullable": True, "metadata": metadata}
        schema["fields"].append(column)
        of_table["schemaString"] = json.dumps(schema)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_property("delta.appendOnly", "true"), "append-only"),
        (with_property("delta.enableChangeDataFeed", "true"), "change feed"),
        (with_property("delta.constraints.positive", "revision > 0"), r"constraint \(positive\)"),
        (with_column("long", {"delta.generationExpression": "revision + 1"}), "is generated"),
        (with_column("long", {"delta.identity.step": 1}), "identity column"),
        (with_column("string", {"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}), "declared length"),
    ],
)
def test_table_is_refused_with_reason(
    tmp_path: Path, change: Callable[[Action], Any], reason: str
) -> None:
    path = tmp_path / "t"
    InProcessTable(path).merge_rows(arrow([]))
    change_actions(path, "metaData", change)
    before = sorted(path.rglob("*"))
    with pytest.raises(EngineRefusedError, match=reason):
        InProcessTable(path).merge(*FIRST)
    assert sorted(path.rglob("*")) == before


def test_column_of_type_that_arrow_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    InProcessTable(path).merge_rows(arrow([]))

    def change(protocol: Action) -> None:
        protocol["readerFeatures"].append("variantType")
        protocol["writerFeatures"].append("variantType")

    change_actions(path, "protocol", change)
    change_actions(path, "metaData", with_column("variant", {}))
    with pytest.raises(EngineRefusedError, match="Arrow lacks the type of column 'other'"):
        InProcessTable(path).merge(*FIRST)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(pa.timestamp("us", "UTC"), "TIMESTAMP"), (pa.float64(), "DOUBLE"), (pa.binary(), "BINARY")],
)
def test_partition_column_is_refused(tmp_path: Path, kind: pa.DataType, reason: str) -> None:
    path = tmp_path / "t"
    rows = arrow([]).append_column("part", pa.array([], kind))
    InProcessTable(path).merge_rows(rows)
    partition_by(path, "part")
    with pytest.raises(EngineRefusedError, match=f"partition column 'part' is a {reason}"):
        InProcessTable(path).merge_rows(rows)


def test_unknown_feature_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    InProcessTable(path).merge_rows(arrow([]))

    def change(protocol: Action) -> None:
        protocol["writerFeatures"].append("rowTracking")

    change_actions(path, "protocol", change)
    with pytest.raises(EngineRefusedError, match=r"feature that the driver lacks \(rowTracking\)"):
        InProcessTable(path).merge(*FIRST)


@pytest.mark.parametrize("writer_version", [2, 3, 4])
def test_legacy_protocol_is_taken_as_its_features(tmp_path: Path, writer_version: int) -> None:
    path = tmp_path / "t"
    InProcessTable(path, vectors=False).merge_rows(arrow([]))

    def change(protocol: Action) -> None:
        protocol["minWriterVersion"] = writer_version

    change_actions(path, "protocol", change)
    assert InProcessTable(path).merge(*FIRST) == 10
    change_actions(path, "metaData", with_property("delta.enableChangeDataFeed", "true"))
    with pytest.raises(EngineRefusedError, match="change feed"):
        InProcessTable(path).merge(put("a", 20))


@pytest.mark.parametrize("created", [True, False])
def test_other_deletion_vectors_than_those_of_table_are_error(
    tmp_path: Path, created: bool
) -> None:
    path = tmp_path / "t"
    InProcessTable(path, vectors=created).merge(*FIRST)
    expected = "has" if created else "does not have"
    with pytest.raises(
        ConfigurationError,
        match=f"with deletion_vectors={not created}: the table {expected} the property "
        "delta.enableDeletionVectors; .*remove the argument",
    ):
        InProcessTable(path, vectors=not created).merge(put("a", 20))
    assert DeltaTable(path).version() == 1
    assert InProcessTable(path).merge(put("a", 20)) == 1


@pytest.mark.parametrize(
    "option", ["aws_s3_allow_unsafe_rename", "AWS_S3_LOCKING_PROVIDER", "allow_unsafe_rename"]
)
def test_storage_option_is_refused(option: str) -> None:
    table = InProcessTable("s3://bucket/t", storage_options={option: "true"})
    with pytest.raises(EngineRefusedError, match=f"storage option {option} is given"):
        table.merge(*FIRST)


def test_directory_with_other_files_is_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigurationError, match="has files and is not a Delta table"):
        InProcessTable(tmp_path).merge(*FIRST)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


# -- the limit of the index -------------------------------------------------------------------


def test_index_that_grows_beyond_its_limit_is_error_with_restart_as_action(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t"
    table = InProcessTable(path)
    table.merge(*FIRST)
    table.limit = limit = IndexLimit(int(1.2 * table.state.index.nbytes), enforced=True)
    with caplog.at_level(logging.WARNING):
        for revision in (40, 41):
            table.merge(put("k1", revision))  # near the limit: one warning
        assert len([one for one in caplog.records if "beyond its limit" in one.message]) == 1
        table.merge(*[put(f"m{number}", 50 + number) for number in range(8)])
        with pytest.raises(ConfigurationError, match="; restart the query: it then takes Spark"):
            table.merge(put("k1", 90))
    version = DeltaTable(path).version()
    with pytest.raises(EngineRefusedError, match=r"index_bytes is [\d,]+, limit [\d,]+"):
        InProcessTable(path, limit=limit).merge(put("k1", 90))
    assert DeltaTable(path).version() == version


def test_limit_that_is_not_enforced_is_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = InProcessTable(tmp_path / "t", limit=IndexLimit(100))
    with caplog.at_level(logging.WARNING):
        for revision in range(1, 4):
            assert table.merge(*[put(f"k{n}", 10 * revision + n) for n in range(8)]) == 8
    assert len([one for one in caplog.records if "beyond its limit" in one.message]) == 1


# -- without Spark ----------------------------------------------------------------------------


def test_writer_and_rule_work_without_pyspark(tmp_path: Path) -> None:
    program = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j", "delta"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
import pyarrow as pa
from nats_stream_source.delta.driver.engine import DriverEngine, opened_table
from nats_stream_source.delta.limits import IndexLimit
from nats_stream_source.delta.rules.events import EventBatch, EventShape, EventTable
from nats_stream_source.delta.rules.layout import Layout
from nats_stream_source.delta.upkeep import Upkeep
rows = pa.table({{"key": ["a"], "revision": [1], "operation": ["PUT"],
    "stream_created": pa.array([0], pa.timestamp("us", "UTC"))}})
shape = EventShape(rows.schema, Layout.of_entries(rows.schema.names, "remove"), computed=True)
engine = DriverEngine(opened_table("t", {str(tmp_path / "t")!r}), None, IndexLimit())
print(engine.merge(EventBatch(shape, EventTable(rows)), Upkeep()).inserted)
engine.find().maintain(Upkeep())
assert not [name for name in sys.modules if "spark" in name.partition(".")[0]]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
