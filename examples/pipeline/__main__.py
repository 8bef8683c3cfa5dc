"""Everything on this machine: nats-server, a bucket and a stream, two updates of the pipeline.

Run: python -m examples.pipeline
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from examples.pipeline.project import prepare, update
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import JetStream, KeyValue, KeyValueConfig, Publisher, connect

AIRPORTS = ("EWR", "JFK", "LGA")


async def write_first(servers: str) -> None:
    """Create the bucket and the stream, and write some planes and reports."""
    async with connect(servers) as jetstream:
        fleet = await KeyValue.create_bucket(jetstream, KeyValueConfig("fleet", history=5))
        stream = {"name": "REPORTS", "subjects": ["report"]}
        await jetstream.call("STREAM.CREATE.REPORTS", stream)
        for number in range(9):
            await fleet.put(f"plane.{number}", AIRPORTS[number % 3].encode())
        await _report(jetstream, {"plane.1": 75, "plane.2": 5})


async def write_more(servers: str) -> None:
    """Move a plane, delete one, and write reports."""
    async with connect(servers) as jetstream:
        fleet = await KeyValue.open(jetstream, "fleet")
        await fleet.put("plane.1", b"LGA")
        await fleet.delete("plane.8")
        await _report(jetstream, {"plane.1": 15, "plane.3": 120})


async def _report(jetstream: JetStream, delays: dict[str, int]) -> None:
    publisher = jetstream.connection.service(Publisher)
    for plane, delay in delays.items():
        await publisher.publish("report", json.dumps({"plane": plane, "delay": delay}).encode())


async def entries(servers: str, bucket: str) -> dict[str, str]:
    """The bucket's values by key."""
    async with connect(servers) as jetstream:
        store = await KeyValue.open(jetstream, bucket)
        found = [await store.get(key) for key in await store.keys()]
        return {entry.key: entry.value.decode() for entry in found}


def view(directory: Path, name: str) -> list[dict[str, object]]:
    """The rows of a materialised view."""
    rows = pq.read_table(directory / "spark-warehouse" / name).to_pylist()
    return sorted(rows, key=lambda row: [str(value) for value in row.values()])


def main() -> None:
    """Run the example, and exit with an error if the view differs from the bucket."""
    directory = Path(tempfile.mkdtemp(prefix="pipeline-example-"))
    spec = prepare(directory)
    with NatsServer() as server:
        for write in (write_first, write_more):
            asyncio.run(write(server.url))
            print("an update of the pipeline")
            update(spec, server.url)
        bucket = asyncio.run(entries(server.url, "fleet"))
        late = asyncio.run(entries(server.url, "late"))
    for name in ("fleet", "delays"):
        print(name, *view(directory, name), sep="\n  ")
    print("bucket late", *late.items(), sep="\n  ")
    if {row["plane"]: row["airport"] for row in view(directory, "fleet")} != bucket:
        sys.exit("the view `fleet` differs from the bucket")
    print(f"the view equals the bucket: {directory}")


if __name__ == "__main__":
    main()
