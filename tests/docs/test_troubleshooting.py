"""docs/troubleshooting.md: the errors of this package that it quotes are those that a user gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql.types import StructType

from nats_stream_source import errors
from nats_stream_source.cli import checkpoint, connection
from nats_stream_source.errors import NatsSourceError, OptionError
from nats_stream_source.options import kv_options
from nats_stream_source.spark.datasource import NatsKvDataSource
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
GIVEN = {"servers": "nats://127.0.0.1:4222", "bucket": "fleet"}

QUOTED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: kv_options({**GIVEN, "startingoffsets": "latest"}),
        "unknown option 'startingoffsets'",
    ),
    (lambda: kv_options({**GIVEN, "batchsize": "1"}), "unknown option 'batchsize'"),
    (lambda: kv_options({**GIVEN, "provider": "nats_kv"}), "unknown option 'provider'"),
    (lambda: kv_options({}), "could not read format 'nats_kv': no option"),
    (
        lambda: NatsKvDataSource(GIVEN).reader(StructType().add("key", "string")),
        "could not read format 'nats_kv' with the given schema",
    ),
]


@pytest.mark.parametrize(("fail", "quoted"), QUOTED, ids=[quoted for _, quoted in QUOTED])
def test_options(fail: Callable[[], Any], quoted: str) -> None:
    (cell,) = re.findall(rf"^\| `OptionError: ({re.escape(quoted)}[^`]*)`", PAGE, re.MULTILINE)
    with pytest.raises(OptionError) as caught:
        fail()
    assert str(caught.value).startswith(cell.rstrip("… "))


def _errors(*modules: ModuleType) -> dict[str, type[NatsSourceError]]:
    """The classes of errors that these modules define, by name."""
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, NatsSourceError)
        and kind.__module__ == module.__name__
    }


def test_classes_exist() -> None:
    named = set(re.findall(r"\b([A-Z]\w+Error)(?=:|`)", PAGE))
    others = {"AssertionError", "BrokenPipeError", "DeltaProtocolError", "ModuleNotFoundError"}
    others |= {"UnsupportedClassVersionError"}
    assert len(named - others) > 5
    assert named - others - _errors(errors, checkpoint, connection).keys() == set()


def test_error_classes_are_on_page() -> None:
    raised = _errors(errors, checkpoint, connection).keys() - {"NatsSourceError"}
    assert len(raised) > 60
    cells = re.findall(r"^\| (`.*?)(?<!\\) \| ", PAGE, re.MULTILINE)
    found = set(re.findall(r"\b[A-Z]\w+Error\b", " ".join(cells)))
    assert sorted(raised - found) == []
