"""What a stranger's machine may lack: one sentence on what to install, and an exit status."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nats_stream_source.zip_package import FORMAT_MODULES
from tests.support import preflight
from tests.support.paths import ROOT
from tests.support.program import ran

PREFLIGHT = Path("tests/support/preflight.py")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A clone's Makefile, and ``bin`` with the shell tools that it uses: no Python, no Java."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / PREFLIGHT).parent.mkdir(parents=True)
    shutil.copy(ROOT / PREFLIGHT, tmp_path / PREFLIGHT)
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "echo", "sed", "touch"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def make(machine: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAVA_HOME", "PYTHON", "MAKEFLAGS", "MAKELEVEL")
    } | {"PATH": str(machine / "bin")}
    words = (str(shutil.which("make")), *arguments)
    return ran(*words, cwd=machine, status=status, environment=environment)


def sentence(machine: Path, target: str) -> str:
    """The one line that is printed, besides make's own about the failed target."""
    done = make(machine, target, status=2)
    (line,) = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if not line.startswith(("make: ***", "gmake: ***"))
    ]
    return line


def test_make_lists_its_targets(machine: Path) -> None:
    listed = re.findall(r"^  make ([\w-]+) +\S", make(machine).stdout, re.MULTILINE)
    assert listed[:4] == ["help", "setup", "demo", "test"]
    assert {"test-servers", "test-faults", "test-spark", "soak", "check"} < set(listed)


def test_python_missing(machine: Path) -> None:
    said = sentence(machine, "setup")
    assert re.match(
        r"could not set up \.venv: no Python 3\.10 or newer was found; install it \(.*python3-venv",
        said,
    )


def test_java_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin/java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2025-04-15' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "Java 11, which is too old for Spark 4: install Java 17" in (
        preflight.java_problem() or ""
    )


def test_java_missing(machine: Path) -> None:
    (machine / "bin/python3").symlink_to(sys.executable)
    said = sentence(machine, "test")
    assert said.startswith("Spark needs Java and none was found: install Java 17 or newer (")
    assert not (machine / ".venv").exists()


def test_ci_runs_checks_and_tests() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "set -eu" in lines
    assert lines[-1] == "make check test-all AGAIN=1"


def test_archive_of_reproducible_installation(tmp_path: Path) -> None:
    """Such installers give every file the time 0, which zip files do not know."""
    installed, archive = tmp_path / "installed", tmp_path / "package.zip"
    shutil.copytree(
        ROOT / "nats_stream_source",
        installed / "nats_stream_source",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for finder in FORMAT_MODULES:
        shutil.copy(ROOT / finder, installed)
    for file in installed.rglob("*.py"):
        os.utime(file, (0, 0))

    def python(path: Path, *words: str) -> str:
        return ran(sys.executable, *words, cwd=tmp_path, PYTHONPATH=str(path)).stdout

    said = python(installed, "-m", "nats_stream_source.zip_package", str(archive))
    assert said == f"{archive}\n"
    found = "import nats_stream_source.spark.datasource as kv, pyspark_nats_kv; print(kv.__file__)"
    assert python(archive, "-c", found).startswith(str(archive))
