"""AUTO CDC flows of a declarative pipeline: one source of events, a table for each SCD type.

``spark-pipelines`` runs a copy of this file. The events are files of JSON in the directory that the
specification's configuration names.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
TABLES = {
    "scd1": {"stored_as_scd_type": 1},
    "scd2_track_a_b": {"stored_as_scd_type": 2, "track_history_column_list": ["a", "b"]},
    "scd2_track_a": {"stored_as_scd_type": 2, "track_history_column_list": ["a"]},
}


@dp.temporary_view
def events() -> DataFrame:
    source = spark.readStream.schema("key STRING, seq BIGINT, op STRING, a BIGINT, b STRING")
    return source.json(spark.conf.get("events.directory"))


for name, arguments in TABLES.items():
    dp.create_streaming_table(name)
    dp.create_auto_cdc_flow(
        target=name,
        source="events",
        keys=["key"],
        sequence_by="seq",
        apply_as_deletes="op = 'D'",
        except_column_list=["op"],
        **arguments,
    )
