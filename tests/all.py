"""Many tests, in processes that run at once: those that share the Spark session, and all others.

Usage:
    python tests/all.py                    all but the slow ones
    python tests/all.py --slow FILE…       all of these files, the slow ones too

Directories of tests are apart from single files: with the slow ones each for itself.

Spark waits more than it works, and so do clusters whose servers are killed, so there is room for
others beside them. The output of the Spark tests is shown as it comes, that of the others when they
are done; each ends with pytest's own summary.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NO_TESTS = 5  # pytest's exit status where nothing was selected


def main() -> int:
    """Exit status: 0 if all passed."""
    pytest = [sys.executable, "-m", "pytest"]
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
    with contextlib.ExitStack() as stack:
        others = []
        for run in runs[1:]:
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            other = subprocess.Popen(
                [*pytest, *run], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(_end, other)
            others.append((other, output))
        codes = [subprocess.run([*pytest, *runs[0]], cwd=ROOT, check=False).returncode]
        for other, output in others:
            codes.append(other.wait())
            output.seek(0)
            print(output.read(), end="", flush=True)
    return next((code for code in codes if code not in (0, _NO_TESTS)), 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
