"""The error for a package that only an extra of this package installs."""

from __future__ import annotations

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
