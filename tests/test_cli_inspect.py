"""``inspect``: checkpoints in every state, and streams that went on, changed or went away."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import buckets
import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.connection import ConnectionSettings
from nats_stream_source.jetstream.link import Link
from nats_stream_source.options import kv_options, stream_options
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of

SAMPLE = Path(__file__).parent.parent / "checkpoints_example" / "checkpoint"

_serial = itertools.count()


@dataclass
class Checkpoint:
    """A checkpoint directory, written file by file as Spark does."""

    path: Path

    def __post_init__(self) -> None:
        for name in ("offsets", "commits"):
            (self.path / name).mkdir(parents=True)
        (self.path / "metadata").write_text('{"id":"4e1cf4d2-0000-0000-0000-000000000001"}')

    def plan(self, batch: int, *sources: Offset | str, version: str = "v1") -> None:
        lines = [one if isinstance(one, str) else json.dumps(one.to_json()) for one in sources]
        (self.path / "offsets" / str(batch)).write_text("\n".join([version, "{}", *lines]))
        (self.path / "offsets" / f".{batch}.crc").write_bytes(b"crc")

    def commit(self, batch: int) -> None:
        (self.path / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def bucket(shared_server: NatsServer) -> str:
    """A bucket with ten entries."""
    name = f"b{next(_serial)}"
    buckets.create_bucket(shared_server.url, name, 5)
    buckets.put_many(shared_server.url, name, ((f"k{i}", b"v") for i in range(10)))
    return name


def offsets(url: str, rows: Sequence[int | None], **given: str) -> list[Offset]:
    """The ends of a query's first micro-batches, by the planner; each with its limit of rows."""
    made = kv_options if "bucket" in given else stream_options

    async def work() -> list[Offset]:
        link = Link(ConnectionSettings(servers=(url,)))
        try:
            planner = Planner(query_of(made({"servers": url, **given})), link)
            ends = [await planner.initial()]
            for limit in rows:
                ends.append(await planner.latest(ends[-1], limit))
            return ends[1:]
        finally:
            await link.drop()

    return asyncio.run(work())


