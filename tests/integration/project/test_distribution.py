"""The sdist and the wheel: their files, their metadata, the README that a package index shows.

``make dist`` builds both and sets ``DIST`` to their directory; without it the slow tests build them
from a copy of the tree. This wheel lacks the compiled scanner. The sdist builds the wheel that has
it, and one on a machine whose compiler fails.
"""

from __future__ import annotations

import email
import os
import re
import runpy
import shlex
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import nats_stream_source
from tests.support.paths import ROOT
from tests.support.program import ran

PACKAGE = ROOT / "nats_stream_source"
MODULES = {"pyspark_nats_kv.py", "pyspark_nats_stream.py"}
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
REPOSITORY = "https://example.org/owner/name"
README = (ROOT / "README.md").read_text()
_LINK = re.compile(r"\]\(([^)]+)\)")
_NOT_IN_A_COPY = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "site", "*.so", "*.pyd"
)
_BUILT = {".so", ".pyd"}  # files of the compiled modules in a tree where `make setup` built them
COMPILED = sorted(f"{name.replace('.', '/')}." for name in SETUP["COMPILED"])
SELECTED = (
    "from nats_stream_source.wire.framing import scanner as it; print(it.__file__, it.selected())"
)
ROOT_FILES = {
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"),
    "LICENSE",
    *("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "mkdocs.yml", *MODULES),
}


def files(folder: Path, pattern: str = "*") -> set[str]:
    """Paths of a folder's files, relative to the root."""
    return {
        file.relative_to(ROOT).as_posix()
        for file in folder.rglob(pattern)
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in _BUILT
    }


_ARGUMENT = r"(?:'[^'`\n]+'|[\w.\-\[\]]+)"
_INSTALLS = re.compile(rf"\bpip\sinstall\s({_ARGUMENT}(?: {_ARGUMENT})*)")
INSTALLS = sorted(
    {
        line
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for line in _INSTALLS.findall(page.read_text())
        if re.search(r"'?\.(?:\[|$|'| |/)", line)
    }
)
"""The arguments of each `pip install` of this package in the pages."""

PURE_FILES = files(PACKAGE, "*.py") | files(PACKAGE, "*.pyi") | MODULES
PURE_FILES |= {"nats_stream_source/py.typed"}


def test_version_has_one_source() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "nats_stream_source.__version__" }' in project
    assert not re.search(r'^version = "', project, re.MULTILINE)
    assert SETUP["version"]() == nats_stream_source.__version__


def test_package_folders_are_packages() -> None:
    """setuptools leaves out a folder that lacks ``__init__.py``."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("base", [f"{REPOSITORY}/blob/v1", None])
def test_readme_on_index_has_no_relative_link(base: str | None) -> None:
    relative = [link for link in _LINK.findall(README) if "://" not in link]
    assert relative
    shown = SETUP["with_absolute_links"](README, base)
    links = [link for link in _LINK.findall(shown) if not link.startswith("#")]
    assert [link for link in links if "://" not in link] == []
    assert sum(link.startswith(str(base)) for link in links) == (len(relative) if base else 0)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one sdist and one wheel."""
    if given := os.environ.get("DIST"):
        return ROOT / given
    source = tmp_path_factory.mktemp("source") / "project"
    shutil.copytree(ROOT, source, ignore=_NOT_IN_A_COPY)
    build = (sys.executable, "-m", "build", "--outdir", source / "dist", source)
    ran(*build, REPOSITORY_URL=REPOSITORY, NATS_STREAM_SOURCE_PURE="1")
    return source / "dist"


