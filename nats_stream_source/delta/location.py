"""Where a table is, and which engine may change it."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pyspark.sql import SparkSession

from nats_stream_source.delta import session
from nats_stream_source.delta.table import is_path
from nats_stream_source.errors import ConfigurationError, MissingPackageError

Engine = Literal["auto", "delta-rs", "spark"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two characters: `C:\` is no scheme


@dataclass(frozen=True)
class TableLocation:
    """Where a table is, and which engine may change it.

    Attributes:
        name: path, URI or catalog name as the user gave it.
        engine: the user's choice.
        storage_options: options of delta-rs for an object store; never in a repr, as they have
            secrets.
    """

    name: str
    engine: Engine = "auto"
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            raise ConfigurationError(
                f"invalid argument: engine is {self.engine!r}, expected 'auto', 'delta-rs' or "
                f"'spark'"
            )
        if self.storage_options is not None and self.engine == "spark":
            raise ConfigurationError(
                "invalid arguments: storage_options with engine='spark', which reads the Hadoop "
                "settings of the session; remove storage_options, or use engine='delta-rs'"
            )
        if not is_path(self.name) and (
            self.storage_options is not None or self.engine == "delta-rs"
        ):
            given = "storage_options" if self.storage_options is not None else "engine='delta-rs'"
            raise ConfigurationError(
                f"invalid arguments: {given} with table {self.name!r}, which is a name in the "
                f"catalog; pass the table's path or URI, or use engine='spark'"
            )
        if self.engine == "delta-rs" and not _installed():
            raise MissingPackageError(
                "could not use engine='delta-rs': the package deltalake is not installed; run "
                "`pip install 'nats-stream-source[delta]'`"
            )

    @property
    def uri(self) -> str:
        """The path or URI for delta-rs."""
        return self.name if scheme_of(self.name) else os.path.abspath(self.name)

    def require_engine(self, spark: SparkSession | None) -> None:
        """Raise an error if no engine can change the table in this session.

        Raises:
            MissingPackageError: the package that the engine requires is not installed.
            ConfigurationError: the session lacks Delta's jar or a setting.
        """
        if self.engine == "spark" or (self.engine == "auto" and not is_path(self.name)):
            if spark is not None:
                session.require_delta(spark)
        elif self.engine == "auto" and not _installed() and spark is not None:
            missing = session.missing(spark)
            if missing is not None:
                raise MissingPackageError(
                    f"could not change table {self.name!r}: engine 'delta-rs' requires the package "
                    f"deltalake, and for engine 'spark' {missing}; run "
                    f"`pip install 'nats-stream-source[delta]'`"
                )

    def delta_rs_problem(self, spark: SparkSession) -> str | None:
        """Why ``engine="auto"`` does not take delta-rs for this location; None if it does."""
        if not is_path(self.name):
            return "the table is a name in the catalog"
        if not _installed():
            return "the package deltalake is not installed"
        scheme = scheme_of(self.name)
        if self.storage_options is not None or scheme == "file":
            return None
        if scheme:
            return f"the path has the scheme '{scheme}', and storage_options are not given"
        filesystem = session.default_filesystem(spark)
        if filesystem is None:
            return "with Spark Connect, a path without a scheme is the server's; write file:///…"
        if not filesystem.startswith("file:"):
            return f"paths without a scheme are in {filesystem}"
        return None


def _installed() -> bool:
    return importlib.util.find_spec("deltalake") is not None


def scheme_of(table: str) -> str:
    """The scheme of a URI in lower case; empty for a path."""
    match = _SCHEME.match(table)
    return match[1].lower() if match else ""
