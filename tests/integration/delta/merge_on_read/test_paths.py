"""Forms of a local path that name one directory, for delta-rs and for merge-on-read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from deltalake import DeltaTable

from tests.integration.delta.merge_model import put
from tests.integration.delta.merge_on_read.in_process import InProcessTable
from tests.support.delta import rows_of

FORMS: dict[str, Callable[[Path], str]] = {
    "plain": str,
    "slash at the end": lambda path: f"{path}/",
    "two slashes at the begin": lambda path: f"/{path}",
    "two dots": lambda path: f"{path}/../{path.name}",
    "relative": lambda path: f"./{os.path.relpath(path)}",
    "URI": lambda path: f"file://{quote(str(path))}",
}


@pytest.mark.parametrize("form", FORMS)
def test_path_names_one_table(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a b ü" / "fleet"
    path.parent.mkdir()
    for revision in (1, 2):
        InProcessTable(FORMS[form](path)).merge(put("a", revision))
    (row,) = rows_of(DeltaTable(path))
    assert row["revision"] == 2
