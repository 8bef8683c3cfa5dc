"""What is imported when, what works without pyspark, and the zip file for ``--py-files``."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

import nats_stream_source
from nats_stream_source.zip_package import FORMAT_MODULES, write_archive
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
        "import importlib, pkgutil\n"
        "from nats_stream_source import jetstream\n"
        "for one in pkgutil.walk_packages(jetstream.__path__, f'{jetstream.__name__}.'):\n"
        "    importlib.import_module(one.name)\n"
        f"from nats_stream_source.jetstream import {name}\n"
        f"assert callable({name})"
    )


def test_public_names_exist() -> None:
    imported(
        "import nats_stream_source.jetstream as package\n"
        "for name in package.__all__: getattr(package, name)\n"
    )
    with pytest.raises(AssertionError, match="cannot import name 'Nothing'"):
        imported("from nats_stream_source.jetstream import Nothing")


# The installed packages are hidden: imports do not find them.
HIDE = """
import sys
from importlib.machinery import PathFinder
class Visible:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j", "delta"):
            return None
        return PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Visible()
"""


def errors_of(code: str, status: int = 0) -> list[str]:
    """The lines of the standard error of a program that Spark's packages are hidden from."""
    return ran(sys.executable, "-c", HIDE + code, status=status).stderr.splitlines()


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import pyspark_nats_kv", "spark"),
        ("import pyspark_nats_stream", "spark"),
        ("import nats_stream_source; nats_stream_source.register(None)", "spark"),
        ("import nats_stream_source; nats_stream_source.watch_progress(None)", "spark"),
        ("from nats_stream_source import configure", "spark"),
        ("from nats_stream_source.delta import merge_changes", "delta"),
        ("import nats_stream_source.delta; nats_stream_source.delta.reconcile", "delta"),
    ],
)
def test_error_names_extra_to_install(code: str, extra: str) -> None:
    package = "pyspark"  # also for the extra `delta`, which includes it
    assert errors_of(code, 1)[-1] == (
        f"nats_stream_source.errors.MissingPackageError: could not import '{package}': the package "
        f"is not installed; run `pip install 'nats-stream-source[{extra}]'`"
    )


def test_missing_module_of_other_kind_is_reported() -> None:
    code = """
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "nats_stream_source.delta.tables":
            raise ModuleNotFoundError("broken", name=name)
import sys
sys.meta_path.insert(0, Broken())
from nats_stream_source.delta import merge
"""
    done = ran(sys.executable, "-c", code, status=1)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: broken"


WITHOUT_SPARK = {
    "a missing package is an ImportError": """
try:
    from nats_stream_source.delta import merge
except ImportError as error:
    from nats_stream_source.errors import NatsSourceError
    assert isinstance(error, NatsSourceError)
""",
    "JetStream, options and command line": """
import nats_stream_source.cli.follow, nats_stream_source.cli.inspect, nats_stream_source.cli.peek
from nats_stream_source import read_bucket
import nats_stream_source.embedded, nats_stream_source.options
import nats_stream_source.jetstream as jetstream
for name in jetstream.__all__:
    getattr(jetstream, name)
""",
    "rule and writer of Delta tables": """
import nats_stream_source.delta.driver.table, nats_stream_source.delta.rules.changes
import nats_stream_source.delta.refused
from nats_stream_source.delta import AutoLimits, Follower, Upkeep
""",
}


@pytest.mark.parametrize("code", WITHOUT_SPARK.values(), ids=WITHOUT_SPARK)
def test_code_does_not_need_spark(code: str) -> None:
    assert errors_of(code) == []


def test_follower_does_not_import_installed_spark() -> None:
    code = """
import sys
import nats_stream_source.delta.follower.metrics
from nats_stream_source.cli.main import main
from nats_stream_source.delta import Follower
Follower("fleet", "lake/fleet", servers="nats://127.0.0.1:4222")
assert not {"pyspark", "py4j", "delta"} & sys.modules.keys()
"""
    ran(sys.executable, "-c", code)


PACKAGE = Path(nats_stream_source.__file__).parent


def test_zip_file_has_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_archive(tmp_path / "package.zip")) as archive:
        names = set(archive.namelist())
    expected = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py")}
    expected |= {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("compiled_*.so")}
    assert names == expected | {*FORMAT_MODULES, "nats_stream_source/py.typed"}


def test_zip_file_without_directory_to_unpack(tmp_path: Path) -> None:
    """The package is imported without the compiled modules."""
    archive = write_archive(tmp_path / "package.zip")
    blocked = tmp_path / "temporary"
    blocked.mkdir()
    (blocked / f"nats-stream-source-{os.getuid()}").touch()
    with zipfile.ZipFile(archive, "a") as zipped:
        zipped.writestr("nats_stream_source/wire/framing/compiled_scan.so", b"not a library")
    code = "from nats_stream_source.wire.framing import scanner; print(scanner.available())"
    variables = {"PYTHONPATH": str(archive), "TMPDIR": str(blocked)}
    done = ran(sys.executable, "-c", code, cwd=tmp_path, **variables)
    assert done.stdout == "('python',)\n"
