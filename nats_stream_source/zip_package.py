"""Write the package as one zip file, for ``spark-submit --py-files``.

Run ``python -m nats_stream_source.zip_package nats_stream_source.zip`` with the installed package
or in a checkout. The zip file contains this package, without ``demo/``, and the modules by which
Spark finds its formats. The dependencies (nats-py, pyarrow, numpy, tenacity) must be installed on
the machines.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

FORMAT_MODULES = ("pyspark_nats_kv.py", "pyspark_nats_stream.py")
"""Modules by which Spark finds the formats ``nats_kv`` and ``nats_stream``."""

_DEMO = "demo"  # a program for one machine: executors do not import it


def write_archive(target: Path) -> Path:
    """Write the zip file to ``target`` and return that path; an existing file is replaced."""
    package = Path(__file__).parent
    root = package.parent
    modules = [
        path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != _DEMO
    ]
    files = [*(root / name for name in FORMAT_MODULES), *modules, *package.glob("py.typed")]
    # Installers for reproducible builds set the modification time 0, which zip does not support.
    compression = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(target, "w", compression, strict_timestamps=False) as archive:
        for file in sorted(files):
            archive.write(file, file.relative_to(root))
    return target


def main(arguments: list[str]) -> int:
    """Run the program with one argument, the path of the zip file; return its exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m nats_stream_source.zip_package ARCHIVE.zip", file=sys.stderr)
        return 2
    print(write_archive(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
