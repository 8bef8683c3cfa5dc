"""The guide's examples run as they stand."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import pytest

import nats_stream_source.jetstream as layer
from nats_stream_source.embedded import NatsServer
from tests.support.paths import ROOT
from tests.support.program import ran

GUIDE = (ROOT / "docs/jetstream.md").read_text()


def examples() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(example, names)
    return names


def test_examples_run(shared_server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    names = examples()
    asyncio.run(asyncio.wait_for(names["main"](shared_server.url), 60))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("b'IAH' 2 ")
    assert printed[1] == "['ua.N14228']"
    assert printed[3] == "ua.N14228 DEL"
    assert "2 b'IAH'" in printed


async def test_puts_in_bounded_number(shared_server: NatsServer) -> None:
    async with layer.connect(shared_server.url) as jetstream:
        fleet = await layer.KeyValue.create_bucket(jetstream, layer.KeyValueConfig("many"))
        await examples()["put_all"](fleet, [(f"k{number}", b"x") for number in range(12_000)])
        assert len(await fleet.keys()) == 12_000


def test_public_names_are_listed() -> None:
    assert all(hasattr(layer, name) for name in layer.__all__)


def test_spark_is_not_loaded_with_it() -> None:
    """A program without Spark does not pay for it."""
    code = "import sys, nats_stream_source.jetstream; sys.exit('pyspark' in sys.modules)"
    ran(sys.executable, "-c", code)
