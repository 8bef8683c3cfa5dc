"""Write golden checkpoints of this version: ``python -m tests.compat.golden.write [DIRECTORY]``.

To be done once for each released version, and never again for the same one: what is there shows
what that version really wrote. The directories of :data:`STORIES` are made in ``DIRECTORY``, or
else beside this file; those that are there already stay as they are.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from nats_stream_source.embedded import NatsServer
from tests.compat.golden.delta_tables import as_text
from tests.compat.golden.histories import STORIES, Writer
from tests.support.spark.session import delta_session


def main(target: Path, scratch: Path, suffix: str) -> None:
    tell, cases = STORIES[suffix]
    spark = delta_session()
    kept: dict[str, Any] = {}
    try:
        with NatsServer(store=scratch / "nats") as server:
            tell(Writer(spark, server.url, scratch, cases, kept))
    finally:
        spark.stop()
    target.mkdir(parents=True)
    keep(scratch / "nats" / "jetstream", target / "store.tar.gz")
    for name in cases:
        copy(scratch / name / "checkpoint", target / name / "checkpoint")
    (target / "cases.json").write_text(as_text(kept) + "\n")


def keep(store: Path, archive: Path) -> None:
    """The store as an archive; without what a server creates again."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(store, "jetstream")


def copy(checkpoint: Path, target: Path) -> None:
    """A checkpoint without the check sums of Hadoop's local file system, which may be absent."""
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns(".*"))
    for directory in target.iterdir():
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()  # as in a clone, where no empty ones are


if __name__ == "__main__":
    here = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent
    for suffix in STORIES:
        target = here / f"v{importlib.metadata.version('nats-stream-source')}{suffix}"
        if target.exists():
            continue
        scratch = Path(tempfile.mkdtemp(prefix="golden-"))
        try:
            main(target, scratch, suffix)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
