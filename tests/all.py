"""All tests, in two processes at once: those that share the Spark session, and all others.

Spark waits more than it works, so the others find room beside it. The output of the Spark tests is
shown as it comes, that of the others when they are done; each ends with pytest's own summary.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAST = "not faults and not sparks"


def main() -> int:
    """Exit status: 0 if both passed."""
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as output:
        others = subprocess.Popen(
            [*pytest, "-m", f"not spark and {FAST}"],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            spark = subprocess.run(
                [*pytest, "-m", f"spark and {FAST}"], cwd=ROOT, check=False
            ).returncode
            others.wait()
        finally:
            if others.poll() is None:
                others.terminate()
                others.wait()
        output.seek(0)
        print(output.read(), end="", flush=True)
    return spark or others.returncode


if __name__ == "__main__":
    sys.exit(main())
