"""Replay the flights into the bucket ``fleet``; with ``--create`` only create the bucket.

NATS_URL is the server's URL.
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
    """Create the bucket, or fill it."""
    url = os.environ["NATS_URL"]
    if sys.argv[1:] == ["--create"]:
        asyncio.run(create_bucket(url, BUCKET, HISTORY))
        print(f"bucket {BUCKET} created", flush=True)
        return
    replay = flights.load(int(os.environ.get("ROWS", 0)) or None)
    with Writer(url, BUCKET, replay.departures) as writer:
        writer.allow(replay.writes)
        writer.join()
        print(f"{writer.written} writes in {writer.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
