"""A process that merges numbered batches into a table, with upkeep, until it is killed.

``python -m tests.faults.delta.killed_writer TABLE FIRST`` prints the number of
each batch that is merged.
"""

from __future__ import annotations

import itertools
import random
import sys

from nats_stream_source.delta import Upkeep
from tests.integration.delta.driver.in_process import InProcessTable
from tests.integration.delta.merge_model import Entry, delete, put

KEYS = 40


def batch(number: int) -> list[Entry]:
    """Ten entries with the revisions of this batch; the same ones in each process."""
    choice = random.Random(number)
    makes = (put, put, put, delete)
    return [
        choice.choice(makes)(f"k{choice.randrange(KEYS)}", 10 * number + index + 1)
        for index in range(10)
    ]


def main() -> None:
    table = InProcessTable(
        sys.argv[1], upkeep=Upkeep(compact_files=3, vacuum_commits=5, retention_hours=1)
    )
    for number in itertools.count(int(sys.argv[2])):
        table.merge(*batch(number))
        print(number, flush=True)


if __name__ == "__main__":
    main()
