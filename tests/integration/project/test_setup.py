"""What a stranger's machine may lack: one sentence on what to install, and an exit status."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nats_stream_source.zip_package import FORMAT_MODULES
from tests.support import preflight
from tests.support.paths import ROOT

PREFLIGHT = Path("tests/support/preflight.py")


def program(path: Path, script: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def says(version: str) -> str:
    return f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17),
        ('java version "1.8.0_391"', 8),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ("Unable to locate a Java Runtime.", None),
    ],
)
def test_java_version(text: str, version: int | None) -> None:
    assert preflight.java_version(text) == version


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (says("17.0.15"), None),
        (says("11.0.2"), r"java is .*, Java 11, which is too old for Spark 4: install Java 17 .*"),
        ("echo 'Unable to locate a Java Runtime.' >&2; exit 1", r".*not tell its version: inst.*"),
        (None, r"Spark needs Java and none was found: install Java 17 .*"),
    ],
)
@pytest.mark.parametrize("home", [False, True], ids=["PATH", "JAVA_HOME"])
def test_java(
    script: str | None,
    problem: str | None,
    home: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if script is not None:
        program(tmp_path / "bin/java", script)
    if home:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        problem = problem and problem.replace("java is", "JAVA_HOME is")
        problem = problem and problem.replace(
            "Spark needs Java and none was found", ".*no bin/java"
        )
    else:
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = preflight.java_problem()
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert re.fullmatch(problem, found)


def test_venv_without_ensurepip(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name)
    )
    problem = preflight.venv_problem()
    assert problem is not None
    assert "its module ensurepip is missing: install it" in problem
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}-venv" in problem


def test_machine_passes_preflight() -> None:
    assert preflight.main(["java", "venv"]) == 0


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


def make(machine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAVA_HOME", "PYTHON", "MAKEFLAGS", "MAKELEVEL")
    }
    return subprocess.run(
        [str(shutil.which("make")), *arguments],
        cwd=machine,
        env={**environment, "PATH": str(machine / "bin")},
        capture_output=True,
        text=True,
        timeout=120,
    )


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that was printed, besides make's own about the failed target."""
    assert done.returncode != 0
    (line,) = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if not line.startswith(("make: ***", "gmake: ***"))
    ]
    return line


def test_make_lists_its_targets(machine: Path) -> None:
    done = make(machine)
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^  make ([\w-]+) +\S", done.stdout, re.MULTILINE)
    assert listed[:4] == ["help", "setup", "demo", "test"]
    assert {"test-servers", "test-faults", "test-spark", "soak", "check"} < set(listed)


def test_python_missing(machine: Path) -> None:
    said = sentence(make(machine, "setup"))
    assert re.match(
        r"could not set up \.venv: no Python 3\.10 or newer was found; install it \(.*python3-venv",
        said,
    )


def test_java_missing(machine: Path) -> None:
    (machine / "bin/python3").symlink_to(sys.executable)
    said = sentence(make(machine, "test"))
    assert said.startswith("Spark needs Java and none was found: install Java 17 or newer (")
    assert not (machine / ".venv").exists()


def test_packages_cannot_be_installed(machine: Path) -> None:
    """A Python that makes environments whose pip fails, as without a package index."""
    program(
        machine / "bin/python3",
        f'if [ "$1 $2" = "-m venv" ]; then exit 1; else exec {sys.executable} "$@"; fi',
    )
    done = make(machine, "setup")
    assert done.returncode != 0
    assert "is a package index such as PyPI reachable?" in done.stderr
    assert not (machine / ".venv/.set-up").exists()


@pytest.mark.parametrize("same", [True, False], ids=["same version", "another version"])
def test_virtual_environment_of_other_python_is_replaced(machine: Path, same: bool) -> None:
    """Otherwise `make test PYTHON=python3.13` tests the Python of the existing `.venv`."""
    other = f'exec {sys.executable} "$@"' if same else "echo 3.10.0"
    program(machine / ".venv/bin/python", other)
    (machine / ".venv/.set-up").touch()
    (machine / "bin/python3").symlink_to(sys.executable)
    done = make(machine, "--dry-run", "setup", "PYTHON=python3")
    assert done.returncode == 0, done.stderr
    assert ("-m venv --clear .venv" in done.stdout) == (not same)


def test_ci_runs_checks_and_tests() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "set -eu" in lines
    assert lines[-1] == "make check test-all AGAIN=1"


def make_test(
    directory: Path, tests: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """The result of ``make test`` in a project with these test modules only."""
    for name in ("pyproject.toml", "Makefile", PREFLIGHT):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    (directory / "tests").mkdir(parents=True, exist_ok=True)
    for name, text in tests.items():
        (directory / "tests" / name).write_text(text)
    program(directory / ".venv/bin/python", f'exec {sys.executable} "$@"')
    (directory / ".venv/.set-up").touch()
    # The variables of the make and the pytest that run this test; make exports its own arguments.
    outer = ("MAKE", "PYTEST", "AGAIN", "TESTS", "WORKERS")
    return subprocess.run(
        ["make", "test", *arguments],
        cwd=directory,
        env={name: value for name, value in os.environ.items() if not name.startswith(outer)},
        capture_output=True,
        text=True,
        check=False,
    )


FAILS_ONCE = """
from pathlib import Path

def test_once():
    mark = Path(__file__).with_name("mark")
    seen = mark.exists()
    mark.touch()
    assert seen
"""


def test_failed_test_is_rerun_with_again(tmp_path: Path) -> None:
    tests = {"test_some.py": FAILS_ONCE, "test_others.py": "def test_fine(): pass\n"}
    failed = make_test(tmp_path / "one", tests)
    assert failed.returncode != 0
    assert "4 workers" in failed.stdout
    rerun = make_test(tmp_path / "two", tests, "AGAIN=1")
    assert rerun.returncode == 0, rerun.stdout
    assert "1 rerun" in rerun.stdout.splitlines()[-1]
    assert rerun.stdout.count("assert seen") >= 1


def test_group_runs_in_one_worker(tmp_path: Path) -> None:
    """pytest-xdist ignores groups without a warning where its version does not fit pytest's."""
    module = """
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("group")

@pytest.mark.parametrize("number", range(20))
def test_worker(number):
    Path(os.environ["PYTEST_XDIST_WORKER"]).with_suffix(".worker").touch()
"""
    done = make_test(tmp_path, {"test_a.py": module, "test_b.py": module})
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("*.worker"))) == 1


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
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout

    said = python(installed, "-m", "nats_stream_source.zip_package", str(archive))
    assert said == f"{archive}\n"
    found = "import nats_stream_source.spark.datasource as kv, pyspark_nats_kv; print(kv.__file__)"
    assert python(archive, "-c", found).startswith(str(archive))
