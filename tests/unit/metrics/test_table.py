"""The table of metrics, what both exporters make of it, and the life of a query's series."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import metrics as opentelemetry
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from nats_stream_source import metrics
from nats_stream_source.errors import ConfigurationError, MissingPackageError
from nats_stream_source.metrics import recorder as recorder_module
from nats_stream_source.metrics.recorder import Lag, Recorder, start_exporters
from nats_stream_source.metrics.table import (
    ACTIVE,
    DATA_LOSSES,
    FRESHNESS,
    INPUT_BYTES,
    INPUT_ROWS,
    METRICS,
    OFFSETS_BEHIND,
    PREFIX,
    REBUILDS,
    Metric,
    count,
    take,
)
from nats_stream_source.spark.progress import start_metrics
from tests.support.prometheus import close_endpoints, parsed, value


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_metric_follows_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch("[a-z]+(_[a-z]+)*", metric.name)
    assert metric.help.endswith(".")
    assert "query" not in metric.labels
    assert len(set(metric.labels)) == len(metric.labels)
    # A unit is in the name, except where Kafka's name has it elsewhere.
    if metric.unit in ("seconds", "bytes") and not metric.name.endswith("_latest"):
        assert metric.name.endswith("_" + metric.unit)
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_of_kafka_are_kept() -> None:
    for name in ("minOffsetsBehindLatest", "maxOffsetsBehindLatest", "avgOffsetsBehindLatest"):
        assert re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name) in METRICS
    assert "estimated_total_bytes_behind_latest" in METRICS


def test_exporter_has_each_metric_with_its_kind_help_and_labels() -> None:
    recorder = Recorder()
    for metric in METRICS.values():
        record = {"gauge": recorder.set, "counter": recorder.add, "histogram": recorder.observe}
        record[metric.kind](metric, 1, "q", *metric.labels)
    families = {family.name: family for family in text_string_to_metric_families(recorder.text())}
    assert len(families) == len(METRICS)  # and no family of creation times
    for metric in METRICS.values():
        family = families[PREFIX + metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        labels = {"query": "q", **{label: label for label in metric.labels}}
        assert all(labels.items() <= sample.labels.items() for sample in family.samples)


@pytest.fixture(scope="module")
def reader() -> InMemoryMetricReader:
    """OpenTelemetry's global provider, which a process sets once."""
    reader = InMemoryMetricReader()
    opentelemetry.set_meter_provider(MeterProvider([reader]))
    return reader


