"""``inspect``: checkpoints in every state, and streams that went on, changed or were deleted."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.cli.main import main
from nats_stream_source.rows.offsets import Offset
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.paths import ROOT
from tests.support.prometheus import Samples, parsed, value
from tests.support.spark.checkpoints import Checkpoint, ends

SAMPLE = ROOT / "checkpoints_example" / "checkpoint"
SAMPLE_OFFSET = (SAMPLE / "offsets/1").read_text().splitlines()[2]

_serial = itertools.count()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint")


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
        assert f"scanner    {report['frame_scanner']}" in text
        if source["problem"]:
            assert source["problem"] in text
        elif source["lag"] is not None:
            assert f"lag       {source['lag']:,} rows" in text
    return report


@dataclass
class Live:
    """A checkpoint, and a server with a bucket of ten entries that the query reads."""

    checkpoint: Checkpoint
    url: str
    bucket: str
    capsys: pytest.CaptureFixture[str]

    def ends(self, *rows: int | None, **given: str) -> list[Offset]:
        """The ends of a query's first micro-batches, by the planner; each with its limit of rows.

        ``given`` are its options; it reads the bucket unless they name a stream.
        """
        reads = given if "stream" in given else {"bucket": self.bucket, **given}
        return ends(self.url, rows, **reads)

    def committed(self, **given: str) -> Offset:
        """Let the checkpoint be that of a query that has read all; where it is."""
        (end,) = self.ends(None, **given)
        self.checkpoint.committed(end)
        return end

    def put(self, *entries: tuple[str, bytes]) -> None:
        buckets.put_many(self.url, self.bucket, entries)

    def stream(self, messages: int = 0, **config: Any) -> str:
        """The name of a new stream."""
        name = f"S{next(_serial)}"
        create_stream(self.url, name, **config)
        self.publish(name, messages)
        return name

    def publish(self, stream: str, messages: int) -> None:
        buckets.publish(self.url, [(f"{stream}.x", b"", None)] * messages)

    def report(self, *words: str, status: int = 0) -> dict[str, Any]:
        return inspect(
            self.capsys, self.checkpoint.path, "--servers", self.url, *words, status=status
        )

    def source(self, *words: str, status: int = 0) -> dict[str, Any]:
        """What is reported of the one source."""
        (source,) = self.report(*words, status=status)["sources"]
        return dict(source)

    def text(self) -> str:
        """The output without a request to the server."""
        assert main(["inspect", str(self.checkpoint.path)]) == 0
        return self.capsys.readouterr().out


@pytest.fixture
def live(capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint, url: str) -> Live:
    name = f"b{next(_serial)}"
    buckets.create_bucket(url, name, 5)
    found = Live(checkpoint, url, name, capsys)
    found.put(*((f"k{i}", b"v") for i in range(10)))
    return found


def test_sample_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(capsys, SAMPLE)
    assert (report["committed_batch"], report["planned_batch"]) == (1, 1)
    (source,) = report["sources"]
    assert (source["bucket"], source["committed"]["stream_seq"]) == ("plant", 5)
    assert source["lag"] is None


def test_lag_behind_bucket(live: Live) -> None:
    live.committed()
    source = live.source()
    assert (source["lag"], source["lag_seconds"], source["last_seq"]) == (0, 0, 10)
    live.put(("k0", b"w"), ("new", b"w"), ("k0", b"x"))
    source = live.source("--max-lag", "3")
    assert (source["lag"], source["last_seq"]) == (3, 13)
    assert source["lag_seconds"] > 0
    live.source("--max-lag", "2", status=1)


@pytest.mark.parametrize("committed", [False, True])
def test_batch_not_committed(live: Live, committed: bool) -> None:
    first, second = live.ends(4, 3, includeHistory="true")
    if committed:
        live.checkpoint.committed(first)
        live.checkpoint.plan(1, second)
    else:
        live.checkpoint.plan(0, first)
    report = live.report()
    assert (report["committed_batch"], report["planned_batch"]) == (
        (0, 1) if committed else (None, 0)
    )
    (source,) = report["sources"]
    # Only what is in the sink counts as read.
    assert source["lag"] == (6 if committed else 10)
    said = live.text()
    assert ("revisions 5 to 7" if committed else "revisions 1 to 4") in said
    assert "the next start reads it again" in said


def test_initial_values_are_not_all(live: Live) -> None:
    """With history, the initial values are a micro-batch of their own."""
    live.checkpoint.plan(0, *live.ends(None))
    live.put(("k0", b"w"), ("k1", b"w"), ("k0", b"x"))
    assert live.source()["lag"] == 13


def test_filters_count_only_what_matches(live: Live) -> None:
    live.committed(keys="k1,k2")
    live.put(("k1", b"w"), ("k3", b"w"), ("k3", b"x"), ("k2", b"x"))
    assert live.source()["lag"] == 2
    assert "keys=k1,k2" in live.text()


def test_sources_several(live: Live) -> None:
    name = live.stream(5)
    (kv,), (stream,) = live.ends(None), live.ends(2, stream=name)
    live.checkpoint.committed(kv, '{"logOffset": 7}', stream, "-")
    sources = live.report()["sources"]
    assert [one["stream"] for one in sources] == [f"KV_{live.bucket}", None, name, None]
    assert [one["lag"] for one in sources] == [0, None, 3, None]
    assert sources[1]["other"] == '{"logOffset": 7}'


def test_log_format_2(capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint) -> None:
    """Spark's own with ``spark.sql.streaming.offsetLog.formatVersion=2``: names, in any order."""
    checkpoint.plan(3, "1:{}", f"0:{SAMPLE_OFFSET}", version="v2")
    checkpoint.commit(3)
    first, second = inspect(capsys, checkpoint.path)["sources"]
    assert (first["source"], first["bucket"]) == ("0", "plant")
    assert second["other"] == "{}"


