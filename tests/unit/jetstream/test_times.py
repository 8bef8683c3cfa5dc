"""Times as the API writes them: RFC 3339 with nanoseconds."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.errors import ConfigurationError, ProtocolError
from nats_stream_source.jetstream.times import nanoseconds, rfc3339


@pytest.mark.parametrize(
    ("when", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1, "1970-01-01T00:00:00.000000001Z"),
        (1_500_000_000, "1970-01-01T00:00:01.5Z"),
        (-1, "1969-12-31T23:59:59.999999999Z"),
        ("2026-11-21T05:04:14.120+01:00", "2026-11-21T04:04:14.12Z"),
        (datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2))), "2025-12-31T22:00:00Z"),
        (datetime(2026, 1, 1, 0, 0, 0, 7, timezone.utc), "2026-01-01T00:00:00.000007Z"),
    ],
)
def test_time_of_server_is_parsed(when: str | int | datetime, text: str) -> None:
    assert rfc3339(when) == text


@given(st.integers(0, 4 * 10**18))
def test_time_roundtrip(when: int) -> None:
    assert nanoseconds(rfc3339(when)) == when
    assert rfc3339(rfc3339(when)) == rfc3339(when)


def test_time_invalid() -> None:
    with pytest.raises(ProtocolError):
        rfc3339("yesterday")
    with pytest.raises(ConfigurationError, match="time zone"):
        rfc3339(datetime(2026, 1, 1))
