"""Write golden tables of this version: ``python -m tests.compat.golden.write_delta_tables [DIR]``.

To be done before the code that writes tables changes, and never again for the same version: what is
there shows what that version really wrote. For each story of ``delta_tables.py`` it writes
``DIR/NAME.tar.gz``, the table and its state table, and ``DIR/NAME.json``: the arguments of
``merge``, the rows, an old batch, the next batch, and the rows after it. A copy of the table gives
these, and the same rows must come from each engine that can merge the batch.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
import shutil
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import Engine, Upkeep, merge
from nats_stream_source.errors import ConfigurationError
from tests.compat.golden.delta_tables import STORIES, TABLE, Rows, Story, as_text, content, written
from tests.support.spark.session import delta_session

# Not Delta's own hour: a table that waits for years is continued with the files that it has.
_UPKEEP = Upkeep(retention_hours=168)
_ENGINES: tuple[Engine, ...] = ("driver", "spark")


def main(target: Path, scratch: Path) -> None:
    spark = delta_session()
    try:
        for name, story in STORIES.items():
            if (target / f"{name}.json").exists():
                continue
            directory = scratch / name
            _create(spark, story, directory / TABLE)
            if name.startswith("checkpoint"):
                _keep_checkpoint_only(directory / TABLE)
            known = {
                "rules": story.rules,
                "rows": content(directory / TABLE),
                "old": asdict(story.old),
                "next": asdict(story.after),
                **_after(spark, story, directory),
            }
            archive = _archive(directory)
            (target / f"{name}.tar.gz").write_bytes(archive)
            (target / f"{name}.json").write_text(as_text(known) + "\n")
            print(f"{name}: {len(archive):,} bytes, {known['engines']}", flush=True)
    finally:
        spark.stop()


def _create(spark: SparkSession, story: Story, table: Path) -> None:
    for step in story.steps:
        if step.batch is None:
            spark.sql(step.sql.format(table=f"delta.`{table}`"))
        else:
            batch = written(spark, step.batch)
            merge(batch, table, upkeep=_UPKEEP, **step.how, **story.rules)


def _keep_checkpoint_only(table: Path) -> None:
    """Delete the log's entries before its last checkpoint, as an expired retention does."""
    log = table / "_delta_log"
    last = json.loads((log / "_last_checkpoint").read_text())["version"]
    for entry in log.glob("[0-9]*.json"):
        if int(entry.stem) < last:
            entry.unlink()
    stored = pq.read_table(next(log.glob(f"{last:020}.checkpoint*.parquet")), columns=["add"])
    vectors = [add["deletionVector"] for add in stored["add"].to_pylist() if add]
    assert any(vector and vector["cardinality"] for vector in vectors), "vectors in the checkpoint"


def _after(spark: SparkSession, story: Story, directory: Path) -> dict[str, Any]:
    """The rows after the next batch, the engines that merge it, and those that keep a data file."""
    found: dict[str, Rows] = {}
    kept = []
    before = _files(directory / TABLE)
    for engine in _ENGINES:
        copy = directory.with_name(f"{directory.name}.{engine}")
        shutil.copytree(directory, copy)
        try:
            merge(written(spark, story.after), copy / TABLE, engine=engine, **story.rules)
        except ConfigurationError as error:
            print(f"{directory.name} with {engine}: {error}")
            continue
        found[engine] = content(copy / TABLE)
        if before & _files(copy / TABLE):
            kept.append(engine)
    rows = next(iter(found.values()))
    assert all(other == rows for other in found.values()), (directory.name, found)
    return {"rows_after": rows, "engines": list(found), "keeps_files": kept}


def _files(table: Path) -> set[str]:
    return {Path(uri).name for uri in DeltaTable(table).file_uris()}


def _archive(directory: Path) -> bytes:
    """The tables as an archive.

    It lacks the check sums of Hadoop's local file system, and the directory in which the tables
    were written: delta-rs logs it when it creates a table.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            if file.name.startswith("."):
                continue
            content = file.read_bytes()
            if file.suffix == ".json":
                content = content.replace(str(directory).encode(), b"/lake")
            member = tarfile.TarInfo(str(file.relative_to(directory)))
            member.size, member.mtime = len(content), int(file.stat().st_mtime)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


if __name__ == "__main__":
    version = importlib.metadata.version("nats-stream-source")
    place = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / f"tables-v{version}"
    place.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        main(place, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