def test_line_endings_other(capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint) -> None:
    topic = '{"a topic\u2028and a line": {"0": 1}}'
    checkpoint.plan(0, topic, SAMPLE_OFFSET)
    first, second = inspect(capsys, checkpoint.path)["sources"]
    assert (first["other"], second["bucket"]) == (topic, "plant")


# -- streams that are not what they were --------------------------------------------------------


def test_stream_recreated(live: Live) -> None:
    live.committed()
    buckets.delete_bucket(live.url, live.bucket)
    assert "does not exist" in live.source(status=1)["problem"]
    buckets.create_bucket(live.url, live.bucket)
    source = live.source(status=1)
    assert "was deleted and re-created" in source["problem"]
    assert "failOnDataLoss=false" in source["problem"]
    assert source["lag"] is None


@pytest.mark.parametrize("committed", [False, True])
def test_stream_rolled_back(live: Live, committed: bool) -> None:
    """The checkpoint is ahead of a stream that was rolled back."""
    (end,) = live.ends(None)
    ((stream, position),) = end.streams.items()
    beyond = replace(position, stream_seq=25, initial_through=25)
    live.checkpoint.plan(0, replace(end, streams={stream: beyond}))
    if committed:
        live.checkpoint.commit(0)
    assert "was rolled back" in live.source(status=1)["problem"]


def test_stream_not_readable_any_more(live: Live) -> None:
    """One source's stream must not hide the other's."""
    name = live.stream()
    (first,), (second,) = live.ends(None, stream=name), live.ends(None)
    live.checkpoint.committed(first, second)
    config = buckets.api(live.url, f"STREAM.INFO.{name}")["config"]
    buckets.api(live.url, f"STREAM.UPDATE.{name}", {**config, "retention": "interest"})
    one, other = live.report(status=1)["sources"]
    assert "retention is 'interest'" in one["problem"]
    assert (other["problem"], other["lag"]) == (None, 0)


def test_aged_out(live: Live) -> None:
    name = live.stream(5, max_msgs=5)
    live.checkpoint.committed(*live.ends(2, stream=name))
    live.publish(name, 4)
    source = live.source(status=1)
    assert "sequences 3 to 4 aged out" in source["problem"]
    assert (source["first_seq"], source["last_seq"]) == (5, 9)


# -- what is no checkpoint, or none that can be read --------------------------------------------


def test_checkpoint_without_plan(
    capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint
) -> None:
    report = inspect(capsys, checkpoint.path)
    assert (report["planned_batch"], report["sources"]) == (None, [])
    main(["inspect", str(checkpoint.path)])
    assert "nothing was planned yet" in capsys.readouterr().out


def test_offset_invalid(capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint) -> None:
    checkpoint.plan(0, json.dumps({**json.loads(SAMPLE_OFFSET), "v": 3}), '{"other": 1}')
    first, second = inspect(capsys, checkpoint.path, status=1)["sources"]
    assert "install the version" in first["problem"]
    assert second["problem"] is None


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere", "is not a directory"),
        (".", "is not a checkpoint"),
        ("newer", "has the format 'v3'"),
        ("cut", "is missing or is not a file of an offset log"),
        ("s3://lake/checkpoint", "is not on this machine"),
    ],
)
def test_checkpoint_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str, said: str
) -> None:
    Checkpoint(tmp_path / "newer").plan(0, "{}", version="v3")
    Checkpoint(tmp_path / "cut").path.joinpath("offsets/0").write_text("")
    assert main(["inspect", where if "://" in where else str(tmp_path / where)]) == 1
    output = capsys.readouterr()
    assert said in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


def test_checkpoint_file_uri(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As Spark takes it: the path is not encoded."""
    shutil.copytree(SAMPLE, tmp_path / "a%20b?c#d")
    for slashes in ("", "//"):
        assert main(["inspect", f"file:{slashes}{tmp_path}/a%20b?c#d"]) == 0
        assert re.search(r"^query +3999df31", capsys.readouterr().out, re.M)


def test_metrics_of_checkpoint(live: Live) -> None:
    live.committed()
    live.put(("k0", b"w"), ("new", b"w"), ("k0", b"x"))
    words = ["inspect", "--prometheus", "--servers", live.url, str(live.checkpoint.path)]

    def samples(status: int = 0) -> Samples:
        assert main(words) == status
        return parsed(live.capsys.readouterr().out)

    now, state = samples(), buckets.bucket_state(live.url, live.bucket)
    of = {"source": 0, "stream": f"KV_{live.bucket}"}
    assert value(now, "offsets_behind_latest", **of) == 3
    assert value(now, "max_offsets_behind_latest", source=0) == 3
    size = 3 * state["bytes"] // state["messages"]
    assert value(now, "estimated_bytes_behind_latest", **of) == size
    assert value(now, "seconds_behind_latest", **of) == live.source()["lag_seconds"]
    assert value(now, "source_problem", **of) == 0
    buckets.delete_bucket(live.url, live.bucket)
    now = samples(status=1)
    assert value(now, "source_problem", **of) == 1
    assert "offsets_behind_latest" not in now
