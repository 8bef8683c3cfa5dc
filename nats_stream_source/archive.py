"""The package as one zip file, for ``spark-submit --py-files``.

Run ``python -m nats_stream_source.archive nats_stream_source.zip`` where the package is installed,
or in a checkout. The archive has this package and the modules by which Spark finds its formats; the
packages that it needs (nats-py, pyarrow, numpy, tenacity) must be on the machines already.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

FINDERS = ("pyspark_nats_kv.py", "pyspark_nats_stream.py")


def write_archive(target: Path) -> Path:
    """Write the archive to ``target`` and return it; an archive that is there is replaced."""
    package = Path(__file__).parent
    root = package.parent
    files = [*(root / name for name in FINDERS), *package.rglob("*.py"), *package.glob("py.typed")]
    # Installers for reproducible builds give files the time 0, which a zip file cannot hold.
    how = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(target, "w", how, strict_timestamps=False) as archive:
        for file in sorted(files):
            archive.write(file, file.relative_to(root))
    return target


def main(arguments: list[str]) -> int:
    """The program: one argument, the archive's path."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m nats_stream_source.archive ARCHIVE.zip", file=sys.stderr)
        return 2
    print(write_archive(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
