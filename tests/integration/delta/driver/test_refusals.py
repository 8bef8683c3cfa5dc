"""What the driver refuses before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta.refused import REFUSED, STORE
from nats_stream_source.delta.tables import EngineRefusedError
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.merge_model import put
from tests.support.delta import change_actions, change_columns, partition_by

FIRST = [put(f"k{number}", number + 1) for number in range(10)]


def with_property(name: str, value: str) -> Callable[[Path], None]:
    return lambda path: change_actions(
        path, "metaData", lambda metadata: metadata["configuration"].update({name: value})
    )


def with_column(kind: str, **metadata: str) -> Callable[[Path], None]:
    column = {"name": "other", "type": kind, "nullable": True, "metadata": metadata}
    return lambda path: change_columns(path, lambda columns: columns.update(other=column))


def with_feature(*kinds: str, name: str) -> Callable[[Path], None]:
    return lambda path: change_actions(
        path, "protocol", lambda protocol: [protocol[kind].append(name) for kind in kinds]
    )


def with_variant(path: Path) -> None:
    with_feature("readerFeatures", "writerFeatures", name="variantType")(path)
    with_column("variant")(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_property("delta.enableChangeDataFeed", "true"), "change feed"),
        (with_column("long", **{"delta.generationExpression": "revision + 1"}), "is generated"),
        (with_variant, "Arrow lacks the type of column 'other'"),
        (with_feature("writerFeatures", name="rowTracking"), r"driver lacks \(rowTracking\)"),
        (lambda path: partition_by(path, "created"), "partition column 'created' is a TIMESTAMP"),
    ],
)
def test_table_is_refused_with_reason(
    tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    """One of each kind; tests/unit/delta/test_refused.py has the rows of the table of refusals."""
    path = tmp_path / "t"
    InProcessTable(path).merge_rows(arrow([]))
    change(path)
    before = sorted(path.rglob("*"))
    with pytest.raises(EngineRefusedError, match=reason):
        InProcessTable(path).merge(*FIRST)
    assert sorted(path.rglob("*")) == before


def test_checkpoint_of_other_kind_is_refused_where_log_begins_with_it(tmp_path: Path) -> None:
    path = tmp_path / "t"
    InProcessTable(path).merge(*FIRST)
    DeltaTable(path).create_checkpoint()
    InProcessTable(path).merge(put("a", 20))
    log = path / "_delta_log"
    checkpoint = log / f"{1:020}.checkpoint.parquet"
    checkpoint.rename(log / f"{1:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.parquet")
    assert InProcessTable(path).merge(put("a", 30)) == 1
    for version in range(2):
        (log / f"{version:020}.json").unlink()
    with pytest.raises(EngineRefusedError, match=r"driver lacks \(v2Checkpoint\)"):
        InProcessTable(path).merge(put("a", 40))


@pytest.mark.parametrize("writer_version", [2, 3, 4])
def test_legacy_protocol_is_taken_as_its_features(tmp_path: Path, writer_version: int) -> None:
    path = tmp_path / "t"
    InProcessTable(path, vectors=False).merge_rows(arrow([]))
    change_actions(path, "protocol", lambda of: of.update(minWriterVersion=writer_version))
    assert InProcessTable(path).merge(*FIRST) == 10
    with_property("delta.enableChangeDataFeed", "true")(path)
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


@pytest.mark.parametrize("option", [one.name for one in REFUSED if one.kind == STORE])
def test_storage_option_is_refused(option: str) -> None:
    for name in (option, option.upper()):
        table = InProcessTable("s3://bucket/t", storage_options={name: "true"})
        with pytest.raises(EngineRefusedError, match=f"storage option {name} is given"):
            table.merge(*FIRST)
