"""The reader of one split: runs on an executor, anew for every attempt.

It reads the planned range with an ordered consumer of its own and yields record batches; a range of
a few sequences without one, where that is cheaper (``source.small_range``). After the last message
it asks the leader whether the stream is still the planned one: if it was made anew or cut off
meanwhile, the rows just read are not what the offsets promise, and the task fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import pyarrow as pa

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.bucket import look_up
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.options import KvOptions
from nats_stream_source.source.continuity import Continuity
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.rows import kv_rows
from nats_stream_source.source.runtime import Runner, kept_runner
from nats_stream_source.source.small_range import small_range
from nats_stream_source.wire.frames import Frames


def read_split(plan: Plan, options: KvOptions) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a split in the order of their revisions.

    Raises:
        DataLossError: the stream was replaced, or rows of the range were gone before they were
            read and ``failOnDataLoss`` is set.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered``.
    """
    runner = kept_runner(options.connection)
    if (small := runner.run(_small(runner.link, plan, options))) is not None:
        frames, info = small
        _check(info, runner.link, plan, options)
        yield from _rows(frames, plan, options)
        return
    with contextlib.closing(_consume(runner, plan, options)) as batches:
        for frames in batches:
            yield from _rows(frames, plan, options)
    info = runner.run(
        patiently(lambda: _look(runner.link, plan), options.connection.connect_timeout)
    )
    _check(info, runner.link, plan, options)


def _consume(runner: Runner, plan: Plan, options: KvOptions) -> Generator[Frames, None, None]:
    """The messages of the range, from an ordered consumer."""
    reader = OrderedReader(
        runner.link,
        RangeRequest(
            stream=plan.stream,
            created=plan.created,
            start=plan.start,
            end=plan.end,
            filters=plan.filters,
            last_per_subject=plan.last_per_subject,
            headers_only=options.meta_only,
        ),
    )
    return runner.iterate(reader.batches())


def _rows(frames: Frames, plan: Plan, options: KvOptions) -> Iterator[pa.RecordBatch]:
    """Their rows, if there are any."""
    if not len(frames):
        return
    rows = kv_rows(
        frames,
        bucket=plan.bucket,
        prefix=plan.prefix,
        stream_created=plan.created,
        initial_through=plan.initial_through,
        meta_only=options.meta_only,
        ignore_deletes=options.ignore_deletes,
    )
    if rows.num_rows:
        yield rows


async def _small(link: Link, plan: Plan, options: KvOptions) -> tuple[Frames, StreamInfo] | None:
    jetstream = JetStream(await link.connection())
    return await small_range(jetstream, plan, headers_only=options.meta_only)


async def _look(link: Link, plan: Plan) -> StreamInfo:
    return await look_up(JetStream(await link.connection()), plan.bucket)


def _check(info: StreamInfo, link: Link, plan: Plan, options: KvOptions) -> None:
    if info.created != plan.created:
        # Rows of two streams may be mixed: no setting makes them right, only a new plan does.
        raise DataLossError(
            f"stream {plan.stream} was deleted and made again (created {info.created}) while the "
            f"range ({plan.start}, {plan.end}] of {plan.created} was read. With the option "
            f"failOnDataLoss=false the restarted query goes on with the new stream"
        )
    if plan.complete_from is not None and info.first_seq > plan.complete_from:
        Continuity(options, link).aged_out(info, plan.complete_from)
