"""Write golden checkpoints of this version: ``python tests/golden/write.py [DIRECTORY]``.

To be done once for each released version, and never again for the same one: what is there shows
what that version really wrote. The default directory is the version's name, beside this file.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import re
import shutil
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import buckets  # noqa: E402
from pyspark.errors import StreamingQueryException  # noqa: E402
from pyspark.sql import DataFrame, Row, SparkSession  # noqa: E402
from queries import run_to_the_end  # noqa: E402
from spark_session import delta_session  # noqa: E402

from nats_stream_source.embedded import NatsServer  # noqa: E402

BUCKET, STREAM = "plant", "ORDERS"


@dataclass(frozen=True)
class Case:
    """One query and its checkpoint.

    Attributes:
        options: of the source, beside ``servers``.
        uncommitted: whether its last micro-batch was written to the sink and not committed.
    """

    format: str
    options: dict[str, str]
    uncommitted: bool = False


CASES = {
    "kv": Case("nats_kv", {"bucket": BUCKET}),
    "kv_uncommitted": Case("nats_kv", {"bucket": BUCKET}, uncommitted=True),
    "kv_keys_history": Case(
        "nats_kv",
        {"bucket": BUCKET, "keys": "pump.>,fan.*", "includeHistory": "true"},
    ),
    "kv_updates": Case("nats_kv", {"bucket": BUCKET, "updatesOnly": "true"}),
    "stream_filters": Case(
        "nats_stream", {"stream": STREAM, "filterSubjects": "orders.eu.>,orders.us"}
    ),
    "stream_new_uncommitted": Case(
        "nats_stream", {"stream": STREAM, "deliverPolicy": "new"}, uncommitted=True
    ),
}


class SinkError(Exception):
    """The sink fails after it wrote, so that the micro-batch is not committed."""


def shown(row: Row) -> list[Any]:
    """What of a row must be the same in every version."""
    if "revision" in row:
        value = None if row.value is None else bytes(row.value).decode()
        return [row.revision, row.operation, row.key, value, row.initial]
    return [row.sequence, row.subject, bytes(row.data).decode()]


def go_on(
    spark: SparkSession, url: str, case: Case, checkpoint: Path, fail: bool = False
) -> list[list[Any]]:
    """Run the query to the end of what there is; its rows, as :func:`shown`.

    Args:
        fail: whether the sink fails after each micro-batch with rows.
    """
    rows: list[list[Any]] = []

    def collect(batch: DataFrame, batch_id: int) -> None:
        found = [shown(row) for row in batch.collect()]
        rows.extend(found)
        if fail and found:
            raise SinkError

    writes = (
        spark.readStream.format(case.format)
        .options(servers=url, **case.options)
        .load()
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    try:
        run_to_the_end(writes.start)
    except StreamingQueryException as error:
        if not fail or "SinkError" not in str(error):
            raise
    return rows


def write(url: str, first: int) -> None:
    """One round of changes, whose values begin at ``first``."""
    keys = ["pump.a", "pump.b", "fan.1", "door", "pump.a"]
    buckets.put_many(url, BUCKET, ((key, b"%d" % (first + i)) for i, key in enumerate(keys)))
    buckets.delete(url, BUCKET, "fan.1")
    buckets.purge(url, BUCKET, "door")
    subjects = ["orders.eu.de", "orders.us", "orders.asia", "orders.eu.fr", "orders.us"]
    messages = [(name, b"%d" % (first + i), None) for i, name in enumerate(subjects)]
    buckets.publish(url, messages)


def stored(url: str, case: Case, after: int) -> list[list[Any]]:
    """What a query must still read after ``after``: asked of the server, message by message."""
    stream = case.options.get("stream") or f"KV_{BUCKET}"
    state = buckets.api(url, f"STREAM.INFO.{stream}")["state"]
    rows = []
    for seq in range(max(after + 1, state["first_seq"]), state["last_seq"] + 1):
        try:
            found = buckets.api(url, f"STREAM.MSG.GET.{stream}", {"seq": seq})["message"]
        except RuntimeError:
            continue  # superseded, or rolled up
        value = base64.b64decode(found.get("data", "")).decode()
        if case.format == "nats_stream":
            if _fits(found["subject"], case.options.get("filterSubjects")):
                rows.append([seq, found["subject"], value])
            continue
        key = found["subject"].removeprefix(f"$KV.{BUCKET}.")
        headers = base64.b64decode(found.get("hdrs", ""))
        operation = next((o for o in ("DEL", "PURGE") if f": {o}".encode() in headers), "PUT")
        if _fits(key, case.options.get("keys")):
            # What a query that has begun reads is no initial value.
            rows.append([seq, operation, key, value if operation == "PUT" else None, False])
    return rows


def _fits(name: str, filters: str | None) -> bool:
    """Whether a name matches one of the filters, as far as these tests have them."""
    return filters is None or any(
        name == one or (one[-2:] in (".>", ".*") and name.startswith(one[:-1]))
        for one in filters.split(",")
    )


def main(target: Path, scratch: Path) -> None:
    """Two rounds with all queries, a third without."""
    if target.exists():
        raise SystemExit(f"{target} is there already: golden checkpoints are written once")
    server = NatsServer(store=scratch / "nats")
    spark = delta_session()
    cases: dict[str, Any] = {}
    try:
        with server:
            buckets.create_bucket(server.url, BUCKET, history=5)
            config = {"name": STREAM, "subjects": ["orders.>"], "allow_direct": True}
            buckets.api(server.url, f"STREAM.CREATE.{STREAM}", config)
            for round_ in (0, 1, 2):
                write(server.url, 10 * (round_ + 1))
                for name, case in CASES.items() if round_ < 2 else ():
                    checkpoint = scratch / name / "checkpoint"
                    fail = case.uncommitted and round_ == 1
                    rows = go_on(spark, server.url, case, checkpoint, fail)
                    kept = cases.setdefault(name, {**asdict(case), "read": [], "again": []})
                    kept["again" if fail else "read"] += rows
            for name, case in CASES.items():
                # Where no rows were committed, those of the failed micro-batch come first.
                read = cases[name]["read"] or [[cases[name]["again"][0][0] - 1]]
                cases[name]["missing"] = stored(server.url, case, read[-1][0])
    finally:
        spark.stop()
    target.mkdir(parents=True)
    keep(scratch / "nats" / "jetstream", target / "store.tar.gz")
    for name in CASES:
        copy(scratch / name / "checkpoint", target / name / "checkpoint")
    (target / "cases.json").write_text(shown_cases(cases))


def shown_cases(cases: dict[str, Any]) -> str:
    """JSON with one row a line, so that a person can read it."""
    text = json.dumps(cases, indent=1)
    return re.sub(r"\[\n\s+(\d[^\]]*?)\n\s+\]", _one_line, text) + "\n"


def _one_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r"\n\s+", " ", found[1]) + "]"


def keep(store: Path, archive: Path) -> None:
    """The store as an archive; without what a server makes anew."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(store, "jetstream")


def copy(checkpoint: Path, target: Path) -> None:
    """A checkpoint without the check sums of Hadoop's local file system, which may be absent."""
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns(".*"))


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    name = "v" + importlib.metadata.version("nats-stream-source")
    scratch = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        main(Path(sys.argv[1]) if sys.argv[1:] else here / name, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
