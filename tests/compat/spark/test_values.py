"""Prefixes of a schema registry are split wherever Spark runs."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tests.support.schema_registry import PROTOBUF_SPLITS, SPLITS, splits_of

pytestmark = pytest.mark.sparks


def test_prefixes_are_split(spark: SparkSession) -> None:
    assert splits_of(spark, [value for value, _ in SPLITS]) == [split for _, split in SPLITS]
    values = [value for value, _ in PROTOBUF_SPLITS]
    expected = [split for _, split in PROTOBUF_SPLITS]
    assert splits_of(spark, values, message_indexes=True) == expected
