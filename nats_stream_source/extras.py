"""Packages that only an extra of this package installs: their errors, and when they are loaded."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from nats_stream_source.errors import MissingPackageError

_PACKAGES = {
    "spark": ("pyspark", "py4j"),
    "metrics": ("prometheus_client", "opentelemetry"),
    "follow": ("deltalake", "obstore", "pyroaring", "tenacity"),
    "delta": ("delta", "deltalake", "tenacity", "pyspark", "py4j"),
}


def import_failure(error: ModuleNotFoundError, extra: str) -> ImportError:
    """The error to raise for a failed import of a module that needs ``extra``.

    Args:
        error: what the import raised.
        extra: an extra of this package, such as ``"delta"``.

    Returns:
        A :class:`MissingPackageError` that names the extra to install. ``error`` itself if the
        missing module does not belong to the extra.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES[extra]:
        return error
    return MissingPackageError(
        f"could not import {package!r}: the package is not installed; run "
        f"`pip install 'nats-stream-source[{extra}]'`"
    )


def defer_aiohttp() -> None:
    """Load aiohttp when it is first used, not when nats-py imports it.

    nats-py uses it for WebSocket URLs only, but imports it where it is installed: 100 ms of CPU at
    the start of each query, whose planner is a new process. For processes that Spark has started;
    in a process of the user, threads may import it at the same time.
    """
    if "aiohttp" in sys.modules or (spec := importlib.util.find_spec("aiohttp")) is None:
        return
    deferred = ModuleType("aiohttp")
    deferred.__spec__ = spec

    def load(name: str) -> Any:
        if sys.modules.get("aiohttp") is deferred:
            del sys.modules["aiohttp"]
        loaded = importlib.import_module("aiohttp")
        vars(deferred).update(vars(loaded))
        return getattr(loaded, name)

    vars(deferred)["__getattr__"] = load  # PEP 562: called at the first attribute, or submodule
    sys.modules["aiohttp"] = deferred
