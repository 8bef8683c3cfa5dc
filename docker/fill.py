"""Replays the flights into the bucket ``fleet``; with ``--create`` only makes the bucket.

NATS_URL says where the server is.
"""

from __future__ import annotations

import asyncio
import os
import sys

from nats_stream_source.demo import flights
from nats_stream_source.demo.writer import Writer, create_bucket

BUCKET = "fleet"
HISTORY = 64


def main() -> None:
    """Make the bucket, or fill it."""
    url = os.environ["NATS_URL"]
    if sys.argv[1:] == ["--create"]:
        asyncio.run(create_bucket(url, BUCKET, HISTORY))
        print(f"bucket {BUCKET} is there", flush=True)
        return
    replay = flights.load(int(os.environ.get("ROWS", 0)) or None)
    with Writer(url, BUCKET, replay.departures) as writer:
        writer.allow(replay.writes)
        writer.join()
        print(f"{writer.written} writes in {writer.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
