"""The report of data loss, for the planner on the driver and the readers on executors.

The option ``failOnDataLoss`` decides how a loss is reported: as an error that names what was lost
and the options to change, or as a warning after which the query continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats_stream_source.errors import ConsumerLimitError, DataLossError, PermissionDeniedError
from nats_stream_source.jetstream.kv.other_messages import accepts_other_subjects, count_entries
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics.counts import count
from nats_stream_source.metrics.table import DATA_LOSSES
from nats_stream_source.rows.base import FormatAdapter

if TYPE_CHECKING:
    from nats_stream_source.jetstream.api import JetStream

log = field_logger(__name__)


def report_data_loss(adapter: FormatAdapter, stream: str, observed: str, action: str) -> None:
    """Raise DataLossError, or log a warning with ``failOnDataLoss=false``.

    Args:
        observed: what was lost, and what was expected.
        action: what ``failOnDataLoss=false`` does instead, as "continue at 120".
    """
    if adapter.options.common.fail_on_data_loss:
        raise DataLossError(
            f"data loss in stream {stream}: {observed}; set failOnDataLoss=false to {action}, or "
            f"{adapter.terms.start_anew}"
        )
    count(DATA_LOSSES, stream)
    log.warning(
        f"data loss accepted: stream {stream}: {observed}; failOnDataLoss=false: {action}",
        stream=stream,
    )


async def report_aged_out(
    adapter: FormatAdapter,
    jetstream: JetStream,
    info: StreamInfo,
    first: int,
    last: int,
    count: int | None = None,
    filters: tuple[str, ...] | None = None,
) -> None:
    """Report that required messages from ``first`` to ``last`` aged out before they were read.

    With filters the subjects of the missing messages are unknown, and perhaps the filters matched
    none of them: that is a warning with any ``failOnDataLoss``. The same applies to a bucket whose
    stream has or accepts messages that are not its entries.

    Args:
        count: the number of missing messages; None for all.
        filters: the filter subjects of the read; None for those of the query's options. Filters of
            a DataFrame may select a subset of these.
    """
    terms = adapter.terms
    some = "" if count in (None, last - first + 1) else f"{count} of "
    observed = (
        f"first {terms.sequence} is {info.first_seq}, expected {first} or lower "
        f"({some}{terms.sequence}s {first} to {last} aged out; {terms.retention_hint})"
    )
    scope = adapter.read_scope(await adapter.completed(jetstream, info))
    names = adapter.user_filters if scope.effective_filters else ()
    if filters is not None and filters != scope.filters:
        names = tuple(subject.removeprefix(scope.prefix) for subject in filters)
    if names:
        unknown = f"whether {terms.filter_option}={','.join(names)} matched any of them is unknown"
    elif scope.prefix and await _has_other_messages(jetstream, info, scope.prefix):
        unknown = "whether any of them was an entry of the bucket is unknown"
    else:
        report_data_loss(adapter, info.name, observed, f"continue at {info.first_seq}")
        return
    log.warning(f"messages of stream {info.name} aged out: {observed}; {unknown}", stream=info.name)


async def _has_other_messages(jetstream: JetStream, info: StreamInfo, prefix: str) -> bool:
    if accepts_other_subjects(info.config, prefix):
        return True
    try:
        _, others = await count_entries(jetstream, info, prefix)
    except (PermissionDeniedError, ConsumerLimitError):
        return False
    return others > 0
