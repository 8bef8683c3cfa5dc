"""Replay the flights into the bucket ``fleet``; with ``--create`` only create the bucket.

NATS_URL is the server's URL.
"""

from __future__ import annotations

import asyncio
import os
import sys

from examples.demo import flights
from examples.demo.writer import BUCKET, Writer, create_bucket


def main() -> None:
    """Create the bucket, or fill it."""
    url = os.environ["NATS_URL"]
    if sys.argv[1:] == ["--create"]:
        asyncio.run(create_bucket(url))
        print(f"bucket {BUCKET} created", flush=True)
        return
    replay = flights.load(int(os.environ.get("ROWS", 0)) or None)
    writer = Writer(url, replay)
    writer.go_on(replay.writes)
    print(f"{writer.written} writes in {writer.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
