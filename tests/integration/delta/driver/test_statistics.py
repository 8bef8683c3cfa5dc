"""The statistics of the driver's data files are those of Delta's own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.delta.driver.storage import TableStorage
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.merge_model import put

_COLUMNS = """
named_struct('i', id, 'n', named_struct('t', timestamp'2026-01-01 00:00:00.5')) AS s,
cast(id AS TINYINT) AS b, cast(id AS SMALLINT) AS sm, cast(id AS INT) AS i, id - 1 AS l,
cast(id + 0.1 AS FLOAT) AS f, id / 3 AS d, cast(id + 0.25 AS DECIMAL(10,2)) AS de,
cast(id * 100000 AS DECIMAL(38,3)) AS wide, id = 1 AS bo, date'2026-02-03' AS da,
timestamp'2026-01-01 10:00:00' AS ts, timestamp_ntz'2026-01-01 10:00:00.123' AS ntz,
cast(cast(id AS STRING) AS BINARY) AS bi, concat('text', id) AS st, if(id = 1, NULL, 'x') AS nu,
array(id) AS ar, if(id = 0, NULL, map('a', id)) AS ma, cast(NULL AS STRING) AS no,
concat(repeat('l', 40), id) AS lo
"""


def statistics_of(path: Path) -> dict[str, Any]:
    state = TableStorage(str(path), str(path)).read_existing()
    (add,) = state.files.values()
    values: dict[str, Any] = json.loads(add["stats"])
    return values


@pytest.mark.delta
def test_statistics_equal_those_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql(f"SELECT {_COLUMNS} FROM range(3)").coalesce(1)
    frame.write.format("delta").save(str(tmp_path / "spark"))
    rows = frame.toArrow()
    table = InProcessTable(tmp_path / "own", vectors=False)
    entries = arrow([put(f"k{number}", number) for number in range(3)])
    for name in rows.column_names:
        entries = entries.append_column(name, rows[name])
    table.merge_rows(entries.select([*rows.column_names, *entries.column_names[:7]]))
    own, expected = statistics_of(tmp_path / "own"), statistics_of(tmp_path / "spark")
    for kind in ("minValues", "maxValues", "nullCount"):
        of_own = {name: value for name, value in own[kind].items() if name in rows.column_names}
        # A text of more than 32 characters does not bound the file above; Delta lengthens it.
        if kind == "maxValues":
            del expected[kind]["lo"]
        assert of_own == expected[kind]
    assert own["numRecords"] == expected["numRecords"] == 3
