"""A bucket as it was at a revision, as far as its history reaches.

The state at revision ``end`` is each key's last entry up to there. Of what is still in the stream
that is easy to say: history drops a key's oldest revisions first, so the last one up to ``end``
that is there was the last one ever. Where the bucket keeps one revision of a key, all that lies up
to ``end`` are such entries. Else the range is read twice: first without values, to know which
sequences are a key's last, then those.

What is not there any more is the other half:

- A key all of whose revisions are later than ``end`` was made later, or its entry of that time was
  dropped. It was made later if it has fewer revisions than the bucket keeps, so that none was ever
  dropped, and the first of them did not roll others up (a PURGE). Else nobody knows.
- A key that was written while it was read may lose the very revision that was to come. Then it is
  missing from the second reading, or from the first, and the leader's list of keys shows it.
- What a limit removed (``max_age``, a TTL, ``max_bytes``) leaves no trace: whether there was
  anything, can be told only where no sequence is missing at all.

Each of these is a data loss: an error that names the keys, or with ``failOnDataLoss=false`` a
warning, and no row. What somebody removed through the stream's API (a purge, a deleted message) is
not noticed, nor a history that was shorter in former times.

The keys that were made later, or may have been, are found in what follows the range
(``source.tail``). If nothing was written while that was read, its first message and the number of
revisions of each key are those of one moment, and that decides. Else the leader is asked for each
of these keys, and the order of questions matters, since revisions go away at any time: a count of
revisions below the limit proves that none was dropped *until then*, so it is asked for after the
first revision.

All that comes before the second reading, where there is one: a query that takes only a few rows
must not miss the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.stored import listed_subjects, most_at_once
from nats_stream_source.jetstream.subjects import is_literal
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.jetstream.together import together
from nats_stream_source.logs import field_logger
from nats_stream_source.source.batch_plan import BatchPlan, removed_by
from nats_stream_source.source.query import Query
from nats_stream_source.source.reader import consume, rows_of
from nats_stream_source.source.runtime import Runner, kept_runner
from nats_stream_source.source.subjects_seen import SubjectsSeen
from nats_stream_source.source.tail import Tail, as_many
from nats_stream_source.wire.columns import ack_tokens, header_blocks, subjects
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.headers import MARKER_REASON

_MOST_ROWS = 1 << 20  # of revisions whose keys are kept before only one of each key is
_MOST_NAMED = 10

# In the header block of a message that stands for others which were removed.
_REPLACES = tuple(f"\r\n{name}:".encode() for name in ("Nats-Rollup", MARKER_REASON))
_NO_LATE = pa.schema(
    [("name", pa.string()), ("replaces", pa.bool_()), ("count", pa.int64())]
).empty_table()

log = field_logger(__name__)


def read_as_of(task: BatchPlan, query: Query) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the order of their revisions.

    Raises:
        DataLossError: a key's entry of that time is gone, or may be, and ``failOnDataLoss`` is set;
            the stream was replaced or set back while it was read.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered``.
    """
    plan, runner, seen = task.plan, kept_runner(query.connection), SubjectsSeen()
    if task.history == 1:
        with contextlib.closing(consume(runner, plan, query)) as batches:
            for frames in batches:
                if len(frames):
                    seen.add(subjects(frames))
                yield from rows_of(frames, plan, query)
        _check(runner, task, query, seen)
        return
    last = _LastOfEach()
    with contextlib.closing(consume(runner, plan, query, headers_only=True)) as batches:
        for frames in batches:
            last.add(frames)
    last.choose()
    seen.add(last.names)
    tail = _check(runner, task, query, seen)
    if not last.names:
        return
    # A revision may have been chosen only since its successors, up to the point, were gone before
    # their turn came: it is gone by now as well, and reported.
    with contextlib.closing(consume(runner, plan, query)) as batches:
        for frames in batches:
            yield from rows_of(last.chosen(frames), plan, query)
    tail.look()
    _report(task, query, last.gone(), [])


def _check(runner: Runner, task: BatchPlan, query: Query, seen: SubjectsSeen) -> Tail:
    """Report it if the subjects that were seen may not be all that had a message at ``end``.

    Returns:
        What followed the range, for a last look.
    """

    def complete(info: StreamInfo) -> bool:
        return _whole(info) or as_many(task, info, len(seen))

    tail, late = Tail(runner, task, query), _Late(seen)
    for frames in tail.frames(complete, headers_only=True):
        late.add(frames)
    unknown: list[str] = []
    if not complete(tail.info):
        if tail.settled and tail.stretches <= 1:
            unknown = late.unknown(task.history)
        else:
            names = None if not tail.settled else late.names()

            async def ask() -> list[str]:
                return await _unknown(await runner.link.jetstream(), task, seen, names)

            unknown = runner.patiently(ask)
    removed = _removed_without_a_trace(tail.info)
    # Where nothing was later than the point, what was removed before the plan is not of that state;
    # and nothing was removed since if as many subjects came as there were. Of some keys only, the
    # number is not known: but limits remove the oldest messages first.
    if task.subjects is None:
        all_came = tail.info.first_seq == task.first_seq and "TTLs" not in removed
    else:
        all_came = task.subjects == len(seen)
    _report(task, query, unknown, [] if task.newest and all_came else removed)
    return tail