def inspect(
    capsys: pytest.CaptureFixture[str], where: Path, *words: str, status: int = 0
) -> dict[str, Any]:
    """The report as JSON, which the text agrees with."""
    assert main(["inspect", str(where), *words]) == status
    text = capsys.readouterr().out
    assert main(["inspect", "--json", str(where), *words]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    for source in report["sources"]:
        assert f"source {source['source']}" in text
        if source["problem"]:
            assert source["problem"] in text
        elif source["lag"] is not None:
            assert f"lag       {source['lag']:,} rows" in text
    return report


def test_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(capsys, SAMPLE)
    assert (report["committed_batch"], report["planned_batch"]) == (1, 1)
    (source,) = report["sources"]
    assert (source["bucket"], source["committed"]["stream_seq"]) == ("plant", 5)
    assert source["lag"] is None


def test_lag_behind_a_bucket(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
) -> None:
    url = shared_server.url
    (end,) = offsets(url, [None], bucket=bucket)
    checkpoint.plan(0, end)
    checkpoint.commit(0)
    live = ("--servers", url)
    report = inspect(capsys, checkpoint.path, *live)
    assert [(s["lag"], s["lag_seconds"], s["last_seq"]) for s in report["sources"]] == [(0, 0, 10)]
    buckets.put_many(url, bucket, [("k0", b"w"), ("new", b"w"), ("k0", b"x")])
    (source,) = inspect(capsys, checkpoint.path, *live, "--max-lag", "3")["sources"]
    assert (source["lag"], source["last_seq"]) == (3, 13)
    assert source["lag_seconds"] > 0
    inspect(capsys, checkpoint.path, *live, "--max-lag", "2", status=1)


@pytest.mark.parametrize("committed", [False, True])
def test_a_batch_that_is_not_committed(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
    committed: bool,
) -> None:
    url = shared_server.url
    first, second = offsets(url, [4, 3], bucket=bucket, includeHistory="true")
    checkpoint.plan(0, first)
    if committed:
        checkpoint.commit(0)
        checkpoint.plan(1, second)
    report = inspect(capsys, checkpoint.path, "--servers", url)
    assert (report["committed_batch"], report["planned_batch"]) == (
        (0, 1) if committed else (None, 0)
    )
    (source,) = report["sources"]
    # Only what is in the sink counts as read.
    assert source["lag"] == (6 if committed else 10)
    assert main(["inspect", str(checkpoint.path)]) == 0
    said = capsys.readouterr().out
    assert ("revisions 5 to 7" if committed else "revisions 1 to 4") in said
    assert "the next start reads it again" in said


def test_initial_values_are_not_all(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
) -> None:
    """With history, they are a micro-batch of their own, whatever came since."""
    url = shared_server.url
    checkpoint.plan(0, *offsets(url, [None], bucket=bucket))
    buckets.put_many(url, bucket, [("k0", b"w"), ("k1", b"w"), ("k0", b"x")])
    (source,) = inspect(capsys, checkpoint.path, "--servers", url)["sources"]
    assert source["lag"] == 13


def test_filters_count_only_what_matches(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
) -> None:
    url = shared_server.url
    (end,) = offsets(url, [None], bucket=bucket, keys="k1,k2")
    checkpoint.plan(0, end)
    checkpoint.commit(0)
    buckets.put_many(url, bucket, [("k1", b"w"), ("k3", b"w"), ("k3", b"x"), ("k2", b"x")])
    (source,) = inspect(capsys, checkpoint.path, "--servers", url)["sources"]
    assert source["lag"] == 2
    main(["inspect", str(checkpoint.path)])
    assert "keys=k1,k2" in capsys.readouterr().out


def test_several_sources(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
) -> None:
    url = shared_server.url
    name = f"S{next(_serial)}"
    buckets.api(url, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"]})
    buckets.publish(url, [(f"{name}.x", b"", None) for _ in range(5)])
    (kv,) = offsets(url, [None], bucket=bucket)
    (stream,) = offsets(url, [2], stream=name)
    checkpoint.plan(0, kv, '{"logOffset": 7}', stream, "-")
    checkpoint.commit(0)
    report = inspect(capsys, checkpoint.path, "--servers", url)
    assert [s["stream"] for s in report["sources"]] == [f"KV_{bucket}", None, name, None]
    assert [s["lag"] for s in report["sources"]] == [0, None, 3, None]
    assert report["sources"][1]["other"] == '{"logOffset": 7}'


def test_the_second_format_of_the_log(
    capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint
) -> None:
    """Spark's own with ``spark.sql.streaming.offsetLog.formatVersion=2``: names, in any order."""
    line = (SAMPLE / "offsets/1").read_text().splitlines()[2]
    checkpoint.plan(3, "1:{}", f"0:{line}", version="v2")
    checkpoint.commit(3)
    first, second = inspect(capsys, checkpoint.path)["sources"]
    assert (first["source"], first["bucket"]) == ("0", "plant")
    assert second["other"] == "{}"


def test_other_ends_of_lines(capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint) -> None:
    line = (SAMPLE / "offsets/1").read_text().splitlines()[2]
    topic = '{"a topic\u2028and a line": {"0": 1}}'
    checkpoint.plan(0, topic, line)
    first, second = inspect(capsys, checkpoint.path)["sources"]
    assert (first["other"], second["bucket"]) == (topic, "plant")


# -- streams that are not what they were --------------------------------------------------------


def test_made_anew(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
) -> None:
    url = shared_server.url
    (end,) = offsets(url, [None], bucket=bucket)
    checkpoint.plan(0, end)
    checkpoint.commit(0)
    buckets.delete_bucket(url, bucket)
    (source,) = inspect(capsys, checkpoint.path, "--servers", url, status=1)["sources"]
    assert "does not exist" in source["problem"]
    buckets.create_bucket(url, bucket)
    (source,) = inspect(capsys, checkpoint.path, "--servers", url, status=1)["sources"]
    assert "was deleted and made again" in source["problem"]
    assert "failOnDataLoss=false" in source["problem"]
    assert source["lag"] is None


@pytest.mark.parametrize("committed", [False, True])
def test_set_back(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
    committed: bool,
) -> None:
    """To a stream that was set back, the checkpoint is one from its future."""
    url = shared_server.url
    (end,) = offsets(url, [None], bucket=bucket)
    checkpoint.plan(0, replace(end, stream_seq=25, initial_through=25))
    if committed:
        checkpoint.commit(0)
    (source,) = inspect(capsys, checkpoint.path, "--servers", url, status=1)["sources"]
    assert "was set back" in source["problem"]


def test_not_to_be_read_any_more(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Checkpoint,
    shared_server: NatsServer,
    bucket: str,
) -> None:
    """One source's stream must not hide the other's."""
    url = shared_server.url
    name = f"S{next(_serial)}"
    config = {"name": name, "subjects": [f"{name}.>"]}
    buckets.api(url, f"STREAM.CREATE.{name}", config)
    (first,), (second,) = offsets(url, [None], stream=name), offsets(url, [None], bucket=bucket)
    checkpoint.plan(0, first, second)
    checkpoint.commit(0)
    buckets.api(url, f"STREAM.UPDATE.{name}", {**config, "retention": "interest"})
    one, other = inspect(capsys, checkpoint.path, "--servers", url, status=1)["sources"]
    assert "retention 'interest'" in one["problem"]
    assert (other["problem"], other["lag"]) == (None, 0)


def test_aged_out(
    capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint, shared_server: NatsServer
) -> None:
    url = shared_server.url
    name = f"S{next(_serial)}"
    config = {"name": name, "subjects": [f"{name}.>"], "max_msgs": 5}
    buckets.api(url, f"STREAM.CREATE.{name}", config)
    buckets.publish(url, [(f"{name}.x", b"", None) for _ in range(5)])
    checkpoint.plan(0, *offsets(url, [2], stream=name))
    checkpoint.commit(0)
    buckets.publish(url, [(f"{name}.x", b"", None) for _ in range(4)])
    (source,) = inspect(capsys, checkpoint.path, "--servers", url, status=1)["sources"]
    assert "sequences 3 to 4 went away" in source["problem"]
    assert (source["first_seq"], source["last_seq"]) == (5, 9)


# -- what is no checkpoint, or none that can be read --------------------------------------------


def test_nothing_planned_yet(capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint) -> None:
    report = inspect(capsys, checkpoint.path)
    assert (report["planned_batch"], report["sources"]) == (None, [])
    main(["inspect", str(checkpoint.path)])
    assert "nothing was planned yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v": 2}, "install the newer one"),
        ({"stream_seq": "5"}, "stream_seq='5', not a int"),
        ({"origin": 9}, "contradicts itself"),
    ],
)
def test_an_offset_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint, change: dict[str, Any], said: str
) -> None:
    offset = json.loads((SAMPLE / "offsets/1").read_text().splitlines()[2])
    checkpoint.plan(0, json.dumps({**offset, **change}), '{"other": 1}')
    first, second = inspect(capsys, checkpoint.path, status=1)["sources"]
    assert said in first["problem"]
    assert second["problem"] is None


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere", "is no directory"),
        (".", "is not a checkpoint"),
        ("newer", "has the format 'v3'"),
        ("cut", "is missing or is not a file of an offset log"),
        ("s3://lake/checkpoint", "is not on this machine"),
    ],
)
def test_no_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str, said: str
) -> None:
    Checkpoint(tmp_path / "newer").plan(0, "{}", version="v3")
    Checkpoint(tmp_path / "cut").path.joinpath("offsets/0").write_text("")
    assert main(["inspect", where if "://" in where else str(tmp_path / where)]) == 1
    output = capsys.readouterr()
    assert said in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


def test_a_uri_of_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = tmp_path / "with space"
    shutil.copytree(SAMPLE, copy)
    assert main(["inspect", copy.as_uri()]) == 0
    assert re.search(r"^query +3999df31", capsys.readouterr().out, re.M)
