"""Classification of query failures by their last exception."""

from __future__ import annotations

import traceback

import pytest

from nats_stream_source import errors
from tests.support.oracle.query_failures import DATA_LOSS, UNEXPECTED, WORKER_START, kind_of


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (errors.DataLossError("gone"), DATA_LOSS),
        (errors.ApiError("X: no leader (code 503, err_code 10008)"), "ApiError"),
        (ValueError("DataLossError: ConnectError: x"), UNEXPECTED),
    ],
)
def test_last_exception_determines_kind(last: Exception, kind: str) -> None:
    try:
        try:
            raise errors.ConnectError("no server of nats://127.0.0.1:1")
        except errors.ConnectError:
            raise last  # noqa: B904  (the test requires an implicit exception context)
    except Exception:
        text = traceback.format_exc()
    assert "ConnectError" in text
    query = "\n=== Streaming Query ===\nTraceback (most recent call last):\nKeyError: 1\n"
    assert kind_of(text + query) == kind


def test_worker_start_timeout_of_spark() -> None:
    text = (
        "Job aborted due to stage failure: Task 0 in stage 5.0 failed 3 times, most recent: "
        "org.apache.spark.SparkException: Python worker failed to connect back.\n\tat org.apache"
    )
    assert kind_of(text) == WORKER_START
