"""The table of columns, as DDL and as Arrow schemas."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nats_stream_source.spark.formats.columns import COLUMNS, ddl
from nats_stream_source.spark.formats.rows import arrow_schema


@pytest.mark.parametrize("include_headers", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_arrow_schema_equals_schema_of_ddl(
    spark: SparkSession, name: str, include_headers: bool
) -> None:
    """Down to the names of a map's fields, which pyarrow's own comparison ignores."""
    assert spark.version  # a schema from DDL needs a session
    schema = arrow_schema(name, include_headers=include_headers)
    columns = ddl(name, include_headers=include_headers)
    expected: Any = to_arrow_schema(StructType.fromDDL(columns), timezone="UTC")
    assert schema.equals(expected)
    assert str(schema) == str(expected)
