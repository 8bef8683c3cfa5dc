"""The zip file for ``--py-files``: its contents."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import nats_stream_source
from nats_stream_source.zip_package import FORMAT_MODULES, write_archive
from tests.support.program import ran

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
