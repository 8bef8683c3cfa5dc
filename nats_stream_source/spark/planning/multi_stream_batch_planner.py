"""The planner of a batch of several streams. It runs on the driver.

The batch reads each stream as one list of streams reports it (``spark.planning.stream_states``):
``spark.planning.batch_planner`` plans the splits of each, and ``spark.planning.range_shares``
groups them, so that a task reads several small streams one after the other over one connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.spark.formats.factory import format_adapter
from nats_stream_source.spark.formats.splits import BatchSplit
from nats_stream_source.spark.planning.batch_planner import BatchPlanner
from nats_stream_source.spark.planning.leader import MAX_STREAMS, validate_filters
from nats_stream_source.spark.planning.range_shares import group_splits
from nats_stream_source.spark.planning.stream_states import StreamStates


class MultiStreamBatchPlanner:
    """Plans one batch of several streams.

    Args:
        cores: the number of tasks that run in parallel; by default the driver's cores.
    """

    def __init__(
        self,
        options: KvOptions | StreamOptions,
        connection: ReusableConnection,
        *,
        cores: int | None = None,
    ) -> None:
        self._options = options
        self._connection = connection
        self._adapter = format_adapter(options)
        self._states = StreamStates(self._adapter, connection, time.monotonic)
        self._cores = cores or os.cpu_count() or 1
        self._min_partitions = options.common.min_partitions or 1

    async def tasks(self) -> list[tuple[BatchSplit, ...]]:
        """The splits by the task that reads them; an empty list for an empty batch.

        Raises:
            BucketNotFoundError, StreamNotFoundError: a listed name does not exist.
            ConfigurationError: no stream has or accepts a message that a filter matches.
            OptionError, DataLossError: as :class:`BatchPlanner`; the error names the stream.
        """
        infos = await self._states.poll(())
        await self._states.check_listed(infos)
        planners = {
            name: BatchPlanner(self._options, self._connection, name, cores=self._cores)
            for name in infos
        }
        for name, info in infos.items():
            planners[name].leader.accept(info)
        await validate_filters([planner.leader for planner in planners.values()])
        total = max(1, sum(info.messages for info in infos.values()))

        async def plan(name: str) -> list[BatchSplit]:
            min_splits = max(1, self._min_partitions * infos[name].messages // total)
            return await planners[name].splits_of(infos[name], min_splits)

        planned = await gather_limited(plan, list(infos), MAX_STREAMS)
        splits = [split for of_stream in planned for split in of_stream]
        if not splits:
            return []
        weights = [_rows(split, infos) for split in splits]
        groups = group_splits(weights, at_least=self._min_partitions, cores=self._cores)
        return [tuple(splits[index] for index in group) for group in groups]


def _rows(split: BatchSplit, infos: Mapping[str, StreamInfo]) -> int:
    """The number of messages of a split, if the stream has them at equal distances."""
    info = infos[split.split.stream]
    sequences = max(1, info.last_seq - info.first_seq + 1)
    of_split = split.split.end - max(split.split.start, info.first_seq - 1)
    return max(0, info.messages * min(of_split, sequences) // sequences)
