"""The zip file for ``--py-files``: its contents, and the demo that it lacks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import nats_stream_source
from nats_stream_source.zip_package import FORMAT_MODULES, write_archive

PACKAGE = Path(nats_stream_source.__file__).parent


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_zip_file_has_package_without_demo(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_archive(tmp_path / "package.zip")) as archive:
        names = set(archive.namelist())
    expected = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*.py")
        if "demo" not in path.relative_to(PACKAGE).parts
    }
    expected |= {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("compiled_*.so")}
    assert names == expected | {*FORMAT_MODULES, "nats_stream_source/py.typed"}
    assert (PACKAGE / "demo" / "job.py").exists()


def test_demo_is_imported_by_its_command_only() -> None:
    importers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith("nats_stream_source.demo") for name in modules):
                importers.add(path.relative_to(PACKAGE).parts)
    assert {parts for parts in importers if parts[0] != "demo"} == {("cli", "main.py")}


def test_demo_command_reports_missing_demo(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "package.zip")
    done = run(archive, "-m", "nats_stream_source", "demo")
    assert done.returncode == 1
    assert "could not start the demo: nats_stream_source.demo" in done.stderr
    assert "pip install 'nats-stream-source[demo]'" in done.stderr


def test_zip_file_without_directory_to_unpack(tmp_path: Path) -> None:
    """The package is imported without the compiled modules."""
    archive = write_archive(tmp_path / "package.zip")
    blocked = tmp_path / "temporary"
    blocked.mkdir()
    (blocked / f"nats-stream-source-{os.getuid()}").touch()
    with zipfile.ZipFile(archive, "a") as zipped:
        zipped.writestr("nats_stream_source/wire/framing/compiled_scan.so", b"not a library")
    environment = {**os.environ, "PYTHONPATH": str(archive), "TMPDIR": str(blocked)}
    code = "from nats_stream_source.wire.framing import scanner; print(scanner.available())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "('python',)\n", done.stderr