def names_of(wheel: Path) -> set[str]:
    """The files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.faults
def test_wheel(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        described = email.message_from_bytes(archive.read(about))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert names_of(wheel) == PURE_FILES
    assert described["Version"] == nats_stream_source.__version__
    assert described["Requires-Python"] == ">=3.10"
    links = [link for link in _LINK.findall(str(described.get_payload())) if link[0] != "#"]
    assert [link for link in links if "://" not in link] == []
    # A wheel is a zip archive, and Python imports from it: what it lacks is an ImportError.
    code = "import nats_stream_source as it, pyspark_nats_kv; print(it.__file__, it.__version__)"
    printed = ran(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(wheel)).stdout
    assert printed.split() == [
        f"{wheel}/nats_stream_source/__init__.py",
        nats_stream_source.__version__,
    ]


@pytest.mark.faults
def test_sdist(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {entry.name.partition("/")[2] for entry in archive.getmembers() if entry.isfile()}
    folders = ["nats_stream_source", "docs", "tests", "benchmarks"]
    folders += ["checkpoints_example", "docker", "examples"]
    expected = set[str]().union(*(files(ROOT / folder) for folder in folders))
    assert expected | ROOT_FILES <= names
    added = names - expected - ROOT_FILES - {"PKG-INFO", "setup.cfg"}
    assert [name for name in added if ".egg-info/" not in name] == []


def built_wheel(distributions: Path, target: Path, **variables: str) -> Path:
    """The wheel that pip builds of the sdist for this machine."""
    (sdist,) = distributions.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", target, sdist)
    ran(*pip, **{"NATS_STREAM_SOURCE_PURE": "", **variables})
    (wheel,) = target.glob("*.whl")
    return wheel


def selected_scanner(wheel: Path, target: Path) -> str:
    """The scanner of an installation of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    printed = ran(sys.executable, "-c", SELECTED, cwd=target, PYTHONPATH=str(target)).stdout
    file, name = printed.split()
    assert Path(file).is_relative_to(target)
    return name


@pytest.mark.faults
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_wheel_has_compiled_modules(distributions: Path, tmp_path: Path) -> None:
    wheel = built_wheel(distributions, tmp_path / "wheel")
    names = names_of(wheel)
    assert names > PURE_FILES
    added = sorted(names - PURE_FILES)
    assert len(added) == len(COMPILED)
    assert all(map(str.startswith, added, COMPILED))
    if SETUP["has_limited_api"]():
        assert "-cp311-abi3-" in wheel.name
        assert not [name for name in added if ".cpython-" in name]
    assert selected_scanner(wheel, tmp_path / "installed") == "compiled"


@pytest.mark.faults
@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_install_without_compiler(distributions: Path, tmp_path: Path, compiler: str) -> None:
    wheel = built_wheel(distributions, tmp_path / "wheel", CC=compiler)
    assert names_of(wheel) == PURE_FILES
    assert selected_scanner(wheel, tmp_path / "installed") == "python"


def test_pages_do_not_install_from_index() -> None:
    """A release on a package index changes these lines (CONTRIBUTING.md)."""
    assert len(INSTALLS) >= 5
    assert any(f"-{nats_stream_source.__version__}-py3-none-any.whl" in line for line in INSTALLS)
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert not re.search(r"pip install '?nats-stream-source", page.read_text()), page


def environment(path: Path) -> Path:
    """The Python of a new environment that has the packages of this one, without the project."""
    ran(sys.executable, "-m", "venv", path)
    python = path / "bin/python"
    (target,) = (path / "lib").glob("python3.*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        own = re.match(r"(__editable__.*)?nats[_-]stream[_-]source", entry.name)
        if not own and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)
    return python


@pytest.mark.faults
@pytest.mark.parametrize("line", INSTALLS)
def test_install_line_of_pages(distributions: Path, tmp_path: Path, line: str) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("nats_stream_source-*")
    shutil.copytree(distributions, unpacked / "dist")
    python = environment(tmp_path / "venv")
    # The last line is the action of errors that name an extra, which needs no index either.
    for arguments in (shlex.split(line), ["--no-index", "nats-stream-source[delta]"]):
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", *arguments)
        ran(*pip, cwd=unpacked, NATS_STREAM_SOURCE_PURE="1")
    code = "import nats_stream_source as it, nats_stream_source.jetstream; print(it.__file__)"
    printed = ran(python, "-c", code, cwd=tmp_path, environment={}).stdout
    assert Path(printed.strip()).is_relative_to(tmp_path / "venv")
