"""Follow the bucket ``fleet`` into a table until stopped; prints a line for each batch.

NATS_URL, NATS_USER and NATS_PASSWORD set the server and the credentials, LAKE the directory of the
table and the checkpoint, SINK the table's format: ``delta`` or ``parquet``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from examples.demo.query import reached, start_query, start_session


def main() -> None:
    """Run the query."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    lake = Path(os.environ["LAKE"])
    options = {
        "servers": os.environ["NATS_URL"],
        "user": os.environ["NATS_USER"],
        "password": os.environ["NATS_PASSWORD"],
        "bucket": "fleet",
    }
    spark, sink, table = start_session("auto", lake), os.environ["SINK"], lake / "fleet"
    query = start_query(spark, options, table, sink)
    read = 0
    while query.isActive:
        if reached(query) > read:
            read = reached(query)
            print(f"the table has the bucket up to sequence {read}", flush=True)
        time.sleep(0.5)
    query.awaitTermination()  # raises the query's error


if __name__ == "__main__":
    main()
