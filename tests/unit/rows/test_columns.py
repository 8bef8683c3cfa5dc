"""The table of columns, as DDL and as Arrow schemas."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nats_stream_source.rows.arrow import arrow_schema
from nats_stream_source.rows.columns import COLUMNS, ddl


@pytest.mark.parametrize(
    "added",
    [set(), {"includeHeaders"}, {"includeHeaders", "includeOrigin", "includeRawKey"}],
    ids=len,
)
@pytest.mark.parametrize("name", COLUMNS)
def test_arrow_schema_equals_schema_of_ddl(spark: SparkSession, name: str, added: set[str]) -> None:
    """Down to the names of a map's fields, which pyarrow's own comparison ignores."""
    assert spark.version  # a schema from DDL needs a session
    schema = arrow_schema(name, frozenset(added))
    columns = ddl(name, added)
    assert ("raw_key" in columns) == (name == "nats_kv" and "includeRawKey" in added)
    expected: Any = to_arrow_schema(StructType.fromDDL(columns), timezone="UTC")
    assert schema.equals(expected)
    assert str(schema) == str(expected)
