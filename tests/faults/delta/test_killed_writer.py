"""A writer that is killed with -9, in a commit or in the upkeep beside it, and started again.

As a program with a table and a number, this module merges numbered batches with upkeep, and prints
the number of each.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta import Upkeep
from tests.integration.delta.driver.in_process import (
    InProcessTable,
    index_of,
    model_rows,
    rebuilt,
    table_rows,
)
from tests.integration.delta.merge_model import Entry, Model, delete, put
from tests.support.delta import rows_of

_KILLS = 12
KEYS = 40


def batch(number: int) -> list[Entry]:
    """Ten entries with the revisions of this batch; the same ones in each process."""
    choice = random.Random(number)
    makes = (put, put, put, delete)
    return [
        choice.choice(makes)(f"k{choice.randrange(KEYS)}", 10 * number + index + 1)
        for index in range(10)
    ]


def merge_until_killed() -> None:
    table = InProcessTable(
        sys.argv[1], upkeep=Upkeep(compact_files=3, vacuum_commits=5, retention_hours=1)
    )
    for number in itertools.count(int(sys.argv[2])):
        table.merge(*batch(number))
        print(number, flush=True)


def _run_until_killed(path: Path, first: int, after: int, delay: float) -> int:
    """Merge batches from ``first``, kill the process ``delay`` seconds after ``after`` of them.

    Returns:
        the last batch that the process reported.
    """
    command = [sys.executable, "-m", "tests.faults.delta.test_killed_writer", str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reported = [int(process.stdout.readline()) for _ in range(after)]
        # A commit takes some milliseconds: the point in it that the kill meets is random.
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        reported += [int(line) for line in process.stdout.read().split("\n") if line.strip()]
    assert process.returncode == -9
    return reported[-1]


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(3))
def test_killed_writer_leaves_whole_commits(tmp_path: Path, seed: int) -> None:
    choice, path = random.Random(seed), tmp_path / "fleet"
    model, done = Model("remove"), 0
    for _ in range(_KILLS):
        last = _run_until_killed(path, done, choice.randint(1, 12), choice.uniform(0, 0.03))
        for number in range(done, last + 1):
            model.merge(batch(number))
        found = table_rows(rows_of(DeltaTable(path)))
        # The batch after the last one that was reported is in the table as a whole, or not at all.
        if found != model_rows(model.rows):
            last += 1
            model.merge(batch(last))
        assert found == model_rows(model.rows)
        done = last + 1
        rebuilt(path)  # fails for a key with two rows
    table = InProcessTable(path)
    version = DeltaTable(path).version()
    assert table.merge(*batch(done - 1)) == 0
    assert DeltaTable(path).version() == version
    table.merge(*batch(done))
    assert index_of(table.state) == index_of(rebuilt(path))
    operations = {one["operation"] for one in DeltaTable(path).history()}
    assert "OPTIMIZE" in operations, operations


if __name__ == "__main__":
    merge_until_killed()
