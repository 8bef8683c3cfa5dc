"""Which directory the text of a table names, and which texts are refused."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from nats_stream_source.delta.location import TableArgument, TableLocation
from nats_stream_source.errors import ConfigurationError


@pytest.mark.parametrize(
    ("table", "uri"),
    [
        ("/lake/fleet", "/lake/fleet"),
        ("/lake/fleet/", "/lake/fleet"),
        ("//lake/fleet", "/lake/fleet"),
        ("/lake//fleet", "/lake/fleet"),
        ("/lake/yard/../fleet/.", "/lake/fleet"),
        ("./fleet", "{cwd}/fleet"),
        ("../fleet", "{parent}/fleet"),
        ("lake/fleet", "{cwd}/lake/fleet"),
        (PurePosixPath("fleet"), "{cwd}/fleet"),
        (PurePosixPath("/lake/my fleet"), "/lake/my fleet"),
        ("/lake/100%/ü#?", "/lake/100%/ü#?"),
        ("file:/lake/fleet", "/lake/fleet"),
        ("file:///lake//fleet/", "/lake/fleet"),
        ("file://localhost/lake/my fleet", "/lake/my fleet"),
        ("FILE:///lake/../fleet", "/fleet"),
        ("s3://bucket/lake//fleet/", "s3://bucket/lake/fleet"),
        ("s3://bucket/lake/../fleet", "s3://bucket/fleet"),
        ("s3://bucket", "s3://bucket"),
        ("abfss://c@account.dfs/lake/", "abfss://c@account.dfs/lake"),
    ],
)
def test_uri_of_table(table: TableArgument, uri: str) -> None:
    cwd = os.getcwd()
    expected = uri.format(cwd=cwd, parent=str(Path(cwd).parent))
    location = TableLocation(table)
    assert location.is_path
    assert location.uri == expected


@pytest.mark.parametrize("table", ["fleet", "lake.fleet", "delta.`/lake/fleet`", "`a/b`"])
def test_name_in_catalog_is_unchanged(table: str) -> None:
    location = TableLocation(table)
    assert not location.is_path
    assert location.name == location.uri == table


def test_working_directory_changed_after_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = TableLocation("./fleet")
    before = location.uri
    monkeypatch.chdir(tmp_path)
    assert location.uri == before


@pytest.mark.parametrize(
    ("table", "arguments", "problem"),
    [
        ("file://host/lake", {}, "a URI with a host; write file:///"),
        ("/lake/\udcff", {}, r"a path with '\\udcff'.*rename"),
        ("/lake/back`quote", {}, "a path with '`'"),
        ("/lake/a\0b", {}, r"a path with '\\x00'"),
        ("/lake/a%20b", {"engine": "driver"}, "'%20' in a path literally; rename .*'spark'"),
        ("/lake/a[b]", {"engine": "driver"}, r"'\[' in a path"),
        ("/lake/a\\b", {"engine": "driver"}, r"'\\\\' in a path"),
        ("s3://b/a#b", {"engine": "driver"}, "'#' in a path"),
    ],
)
def test_path_that_engines_read_differently(
    table: str, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"invalid argument: table is .*{problem}"):
        TableLocation(table, **arguments)


@pytest.mark.parametrize(
    ("table", "filesystem", "problem"),
    [
        ("/lake/fleet", "file:///", None),
        ("file:///lake/fleet", "hdfs://nodes", None),
        ("fleet", "file:///", "a name in the catalog"),
        ("/lake/fleet", "hdfs://nodes", "paths without a scheme are in hdfs://nodes"),
        ("/lake/fleet", None, "with Spark Connect"),
        ("s3://lake/fleet", "file:///", "storage_options are not given"),
        ("/lake/a%20b", "file:///", "does not take '%20' in a path literally"),
    ],
)
def test_location_of_driver(table: str, filesystem: str | None, problem: str | None) -> None:
    found = TableLocation(table).driver_problem(filesystem)
    assert found is None if problem is None else problem in str(found)
