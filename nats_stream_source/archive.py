"""Deprecated: use :mod:`nats_stream_source.zip_package`. A later version removes this module."""

from __future__ import annotations

import sys
import warnings

from nats_stream_source.zip_package import main, write_archive

__all__ = ["main", "write_archive"]

warnings.warn(
    "nats_stream_source.archive is deprecated; use nats_stream_source.zip_package",
    DeprecationWarning,
    stacklevel=1 if __name__ == "__main__" else 2,  # shown for `python -m` and for the importer
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
