"""The reader of one split: runs on an executor, anew for every attempt.

It reads the planned range with an ordered consumer of its own and yields record batches. After the
last row it asks the leader whether the stream is still the planned one: if it was made anew or cut
off meanwhile, the rows just read are not what the offsets promise, and the task fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.bucket import look_up
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.options import KvOptions
from nats_stream_source.source.continuity import Continuity
from nats_stream_source.source.planner import Plan
from nats_stream_source.source.rows import kv_rows
from nats_stream_source.source.runtime import kept_runner


def read_split(plan: Plan, options: KvOptions) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a split in the order of their revisions.

    Raises:
        DataLossError: the stream was replaced, or rows of the range were gone before they were
            read and ``failOnDataLoss`` is set.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered``.
    """
    runner = kept_runner(options.connection)
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
    with contextlib.closing(runner.iterate(reader.batches())) as batches:
        for frames in batches:
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
    runner.run(
        patiently(lambda: _verify(runner.link, plan, options), options.connection.connect_timeout)
    )


async def _verify(link: Link, plan: Plan, options: KvOptions) -> None:
    info = await look_up(JetStream(await link.connection()), plan.bucket)
    if info.created != plan.created:
        # Rows of two streams may be mixed: no setting makes them right, only a new plan does.
        raise DataLossError(
            f"stream {plan.stream} was deleted and made again (created {info.created}) while the "
            f"range ({plan.start}, {plan.end}] of {plan.created} was read. With the option "
            f"failOnDataLoss=false the restarted query goes on with the new stream"
        )
    if plan.complete_from is not None and info.first_seq > plan.complete_from:
        Continuity(options, link).aged_out(info, plan.complete_from)
