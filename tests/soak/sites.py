"""Buckets that are created and deleted: their writer, and the oracle of the query by pattern.

Run as ``python -m tests.soak.sites <file>`` with a JSON file::

    {"servers": ["nats://…"], "directory": "…", "seed": 7, "replicas": 3}

Each bucket has a new name, and each entry a new key, so nothing is superseded. The ledger has a
line for each entry that was sent. As :mod:`tests.soak.generator`, it uses nats-py, and ends on
SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nats.errors
import pyarrow.parquet as pq
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.soak.collect import complete_attempts
from tests.support.event_loop import run
from tests.support.nats.buckets import api, bucket_config, connected_under_faults
from tests.support.nats.stored import stored_entries
from tests.support.oracle.evidence import Findings

PATTERN = "site-[0-9]+"
OPTIONS: dict[str, Any] = {
    "bucketPattern": PATTERN,
    "includeHistory": True,
    "discoveryInterval": 2,
    "failOnDataLoss": False,  # buckets are deleted while they are read
    "maxRowsPerTrigger": 500,
}

_MOST = 8  # buckets at a time
_PAUSE = 0.05  # seconds between two steps
_TIMEOUT = 5.0
_RECOVERY_TIMEOUT = 120.0

Rows = dict[str, list[tuple[int, str]]]
"""Revision and key of each row, by bucket, in the order of the rows."""


class SiteWriter:
    """Creates, fills and deletes buckets until :meth:`stop`."""

    def __init__(self, client: Any, ledger: Path, seed: int, replicas: int) -> None:
        self._client = client
        self._ledger = ledger.open("a", buffering=1)
        self._chance = random.Random(f"{seed} sites")
        self._replicas = replicas
        self._stopped = asyncio.Event()
        self._names: list[str] = []
        self._number = 0

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        """One step after the other; returns after :meth:`stop`."""
        while not self._stopped.is_set():
            step = self._chance.random()
            try:
                if len(self._names) < 2 or (step < 0.02 and len(self._names) < _MOST):
                    await self._create()
                elif step > 0.99:
                    await self._delete()
                else:
                    await self._put()
            except (nats.errors.Error, OSError):
                await asyncio.sleep(0.2)  # a fault; what was sent may be stored
            await asyncio.sleep(_PAUSE)
        self._ledger.close()

    async def _create(self) -> None:
        self._number += 1
        name = f"site-{self._number}"
        config = bucket_config(name, num_replicas=self._replicas)
        await self._request(f"$JS.API.STREAM.CREATE.KV_{name}", config)
        self._names.append(name)

    async def _delete(self) -> None:
        name = self._names.pop(0)
        await self._request(f"$JS.API.STREAM.DELETE.KV_{name}", None)

    async def _put(self) -> None:
        name = self._chance.choice(self._names)
        for _ in range(self._chance.randint(1, 20)):
            self._number += 1
            key = f"k{self._number}"
            self._ledger.write(json.dumps([name, key]) + "\n")
            await self._client.request(f"$KV.{name}.{key}", b"v", timeout=_TIMEOUT)

    async def _request(self, subject: str, config: Mapping[str, Any] | None) -> None:
        payload = b"" if config is None else json.dumps(config).encode()
        await self._client.request(subject, payload, timeout=_TIMEOUT)


def compare_sites(url: str, directory: Path) -> tuple[Findings, int]:
    """Compare the rows of the query with the buckets that are left, and with what was sent."""
    rows = read_rows(directory / "sites")
    present = present_buckets(url)
    lines = (directory / "sites.jsonl").read_text().splitlines()
    sent = {(name, key) for name, key in map(json.loads, lines)}
    return compare(rows, present, sent), sum(map(len, rows.values()))


def compare(rows: Rows, present: Rows, sent: set[tuple[str, str]]) -> Findings:
    """The findings. Of a bucket that was deleted, rows may be missing, and none may be wrong."""
    findings = Findings()
    for name in sorted(rows.keys() | present.keys()):
        read = rows.get(name, [])
        revisions = [revision for revision, _ in read]
        if len(set(revisions)) != len(revisions):
            findings.add("read twice", f"{name}: {_repeated(revisions)}")
        if revisions != sorted(revisions):
            findings.add("out of order", f"{name}: {revisions[:20]}")
        for revision, key in read:
            if (name, key) not in sent:
                findings.add("not written", f"{name}: {revision} {key}")
        for revision, key in present.get(name, []):
            if (revision, key) not in read:
                findings.add("not read", f"{name}: {revision} {key}")
    return findings


def _repeated(revisions: Sequence[int]) -> list[int]:
    return sorted({one for one in revisions if revisions.count(one) > 1})[:20]


def read_rows(directory: Path) -> Rows:
    """The rows of the last complete attempt of each micro-batch."""
    rows: Rows = {}
    for batch in sorted(directory.glob("[0-9]*")):
        parts = [part for one in complete_attempts(batch)[-1:] for part in one.glob("part-*")]
        for part in sorted(parts):
            table = pq.ParquetFile(part).read(columns=["bucket", "revision", "key"])
            for row in table.to_pylist():
                rows.setdefault(row["bucket"], []).append((row["revision"], row["key"]))
    return rows


def present_buckets(url: str) -> Rows:
    streams = [
        name
        for name in api(url, "STREAM.NAMES", {}).get("streams") or []
        if name.startswith("KV_site-")
    ]
    # A bucket may have no leader yet: the recovery waits for the other streams only.
    patient = retry(
        retry=retry_if_exception_type(nats.errors.Error),
        stop=stop_after_delay(_RECOVERY_TIMEOUT),
        wait=wait_fixed(0.5),
        reraise=True,
    )
    found: Rows = {}
    for stream in streams:
        name = stream.removeprefix("KV_")
        entries = patient(stored_entries)(url, stream, f"$KV.{name}.")
        found[name] = [(entry.seq, entry.key) for entry in entries]
    return found


async def main(request: dict[str, Any]) -> None:
    async with connected_under_faults(request["servers"]) as client:
        ledger = Path(request["directory"], "sites.jsonl")
        writer = SiteWriter(client, ledger, request["seed"], request["replicas"])
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, writer.stop)
        await writer.run()


if __name__ == "__main__":
    run(main(json.loads(Path(sys.argv[1]).read_text())))
