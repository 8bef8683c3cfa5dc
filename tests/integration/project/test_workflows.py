"""The workflows of ``.github`` call make targets that exist, and their matrices are complete.

``make workflows`` checks them with the linters; these tests compare them with this project.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compat.server.__main__ import VERSIONS
from tests.compat.spark.__main__ import PLACES
from tests.support.paths import ROOT

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
