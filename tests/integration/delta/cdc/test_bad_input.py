"""Rules and batches that are refused, with both tables unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.delta import merge_changes
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.merge_model import EventFrame, Merge, by_driver, spark_in_faults
from tests.integration.delta.table_content import columns_of, versions
from tests.support.cdc.events import RULES, Event

pytestmark = [pytest.mark.delta]
ONE = [Event("a", 1, "U", 1, "x")]


@by_driver
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sequence_by": "nothing + 1"}, "sequence_by or apply_as_deletes is invalid"),
        ({"sequence_by": "map(seq, seq)"}, "MAP<BIGINT,BIGINT>, which cannot be ordered"),
        ({"apply_as_deletes": "seq + 1"}, "apply_as_deletes is invalid .*BIGINT"),
    ],
)
def test_rules_that_do_not_fit_batch_are_refused(
    merge_events: Merge, table: Path, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigurationError, match=error):
        merge_events(ONE, **arguments)
    assert not table.exists()


@by_driver
def test_excluded_column_can_have_reserved_name(
    event_frame: EventFrame, table: Path, merge: Merge
) -> None:
    batch = event_frame(ONE).withColumnRenamed("op", "__delete")
    arguments = {**RULES, "apply_as_deletes": "__delete = 'D'", "except_column_list": ["__delete"]}
    merge(batch, str(table), **arguments)
    assert columns_of(table, "key", "a") == [("a", 1)]


@spark_in_faults
def test_null_in_first_batch_leaves_no_tables_and_in_later_one_changes_nothing(
    event_frame: EventFrame, merge_events: Merge, table: Path
) -> None:
    null: Any = None
    bad = [Event("b", null, "U", 2, "y"), Event("b", 6, "U", 2, "y")]
    error = "1 events have a null .* has key='b', .*None"
    with pytest.raises(ConfigurationError, match=error):
        merge_events(bad, stored_as_scd_type=2)
    assert list(table.parent.iterdir()) == []
    merge_events(ONE, stored_as_scd_type=2)
    before = versions(table)
    with pytest.raises(ConfigurationError, match=error):
        merge_events([Event("a", 2, "U", 2, "y"), *bad], stored_as_scd_type=2)
    assert versions(table) == before
    assert columns_of(table, "key", "seq") == [("a", 1)]


@pytest.mark.parametrize("scd_type", [1, 2])
@spark_in_faults
def test_equal_sequences_with_other_values_are_counted_and_warned_of_once(
    event_frame: EventFrame,
    table: Path,
    caplog: pytest.LogCaptureFixture,
    engine: Any,
    scd_type: int,
) -> None:
    rules = {**RULES, "engine": engine, "stored_as_scd_type": scd_type}
    merger = merge_changes(str(table), **rules)
    one, other, less = (Event("a", 1, "U", a, "x") for a in (1, 2, 0))
    for batch, counted in (([one, one], 0), ([one, other], 1), ([less], 2)):
        merger(event_frame(batch))
        assert merger.contradictions == counted
    assert columns_of(table, "key", "a") == [("a", 2)]
    warning = "events of one key and sequence have different values"
    assert caplog.text.count(warning) == 1