class _Late:
    """What follows the range, of subjects that were not seen in it."""

    def __init__(self, seen: SubjectsSeen) -> None:
        self._seen = seen
        self._parts: list[pa.Table] = []
        self._rows = 0

    def add(self, frames: Frames) -> None:
        """The next messages."""
        if not len(frames):
            return
        names, blocks = subjects(frames), header_blocks(frames)
        replaces = pc.or_(*(pc.match_substring(blocks, mark) for mark in _REPLACES))
        count = pa.repeat(pa.scalar(1, pa.int64()), len(frames))
        part = pa.table({"name": names, "replaces": replaces, "count": count})
        self._parts.append(part.filter(self._seen.unseen(names)))
        self._rows += self._parts[-1].num_rows
        if self._rows > _MOST_ROWS:
            self._parts, self._rows = [self._table()], 0

    def _table(self) -> pa.Table:
        table = pa.concat_tables(self._parts) if self._parts else _NO_LATE
        grouped = table.group_by("name").aggregate([("replaces", "max"), ("count", "sum")])
        return grouped.rename_columns(["name", "replaces", "count"])

    def names(self) -> list[str]:
        """The subjects."""
        names: list[str] = self._table()["name"].to_pylist()
        return names

    def unknown(self, history: int) -> list[str]:
        """Those that may have had earlier messages, if what was added is all there is of them."""
        table = self._table()
        unknown = table["replaces"]
        if history > 0:
            unknown = pc.or_(unknown, pc.greater_equal(table["count"], history))
        names: list[str] = table["name"].filter(unknown).to_pylist()
        return names


class _LastOfEach:
    """The last sequence of each subject, and which of these came again.

    Attributes:
        names: the subjects, once they are chosen.
    """

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self._rows = 0
        self.names: pa.Array = pa.array([], pa.string())
        self._sequences: NDArray[np.int64] = np.zeros(0, np.int64)
        self._came: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def add(self, frames: Frames) -> None:
        """The next messages."""
        if not len(frames):
            return
        columns = {"name": subjects(frames), "seq": pa.array(ack_tokens(frames).stream_seq)}
        self._parts.append(pa.table(columns))
        self._rows += len(frames)
        if self._rows > _MOST_ROWS:
            self._reduce()

    def _reduce(self) -> pa.Table:
        if not self._parts:
            return pa.table({"name": self.names, "seq": pa.array(self._sequences)})
        last = pa.concat_tables(self._parts).group_by("name").aggregate([("seq", "max")])
        self._parts = [last.rename_columns(["name", "seq"])]
        self._rows = 0
        return self._parts[0]

    def choose(self) -> None:
        """That was all."""
        table = self._reduce().sort_by("seq").combine_chunks()
        self._parts.clear()
        self.names = table["name"].combine_chunks()
        self._sequences = table["seq"].to_numpy()
        self._came = np.zeros(len(table), np.bool_)

    def chosen(self, frames: Frames) -> Frames:
        """Those of ``frames`` that are their subject's last."""
        sequences = ack_tokens(frames).stream_seq
        places = np.searchsorted(self._sequences, sequences)
        within = places < len(self._sequences)
        mask = within & (self._sequences[np.where(within, places, 0)] == sequences)
        self._came[places[mask]] = True
        return frames.select(mask)

    def gone(self) -> list[str]:
        """The subjects whose last message did not come again."""
        names: list[str] = self.names.filter(pa.array(~self._came)).to_pylist()
        return names


async def _unknown(
    jetstream: JetStream, task: BatchPlan, seen: SubjectsSeen, names: list[str] | None
) -> list[str]:
    """Those of ``names`` that may have had a message at ``end``.

    Args:
        names: subjects that were not seen; None for all of them.
    """
    plan, history = task.plan, task.history
    if names is None:
        names = seen.missing(await listed_subjects(jetstream, plan.stream, plan.filters))

    async def made_later(name: str) -> bool:
        if not is_literal(name):
            return False  # others would be given for it
        first = await jetstream.message(plan.stream, seq=1, next_by_subj=name)
        if first is None or first.seq <= plan.end or any(m in first.headers for m in _REPLACES):
            return False
        if history < 1:
            return True
        counts = await jetstream.subject_counts(plan.stream, name)
        return counts.get(name, history) < history

    made = await together(made_later, names, most_at_once(jetstream))
    return [name for name, later in zip(names, made, strict=True) if not later]


def _whole(info: StreamInfo) -> bool:
    """Whether no message of the stream is gone."""
    return info.messages == info.last_seq


def _removed_without_a_trace(info: StreamInfo) -> list[str]:
    """What may have removed entries, in words; nothing where none is gone."""
    if _whole(info):
        return []
    reasons = list(removed_by(info.config))
    now = info.now and nanoseconds(info.now)
    young = now and now - nanoseconds(info.created) < (info.config.get("max_age") or 0)
    if "max_age" in reasons and young:
        reasons.remove("max_age")  # the stream has lost nothing by it yet
    # The other two take the oldest messages first, a TTL any.
    return reasons if info.first_seq > 1 else [one for one in reasons if one == "TTLs"]


def _report(
    task: BatchPlan, query: Query, unknown: Sequence[str], removed_by: Sequence[str]
) -> None:
    """Raise DataLossError, or warn, when something is not known."""
    plan, what = task.plan, []
    if unknown:
        names = sorted(name[len(plan.prefix) :] for name in unknown)
        listed = ", ".join(repr(name) for name in names[:_MOST_NAMED])
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        kept = "" if task.history < 1 else f", of which the bucket keeps {task.history} a key"
        what.append(
            f"the entries of {len(names)} keys ({listed}{more}) were replaced by later "
            f"revisions{kept}"
        )
    if removed_by:
        what.append(f"entries may have been removed without a trace ({', '.join(removed_by)})")
    if not what:
        return
    text = f"stream {plan.stream} as of {query.words.sequence} {plan.end}: {'; '.join(what)}"
    if query.reading.fail_on_data_loss:
        raise DataLossError(
            f"{text}. The option failOnDataLoss=false leaves out what is not known; a deeper "
            f"history of the bucket, without limits, keeps more"
        )
    log.warning(f"data loss accepted: {text}; failOnDataLoss=false", stream=plan.stream)
