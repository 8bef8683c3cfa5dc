"""The disk of the table is full: the command `follow` fails, and goes on once there is space."""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.delta import values
from tests.support.follower import follow_once, following, positions, version
from tests.support.nats import buckets
from tests.support.nats.store_files import small_disk

pytestmark = pytest.mark.faults


def test_table_disk_full(nats_server: NatsServer, tmp_path: Path) -> None:
    def entries(first: int) -> dict[str, bytes]:
        # Values that Parquet does not compress.
        made = range(first, first + 20)
        return {
            f"k.{n}": b"".join((n * 7919 + i**3).to_bytes(8, "big") for i in range(2000))
            for n in made
        }

    url, disk = nats_server.url, tmp_path / "disk"
    buckets.create_bucket(url, "b")
    written = entries(0)
    buckets.put_many(url, "b", written.items())
    with small_disk(disk, 4) as resize:
        table = disk / "table"
        with following(url, "b", table) as follower:
            follower.wait(lambda: version(table) > 0 and len(values(table)) == 20, "20 rows")
            filler = disk / "filler"
            with pytest.raises(OSError, match="No space left"):
                filler.write_bytes(b"x" * (8 << 20))
            before = version(table)
            written |= entries(10)
            buckets.put_many(url, "b", entries(10).items())
            assert follower.process.wait(60) == 1
        assert version(table) == before
        assert "No space left" in follow_once(url, "b", table, status=1)
        assert values(table).keys() == entries(0).keys()
        resize(32)
        follow_once(url, "b", table)
        assert values(table) == written
        assert positions(table)[-1].sequence == buckets.bucket_state(url, "b")["last_seq"]
