"""What a session lacks for Spark's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.delta.spark import session
from nats_stream_source.errors import MissingPackageError
from nats_stream_source.spark.session import (
    DELTA_SETTINGS,
    SMALL_MACHINE,
    configure,
    delta_artifact,
)


def with_settings(settings: dict[str, str]) -> Any:
    """A session whose JVM has Delta's jar, with these settings.

    Spark does not start with Delta's jar and one of the settings within the shared session.
    """
    delta = SimpleNamespace(tables=SimpleNamespace(DeltaTable=object()))
    return SimpleNamespace(
        _jvm=SimpleNamespace(io=SimpleNamespace(delta=delta)),
        conf=SimpleNamespace(get=settings.get),
    )


@pytest.mark.parametrize("setting", DELTA_SETTINGS)
def test_missing_setting_is_named(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    assert session.missing(with_settings(DELTA_SETTINGS)) is None
    others = {name: value for name, value in DELTA_SETTINGS.items() if name != setting}
    assert setting in str(session.missing(with_settings(others)))
    several = {**others, setting: f"org.example.Other,{DELTA_SETTINGS[setting]}"}
    assert session.missing(with_settings(several)) is None


def test_databricks_has_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.0")
    assert session.missing(with_settings({})) is None


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert session.missing(with_settings({})) == "the package delta-spark is not installed"
    with pytest.raises(MissingPackageError, match=r"delta-spark is not installed.*\[delta\]"):
        configure(SparkSession.builder, delta=True)


def test_builder_gets_jar_and_settings() -> None:
    builder = configure(SparkSession.Builder(), delta=True, small_machine=True)
    options = builder._options
    assert options.items() >= {**DELTA_SETTINGS, **SMALL_MACHINE}.items()
    assert options["spark.jars.packages"] == delta_artifact()
    assert (
        "spark.jars.packages"
        not in configure(SparkSession.Builder(), delta=True, download=False)._options
    )
