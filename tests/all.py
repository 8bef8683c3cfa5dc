"""Many tests, in processes that run at once: those that share the Spark session, and all others.

Usage:
    python tests/all.py                    all but the slow ones
    python tests/all.py --again            likewise; a few that fail get a second run, alone
    python tests/all.py --slow FILE…       all of these files, the slow ones too

Directories of tests are apart from single files: with the slow ones each for itself.

Spark waits more than it works, and so do clusters whose servers are killed, so there is room for
others beside them. The output of the Spark tests is shown as it comes, that of the others when they
are done; each ends with pytest's own summary.

The second run is for machines that others use too, where a server may get no processor for seconds.
It is no pardon for what is broken: the first run's failures stay in the output, more than a few are
not run again, and what fails twice has failed.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FAILED = 1  # pytest's exit status where tests failed, and nothing else was wrong
_NO_TESTS = 5  # and where nothing was selected
_MOST_AGAIN = 10  # tests of a process that may fail and be run again: a file whose set-up failed


def main() -> int:
    """Exit status: 0 if all passed."""
    if sys.argv[1:2] == ["--slow"]:
        files, which = sys.argv[2:], "not sparks"
        directories = [[file] for file in files if Path(file).is_dir()]
    else:
        tests, which = ROOT / "tests", "not faults and not sparks"
        files = [str(file) for file in sorted(tests.glob("test_*.py"))]
        directories = [sorted({str(file.parent) for file in tests.glob("*/test_*.py")})]
        files += directories[0]
    single = [file for file in files if Path(file).is_file()]
    runs = [
        [*files, "-m", f"spark and {which}"],
        *([*part, "-m", f"not spark and {which}"] for part in (*directories, single) if part),
    ]
    with tempfile.TemporaryDirectory() as caches:
        # Each process remembers its failures for itself.
        commands = [
            [sys.executable, "-m", "pytest", "-o", f"cache_dir={caches}/{number}", *run]
            for number, run in enumerate(runs)
        ]
        codes = _at_once(commands)
        if sys.argv[1:] == ["--again"]:
            codes = [
                _again(command, Path(caches, str(number))) if code == _FAILED else code
                for number, (command, code) in enumerate(zip(commands, codes, strict=True))
            ]
    return next((code for code in codes if code not in (0, _NO_TESTS)), 0)


def _at_once(commands: list[list[str]]) -> list[int]:
    """Their exit statuses; the first one's output is shown as it comes."""
    with contextlib.ExitStack() as stack:
        others = []
        for command in commands[1:]:
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            other = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(_end, other)
            others.append((other, output))
        codes = [subprocess.run(commands[0], cwd=ROOT, check=False).returncode]
        for other, output in others:
            codes.append(other.wait())
            output.seek(0)
            print(output.read(), end="", flush=True)
    return codes


def _again(command: list[str], cache: Path) -> int:
    """Exit status of a second run of the tests that failed, if they are few."""
    failed = json.loads((cache / "v" / "cache" / "lastfailed").read_text())
    if len(failed) > _MOST_AGAIN:
        return _FAILED
    print("FAILED ONCE, and run again alone:", *failed, sep="\n  ", flush=True)
    return subprocess.run([*command, "--last-failed"], cwd=ROOT, check=False).returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
