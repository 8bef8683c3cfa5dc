"""Repeat a change of a Delta table whose commit conflicts with the commit of another writer.

Delta's concurrency control is optimistic: a writer reads a version, writes data files and commits
the next version, unless another writer's commit since then may have changed what it read. Then
nothing of its change is visible, and the change must be computed again from the newer version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from nats_stream_source.errors import TableConflictError
from nats_stream_source.logs import field_logger

ATTEMPTS = 10
"""Maximum number of attempts of one change."""

_LONGEST_WAIT = 2.0  # seconds between two attempts, with jitter from 0.1 s on

_log = field_logger(__name__)
_T = TypeVar("_T")


def retry_conflicts(
    work: Callable[[], _T], table: str, conflicts: tuple[type[BaseException], ...]
) -> _T:
    """The result of ``work``, which reads the table's newest version on each attempt.

    Raises:
        TableConflictError: each of the attempts had a conflict.
    """

    def warn(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        _log.warning(
            "another writer changed the table, changing it again",
            table=table,
            attempt=state.attempt_number,
            error=first_line(state.outcome.exception()),
        )

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(conflicts),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=_LONGEST_WAIT),
        before_sleep=warn,
        reraise=True,
    )
    try:
        return retrying(work)
    except conflicts as error:
        raise TableConflictError(
            f"could not change table {table!r}: other writers committed during each of {ATTEMPTS} "
            f"attempts ({first_line(error)}); schedule other writers of this table apart from the "
            f"query, or restart the query"
        ) from error


def first_line(error: BaseException | None) -> str:
    """The first line of an error's text: Spark's and delta-rs's errors have many."""
    return str(error).strip().partition("\n")[0][:300]