def test_opentelemetry_has_same_values(
    reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_recorder", None)
    recorder, _ = start_exporters(None, True)
    assert start_exporters(None, True) == (recorder, None)  # no second set of instruments
    recorder.set(OFFSETS_BEHIND, 7, "q", "0", "KV_fleet")
    recorder.add(INPUT_ROWS, 5, "q", "0")
    recorder.observe(FRESHNESS, 0.25, "q", "/lake/fleet")

    def read() -> dict[str, Any]:
        data = reader.get_metrics_data()
        assert data is not None
        return {
            metric.name.removeprefix("nats_stream_source."): (metric.unit, point)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }

    found = read()
    unit, lag = found["offsets_behind_latest"]
    assert (unit, lag.value) == ("{rows}", 7)
    assert lag.attributes == {"query": "q", "source": "0", "stream": "KV_fleet"}
    assert found["input_rows"][1].value == 5
    unit, fresh = found["freshness_seconds"]
    assert (unit, fresh.count, fresh.sum) == ("s", 1, 0.25)
    assert tuple(fresh.explicit_bounds) == FRESHNESS.buckets
    # A query's end removes its gauges here, too.
    recorder.begin("id", "run", "q")
    recorder.end("id", "run")
    assert "offsets_behind_latest" not in read()
    assert "query_active" in read()


def test_end_of_run_removes_gauges_and_keeps_counters() -> None:
    recorder = Recorder()
    label = recorder.begin("id", "run 1", "fleet")
    recorder.set(OFFSETS_BEHIND, 3, label, "0", "KV_fleet")
    recorder.add(INPUT_ROWS, 5, label, "0")
    recorder.begin("id", "run 2", "fleet")
    recorder.end("id", "run 1")  # reported after the start of the next run
    samples = parsed(recorder.text())
    assert value(samples, "offsets_behind_latest") == 3
    assert value(samples, "query_active", query="fleet") == 1
    recorder.end("id", "run 2")
    samples = parsed(recorder.text())
    assert "offsets_behind_latest" not in samples
    assert value(samples, "query_active", query="fleet") == 0
    assert value(samples, "input_rows_total", query="fleet") == 5


@pytest.mark.parametrize("end", [Recorder.set_inactive, Recorder.end])
def test_event_after_end_of_run_sets_no_gauge(end: Callable[[Recorder, str, str], None]) -> None:
    recorder = Recorder()
    label = recorder.begin("id", "run 1", "fleet")
    end(recorder, "id", "run 1")
    recorder.set_lags(label, "0", {"KV_fleet": Lag(0)})
    recorder.add(INPUT_ROWS, 5, label, "0")
    samples = parsed(recorder.text())
    assert "offsets_behind_latest" not in samples
    assert value(samples, "input_rows_total", query="fleet") == 5
    recorder.begin("id", "run 2", "fleet")
    recorder.set_lags(label, "0", {"KV_fleet": Lag(3)})
    assert value(parsed(recorder.text()), "offsets_behind_latest") == 3


def test_series_of_queries_that_ended_long_ago_are_removed() -> None:
    recorder = Recorder()
    for number in range(100):
        label = recorder.begin(f"id {number}", "run", None)
        recorder.add(INPUT_ROWS, 1, label, "0")
        recorder.end(f"id {number}", "run")
    samples = parsed(recorder.text())
    assert len(samples["input_rows_total"]) == len(samples["query_active"]) == 32
    assert value(samples, "input_rows_total", query="id 99") == 1


def test_label_of_second_query_of_name_has_its_id(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    assert recorder.begin("11111111-1", "run", "fleet") == "fleet"
    assert recorder.begin("22222222-2", "run", "fleet") == "fleet 22222222"
    assert "two queries have one name" in caplog.text
    recorder.end("11111111-1", "run")
    assert recorder.begin("33333333-3", "run", "fleet") == "fleet"


def test_merge_before_listener_is_recorded_later() -> None:
    recorder = Recorder()
    labels: list[str] = []
    recorder.when_watched("id", labels.append)
    recorder.when_watched("other", labels.append)
    assert labels == []
    recorder.begin("id", "run", "fleet")
    recorder.when_watched("id", labels.append)
    assert labels == ["fleet", "fleet"]


def test_counts_of_other_processes_get_query_and_process() -> None:
    take()
    count(REBUILDS, "KV_fleet", "gap")
    count(REBUILDS, "KV_fleet", "gap")
    count(INPUT_BYTES, "KV_fleet", amount=100)
    taken = take()
    assert take() == Counter()
    recorder = Recorder()
    recorder.add_counts(taken, "fleet", "executor")
    recorder.add_counts(Counter({("of_a_newer_version", "x"): 1}), "fleet", "executor")
    samples = parsed(recorder.text())
    labels = {"query": "fleet", "stream": "KV_fleet", "reason": "gap", "process": "executor"}
    assert samples["consumer_rebuilds_total"] == [(labels, 2)]
    assert samples["input_bytes_total"] == [({"query": "fleet", "stream": "KV_fleet"}, 100)]
    assert "data_losses_accepted_total" not in samples
    assert DATA_LOSSES.labels[-1] == "process"


def test_failure_of_source_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()

    def fail() -> None:
        raise RuntimeError("lost")

    recorder.pull(fail)
    recorder.set(ACTIVE, 1, "q")
    for _ in range(2):
        assert value(parsed(recorder.text()), "query_active") == 1
    assert caplog.text.count("metrics could not be recorded") == 1


@pytest.mark.parametrize("given", ["x", "", -1, 65536, "host:", True, 1.5, "::1"])
def test_address_that_is_invalid(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"prometheus is .*expected a port"):
        start_exporters(given, False)


@pytest.fixture
def without_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(metrics, "_recorder", None)
    monkeypatch.delitem(sys.modules, "nats_stream_source.metrics.recorder")


@pytest.mark.usefixtures("without_prometheus")
def test_metrics_without_extra() -> None:
    assert start_metrics(None, False) is None
    with pytest.raises(MissingPackageError, match=r"nats-stream-source\[metrics\]"):
        start_metrics(9464, False)


def test_opentelemetry_without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(MissingPackageError, match=r"nats-stream-source\[metrics\]"):
        start_exporters(None, True)


def test_endpoint_is_shared_and_port_in_use_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "_recorder", None)
    try:
        recorder, address = start_exporters("127.0.0.1:0", False)
        assert address is not None
        for again in ("127.0.0.1:0", 0):
            assert start_exporters(again, False)[0] is recorder
        assert [host for host, _ in recorder_module._servers] == ["127.0.0.1", "0.0.0.0"]
        port = address.rpartition(":")[2]
        assert start_exporters(f"[127.0.0.1]:{port}", False) == (recorder, None)
        assert "could not listen" in caplog.text
    finally:
        close_endpoints()
