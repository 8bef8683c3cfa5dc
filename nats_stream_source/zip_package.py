"""Write the package as one zip file, for ``spark-submit --py-files``.

Run ``python -m nats_stream_source.zip_package nats_stream_source.zip`` with the installed package
or in a checkout. The zip file contains this package and the modules by which Spark finds its
formats. The dependencies (nats-py, pyarrow, numpy) must be installed on the
machines.

The zip file has the compiled modules of the installation that wrote it. No operating system loads a
library from a zip file, so :func:`find_compiled_modules` unpacks them into a directory of the user
when the package is imported. On another platform they cannot be loaded, and the package works
without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

FORMAT_MODULES = ("pyspark_nats_kv.py", "pyspark_nats_stream.py")
"""Modules by which Spark finds the formats ``nats_kv`` and ``nats_stream``."""


def write_archive(target: Path) -> Path:
    """Write the zip file to ``target`` and return that path; an existing file is replaced."""
    package = Path(__file__).parent
    root = package.parent
    files = {
        *(root / name for name in FORMAT_MODULES),
        *package.rglob("*.py"),
        *package.glob("py.typed"),
        *(path for suffix in EXTENSION_SUFFIXES for path in package.rglob(f"compiled_*{suffix}")),
    }
    # Installers for reproducible builds set the modification time 0, which zip does not support.
    compression = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(target, "w", compression, strict_timestamps=False) as archive:
        for file in sorted(files):
            archive.write(file, file.relative_to(root))
    return target


def find_compiled_modules(archive: str) -> None:
    """Make the compiled modules of a zip file importable, if it has some for this Python.

    Without a directory to unpack them into, the package works without them.
    """
    with zipfile.ZipFile(archive) as zipped:
        modules = {}
        for name in zipped.namelist():
            stem, _, suffix = name.rpartition("/")[2].partition(".")
            if stem.startswith("compiled_") and f".{suffix}" in EXTENSION_SUFFIXES:
                module = name.removesuffix(f".{suffix}").replace("/", ".")
                with contextlib.suppress(OSError):
                    modules[module] = _unpacked(zipped.read(name), f"{stem}.{suffix}")

    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        return spec_from_file_location(name, modules[name]) if name in modules else None

    sys.meta_path.insert(0, cast(Any, SimpleNamespace(find_spec=find_spec)))


def _unpacked(content: bytes, name: str) -> Path:
    """A file with this content, which only this user can write."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    directory = Path(tempfile.gettempdir()) / f"nats-stream-source-{user}"
    directory.mkdir(mode=0o700, exist_ok=True)
    state = directory.lstat()
    if hasattr(os, "getuid") and (state.st_uid != user or state.st_mode & 0o077):
        # Another user made it, who could replace the library: a directory of this process.
        directory = Path(tempfile.mkdtemp(prefix="nats-stream-source-"))
    file = directory / f"{hashlib.sha256(content).hexdigest()[:32]}-{name}"
    if not file.exists():
        # Renamed, so that another process never loads a part of it.
        handle, part = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "wb") as target:
            target.write(content)
        os.replace(part, file)
    return file


def main(arguments: list[str]) -> int:
    """Run the program with one argument, the path of the zip file; return its exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m nats_stream_source.zip_package ARCHIVE.zip", file=sys.stderr)
        return 2
    print(write_archive(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
