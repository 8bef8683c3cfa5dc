"""`nats_stream_source.values`: prefixes of a schema registry are split, and name the schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.avro.functions import from_avro

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.values import decode_by_schema
from tests.support.schema_registry import (
    GUID,
    PROTOBUF_SPLITS,
    SPLITS,
    by_guid,
    by_id,
    indexed,
    splits_of,
    values_frame,
    varint,
)

CAR = {
    "type": "record",
    "name": "car",
    "fields": [{"name": "plate", "type": "string"}, {"name": "km", "type": "long"}],
}
SINCE = {"name": "since", "type": ["null", "string"], "default": None}
OLD, NEW = json.dumps(CAR), json.dumps({**CAR, "fields": [*CAR["fields"], SINCE]})


def old_body(plate: str, km: int) -> bytes:
    return varint(len(plate)) + plate.encode() + varint(km)


def new_body(plate: str, km: int, since: str) -> bytes:
    return old_body(plate, km) + varint(1) + varint(len(since)) + since.encode()


@pytest.fixture(params=["NO_CODEGEN", "CODEGEN_ONLY"])
def code(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[None]:
    """Expressions are interpreted, and compiled."""
    settings = {
        "spark.sql.codegen.factoryMode": request.param,
        "spark.sql.codegen.wholeStage": str(request.param == "CODEGEN_ONLY").lower(),
    }
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


def test_prefixes_are_split(spark: SparkSession, code: None) -> None:
    assert splits_of(spark, [value for value, _ in SPLITS]) == [split for _, split in SPLITS]


def test_message_indexes_are_split(spark: SparkSession, code: None) -> None:
    values = [value for value, _ in PROTOBUF_SPLITS]
    expected = [split for _, split in PROTOBUF_SPLITS]
    assert splits_of(spark, values, message_indexes=True) == expected


def test_random_message_indexes_roundtrip(spark: SparkSession) -> None:
    chance = random.Random(41)
    cases = [
        ([chance.randrange(2 ** chance.randint(1, 16)) for _ in range(chance.randint(1, 12))], body)
        for body in (chance.randbytes(chance.randint(0, 9)) for _ in range(200))
    ]
    values = [by_id(9, indexed(indexes, body)) for indexes, body in cases]
    assert splits_of(spark, values, message_indexes=True) == [
        (9, None, indexes, body) for indexes, body in cases
    ]


@pytest.mark.delta
def test_avro_with_prefix_is_decoded_only_by_its_schema(spark: SparkSession) -> None:
    """The plain recipe reads the prefix as fields, without an error; this one never does."""
    chance = random.Random(7)
    cars = [(f"M-{chance.randrange(10**6)}", chance.randrange(10**9)) for _ in range(100)]
    values: list[tuple[bytes, Any]] = []
    for plate, km in cars:
        values += [
            (by_id(1, old_body(plate, km)), (plate, km, None)),
            (by_id(3, new_body(plate, km, "May")), (plate, km, "May")),
            (by_guid(old_body(plate, km)), (plate, km, None)),
            (by_id(2, old_body(plate, km)), None),  # a schema that the query does not have
            (old_body(plate, km), None),
        ]
    frame = values_frame(spark, [value for value, _ in values])

    def decode(body: Column, schema: str) -> Column:
        return from_avro(body, schema, {"avroSchema": NEW, "mode": "FAILFAST"})

    decoded = frame.select(
        "row", decode_by_schema("value", {1: OLD, 3: NEW, str(GUID): OLD}, decode).alias("car")
    )
    assert [row.car and tuple(row.car) for row in decoded.orderBy("row").collect()] == [
        expected for _, expected in values
    ]
    plain = frame.where("row % 5 = 0").select(from_avro("value", OLD, {"mode": "FAILFAST"}))
    wrong = {tuple(row[0]) for row in plain.collect()}
    assert not wrong & set(cars)


def test_protobuf_is_decoded_by_schema_and_message(spark: SparkSession) -> None:
    values = [
        by_id(7, b"\x00first"),
        by_id(7, indexed([0], b"first")),
        by_id(7, indexed([1, 0], b"nested")),
        by_id(7, indexed([1], b"other")),
        by_id(8, b"\x00other"),
    ]
    schemas = {(7, (0,)): "order: ", (7, (1, 0)): "line: "}
    column = decode_by_schema(
        "value", schemas, lambda body, name: sf.concat(sf.lit(name), body.cast("string"))
    )
    rows = values_frame(spark, values).select("row", column.alias("text")).orderBy("row").collect()
    texts = ["order: first", "order: first", "line: nested", None, None]
    assert [row.text for row in rows] == texts


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        ({}, "schemas is empty"),
        ({-1: ""}, "-1 is not the id of a schema"),
        ({2**32: ""}, "4294967296 is not the id of a schema"),
        ({True: ""}, "True is not the id of a schema"),
        ({"seven": ""}, "'seven' is not the id of a schema"),
        ({(7, ()): ""}, r"\(7, \(\)\) is not the id of a schema"),
        ({(7, (-1,)): ""}, r"\(7, \(-1,\)\) is not the id of a schema"),
        ({1: "", (7, (0,)): ""}, "a mix of ids and of tuples"),
        ({GUID: "", str(GUID).upper(): ""}, "has a GUID twice"),
    ],
)
def test_schemas_are_invalid(spark: SparkSession, schemas: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decode_by_schema("value", schemas, lambda body, _: body)
