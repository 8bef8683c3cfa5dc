"""What is imported when: Spark starts several processes for a query, and each pays for it."""

from __future__ import annotations

import sys

import pytest

from tests.support.program import ran

HEAVY = ("nats", "numpy", "pyarrow", "tenacity", "nats_stream_source.spark.planning.query_planner")


def imported(code: str) -> set[str]:
    """Names of all modules after ``code`` has run in a Python of its own."""
    # A line of its own, whatever else is printed.
    code += "\nimport sys; print('modules', *sys.modules)"
    done = ran(sys.executable, "-c", code)
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("modules "))
    return set(line.split()[1:])


def test_source_and_its_columns_need_few_imports() -> None:
    code = (
        "from pyspark_nats_kv import DefaultSource\n"
        "options = {'servers': 'nats://127.0.0.1', 'bucket': 'b'}\n"
        "assert DefaultSource(options).schema()"
    )
    assert not imported(code) & set(HEAVY)


def test_pickled_stream_reader_needs_no_connection() -> None:
    """The process that pickles the reader for the tasks has Arrow, and does not connect."""
    code = (
        "import pickle\n"
        "from pyspark.sql.types import StructType\n"
        "from pyspark_nats_kv import DefaultSource\n"
        "options = {'servers': 'nats://127.0.0.1', 'bucket': 'b'}\n"
        "assert pickle.dumps(DefaultSource(options).streamReader(StructType()))"
    )
    assert not imported(code) & {"nats", "nats_stream_source.spark.planning.query_planner"}


def test_planner_defers_what_it_does_not_use() -> None:
    """A planner is a new process at each start of a query."""
    modules = imported(
        "from pyspark.sql.types import StructType\n"
        "from pyspark_nats_kv import DefaultSource\n"
        "options = {'servers': 'nats://127.0.0.1:1', 'bucket': 'b', 'connectTimeout': '0.1'}\n"
        "reader = DefaultSource(options).streamReader(StructType())\n"
        "from nats_stream_source.errors import NatsSourceError\n"
        "try:\n"
        "    reader.initialOffset()\n"
        "except NatsSourceError:\n"
        "    reader.stop()\n"
    )
    assert "nats.aio.client" in modules
    assert "pyarrow.compute" not in modules


def test_reader_needs_no_planner() -> None:
    modules = imported(
        "from nats_stream_source.spark.reading import split_reader\n"
        "from nats_stream_source.spark.reading import as_of, latest_values"
    )
    assert not [name for name in modules if name.startswith("nats_stream_source.spark.planning")]


@pytest.mark.parametrize("name", ["connect", "subscribe"])
def test_function_is_not_hidden_by_its_module(name: str) -> None:
    imported(
        "from nats_stream_source.jetstream import _MODULES\n"
        "import importlib\n"
        "for one in _MODULES.values():\n"
        "    importlib.import_module(f'nats_stream_source.jetstream.{one}')\n"
        f"from nats_stream_source.jetstream import {name}\n"
        f"assert callable({name})"
    )


def test_public_names_exist() -> None:
    imported(
        "import nats_stream_source.jetstream as package\n"
        "for name in package.__all__: getattr(package, name)\n"
        "assert set(package.__all__) == set(package._MODULES)"
    )
    with pytest.raises(AssertionError, match="cannot import name 'Nothing'"):
        imported("from nats_stream_source.jetstream import Nothing")
