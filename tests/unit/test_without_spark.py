"""Without pyspark, which the extra `spark` installs: what works, and what the errors name."""

from __future__ import annotations

import sys

import pytest

from tests.support.program import ran

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


def test_missing_package_is_import_error() -> None:
    code = """
try:
    from nats_stream_source.delta import merge
except ImportError as error:
    from nats_stream_source.errors import NatsSourceError
    assert isinstance(error, NatsSourceError)
"""
    assert errors_of(code) == []


def test_jetstream_options_and_command_line_do_not_need_spark() -> None:
    code = """
import nats_stream_source.cli.follow, nats_stream_source.cli.inspect, nats_stream_source.cli.peek
from nats_stream_source import read_bucket
import nats_stream_source.embedded, nats_stream_source.options
import nats_stream_source.jetstream as jetstream
for name in jetstream.__all__:
    getattr(jetstream, name)
"""
    assert errors_of(code) == []


def test_rule_and_writer_of_delta_tables_do_not_need_spark() -> None:
    code = """
import nats_stream_source.delta.driver.engine, nats_stream_source.delta.rules.changes
import nats_stream_source.delta.refused
from nats_stream_source.delta import AutoLimits, Follower, Upkeep
"""
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
