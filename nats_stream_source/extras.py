"""The error for a package that only an extra of this package installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nats_stream_source.errors import MissingPackageError

_PACKAGES = {
    "spark": ("pyspark", "py4j"),
    "metrics": ("prometheus_client", "opentelemetry"),
    "follow": ("deltalake", "obstore", "pyroaring", "tenacity"),
    "delta": ("delta", "deltalake", "tenacity", "pyspark", "py4j"),
}


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Name the extra to install if an import in the block fails for a package of it.

    Args:
        extra: an extra of this package, such as ``"delta"``.

    Raises:
        MissingPackageError: a package of the extra is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES[extra]:
            raise
        raise MissingPackageError(
            f"could not import {package!r}: the package is not installed; run "
            f"`pip install 'nats-stream-source[{extra}]'`"
        ) from error
