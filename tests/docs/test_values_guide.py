"""The recipes of docs/values.md run, and print what the page shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import publish
from tests.support.nats.streams import create_stream, stream_state
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/values.md").read_text()

# What `protoc --python_out` makes of a message with two fields, without protoc.
ORDER_PB2 = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto
fields = [
    Field(name="id", number=1, type=Field.TYPE_INT64, label=Field.LABEL_OPTIONAL),
    Field(name="city", number=2, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL),
]
message = descriptor_pb2.DescriptorProto(name="Order", field=fields)
pool = descriptor_pool.DescriptorPool()
pool.Add(
    descriptor_pb2.FileDescriptorProto(
        name="order.proto", package="shop", syntax="proto3", message_type=[message]
    )
)
Order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
"""


@pytest.mark.delta
def test_recipes(
    spark: SparkSession,
    shared_server: NatsServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = shared_server.url
    create_stream(url, "HITS", "hits.>", allow_msg_counter=True)
    additions = [("hits.a", "+1"), ("hits.b", "+2"), ("hits.a", "+5"), ("hits.b", "-3")]
    publish(url, [(subject, b"", {"Nats-Incr": added}) for subject, added in additions])
    (tmp_path / "order_pb2.py").write_text(ORDER_PB2)
    spark.sparkContext.addPyFile(str(tmp_path / "order_pb2.py"))
    monkeypatch.syspath_prepend(str(tmp_path))

    names: dict[str, Any] = {"spark": spark, "lake": str(tmp_path), "__name__": "__main__"}
    examples = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)
    printed = []
    for example, _ in examples:
        exec(example.replace("nats://127.0.0.1:4222", url), names)
        printed.append(capsys.readouterr().out.strip())
    sys.modules.pop("order_pb2", None)
    assert printed == [expected.strip() for _, expected in examples]

    # The micro-batch is repeated.
    names["keep"](names["json"].withColumn("bad", names["bad"]), 0)
    assert stream_state(url, "BAD")["messages"] == 3
    assert spark.read.format("delta").load(f"{tmp_path}/bad_cars").count() == 3
    good = spark.read.format("delta").load(f"{tmp_path}/cars").select("key", "plate", "km")
    assert sorted(map(tuple, good.collect())) == [
        ("json.1", "M-1", 1200),
        ("json.4", None, 9),
        ("json.6", "M-6", 5),
    ]
