"""Check the machine's requirements for the demo and the tests.

``make`` runs this file by its path with the user's own Python, before any package is installed.
Therefore it imports the standard library only. It prints one line for each missing requirement,
with what to install, and the exit status is then 1.

    python3 preflight.py [venv] [java]
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

JAVA = 17
"""The oldest Java that Spark 4 runs on."""

_INSTALL_JAVA = (
    f"install Java {JAVA} or newer"
    f" (Debian and Ubuntu: `apt-get install openjdk-{JAVA}-jre-headless`;"
    f" macOS: `brew install openjdk@{JAVA}`), or set JAVA_HOME to one"
)


def java_version(text: str) -> int | None:
    """The major version in the output of ``java -version``; None if the output has no version.

    Java 8 and older print ``1.8``.
    """
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major


def java_problem() -> str | None:
    """The problem of this machine's Java as one line; None if Spark can use it.

    Spark's launcher runs ``$JAVA_HOME/bin/java`` if JAVA_HOME is set, else the first on the PATH.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        java: str | None = str(Path(home, "bin", "java"))
        where = f"JAVA_HOME is {home}"
        if not os.access(str(java), os.X_OK):
            return f"{where}, which has no bin/java: {_INSTALL_JAVA}."
    else:
        java = shutil.which("java")
        where = f"java is {java}"
        if java is None:
            return f"Spark needs Java and none was found: {_INSTALL_JAVA}."
    try:
        done = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{where}, which does not run ({error}): {_INSTALL_JAVA}."
    version = java_version(done.stderr + done.stdout)
    if done.returncode or version is None:
        # On macOS, /usr/bin/java only reports that no Java is installed.
        return f"{where}, which does not tell its version: {_INSTALL_JAVA}."
    if version < JAVA:
        return f"{where}, Java {version}, which is too old for Spark 4: {_INSTALL_JAVA}."
    return None


def venv_problem() -> str | None:
    """Why this Python cannot create a virtual environment; None if it can.

    On Debian and Ubuntu ``ensurepip`` is in a separate package.
    """
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"{sys.executable} (Python {version}) cannot make a virtual environment,"
        f" its module {' and '.join(missing)} is missing:"
        f" install it (Debian and Ubuntu: `apt-get install python{version}-venv`),"
        " or name another Python: `make setup PYTHON=python3.12`."
    )


def main(wanted: list[str]) -> int:
    """Print a line for each missing requirement of ``wanted``; returns 1 if one is missing."""
    checks = {"venv": venv_problem, "java": java_problem}
    problems = [problem for name in wanted if (problem := checks[name]()) is not None]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
