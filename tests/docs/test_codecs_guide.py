"""The example of docs/codecs.md runs, and prints what the page shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.wire.codec.definition import encode_key, parse_chain
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/codecs.md").read_text()


def test_example(
    spark: SparkSession, shared_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"spark": spark}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(example.replace("nats://127.0.0.1:4222", shared_server.url), names)
    (printed,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out.strip() == printed.strip()


def test_table_of_codecs() -> None:
    rows = re.findall(r"^\| `([\w,]+)` \| (`.*?) \| (`.*?) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for chain, keys, stored in rows:
        encoded = [
            encode_key(parse_chain(chain, ("base64", "path")), key)
            for key in re.findall(r"`(.*?)`", keys)
        ]
        assert encoded == re.findall(r"`(.*?)`", stored)
