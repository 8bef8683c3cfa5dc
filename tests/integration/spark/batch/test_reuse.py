"""A filter never changes what another use of the same DataFrame reads.

Spark plans the tasks of each ``load()`` once, and reuses the plan in all queries of the DataFrame.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many

KEYS = [f"truck.{number}" for number in range(5)]
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def trucks(spark: SparkSession, shared_server: NatsServer, bucket: str) -> Iterator[DataFrame]:
    """A bucket of five keys, in a session that pushes filters to Python sources."""
    create_bucket(shared_server.url, bucket)
    put_many(shared_server.url, bucket, [(key, key.encode()) for key in KEYS])
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, "true")
    reader = spark.read.format("nats_kv").option("servers", shared_server.url)
    yield reader.option("bucket", bucket).load()
    spark.conf.set(PUSHDOWN, before)


def test_union_and_self_join(trucks: DataFrame) -> None:
    one = trucks.where("key = 'truck.1'")
    assert one.count() == 1
    assert trucks.count() == 5
    assert one.union(trucks.where("revision >= 4")).count() == 3
    assert one.union(trucks).count() == 6
    joined = one.alias("a").join(trucks.alias("b"), on="bucket")
    assert sorted(row.key for row in joined.select("b.key").collect()) == KEYS


# Each pair of filters runs twice in a query of its own: few examples, since each is a Spark job.
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.sampled_from([*KEYS, "revision >= 3", "value is null"]), min_size=2, max_size=3))
def test_filters_belong_to_each_use(trucks: DataFrame, filters: list[str]) -> None:
    for one in filters:
        condition = f"key = '{one}'" if one in KEYS else one
        rows = trucks.where(condition).collect()
        expected = {"revision >= 3": KEYS[2:], "value is null": []}.get(one, [one])
        assert sorted(row.key for row in rows) == expected
