"""What a machine may lack, the server for demos and tests, and the workflows of ``.github``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import ConnectError
from nats_stream_source.zip_package import FORMAT_MODULES
from tests.compat.server.__main__ import VERSIONS
from tests.compat.spark.__main__ import PLACES
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


def test_start_on_port_of_another_server(nats_server: NatsServer) -> None:
    """Otherwise a demo would write to the other server."""
    second = NatsServer(port=nats_server.port)
    with pytest.raises(ConnectError, match=f"another server listens on port {nats_server.port}"):
        second.start()
    assert not second.store.exists()


def test_start_fails_without_leaving_temporary_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = tmp_path / "server.conf"
    config.write_text("port: none")
    with pytest.raises(ConnectError, match="could not start nats-server"):
        NatsServer(config=config).start()
    assert list(tmp_path.iterdir()) == [config]


# -- free ports: reserved for one server until it listens ------------------------------------------


def test_free_port_belongs_to_its_caller() -> None:
    port = free_port()
    # Wants it without SO_REUSEADDR, as the system chooses for who wants any port.
    with socket.socket() as anybody, pytest.raises(OSError, match="in use"):
        anybody.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


def test_free_port_has_no_listener() -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free_port()), timeout=10).close()


def test_free_ports_are_different_ones() -> None:
    ports = [free_port() for _ in range(100)]
    assert len(set(ports)) == 100


# -- the workflows: `make workflows` has the linters, these compare them with this project ---------

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))

OTHERS = [
    *sorted((ROOT / ".github").glob("*/*/action.yml")),
    *sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")),
    *(ROOT / name for name in (".github/dependabot.yml", ".pre-commit-config.yaml")),
]

MAKEFILE = (ROOT / "Makefile").read_text()


def workflow(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def matrix(name: str, job: str, axis: str) -> list[str]:
    values = workflow(name)["jobs"][job]["strategy"]["matrix"][axis]
    assert isinstance(values, list)
    return values


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, *OTHERS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_make_targets_and_variables_exist(path: Path) -> None:
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))
    for call in re.findall(r"(?:run|entry): make (.*)", text):
        words = shlex.split(call)
        named = {word for word in words if re.fullmatch(r"[a-z-]+", word)}
        assert named
        assert named <= targets
        assert {
            word.partition("=")[0] for word in words if re.match(r"[A-Z_]+=", word)
        } <= variables


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_full_version(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text())
    assert used
    assert [one for one in used if not re.search(r"^\./|@v\d+\.\d+\.\d+$", one)] == []


@pytest.mark.parametrize(
    "target",
    [
        *("check", "docs", "dist", "test", "test-all", "test-servers", "test-spark", "test-faults"),
        *("soak", "bench"),
    ],
)
def test_workflow_calls_each_target(target: str) -> None:
    calls = " ".join(path.read_text() for path in WORKFLOWS)
    assert re.search(rf"run: make {target}(?![\w-])", calls)


def test_matrices_are_complete() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert re.search(r'^requires-python = ">=3\.10"$', project, re.MULTILINE)
    assert pythons[0] == "3.10"
    assert matrix("tests.yml", "test", "python") == pythons
    assert tuple(matrix("compatibility.yml", "servers", "server")) == VERSIONS
    assert tuple(matrix("compatibility.yml", "spark", "spark")) == PLACES
