"""The dashboard, the rules and the alerts of ``examples/monitoring``."""

from __future__ import annotations

import re
import sys

import yaml

from nats_stream_source.metrics.table import METRICS, PREFIX
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.prometheus import DASHBOARD, MONITORING, needs_prometheus, panel_queries, rules


def test_dashboard_is_written_by_its_script() -> None:
    done = ran(sys.executable, MONITORING / "dashboard.py")
    assert (done.stdout, done.stderr) == (DASHBOARD.read_text(), "")


def test_dashboard_and_rules_name_metrics_of_table() -> None:
    names = {one.full_name: one.kind for one in METRICS.values()}
    suffixes = {"counter": {""}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}
    known = {name + suffix for name, kind in names.items() for suffix in suffixes[kind]}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [*panel_queries().values(), *(rule["expr"] for rule in rules())]
    for expression in expressions:
        used = set(re.findall(rf"(?<![:\w]){PREFIX}\w+", expression))
        assert used <= known, expression
        assert set(re.findall(r"\w+:\w+(?::\w+)?", expression)) <= recorded


@needs_prometheus
def test_rules_of_promtool() -> None:
    ran("promtool", "test", "rules", "rules_test.yml", cwd=MONITORING)
    tested = set(re.findall(r"alertname: (\w+)", (MONITORING / "rules_test.yml").read_text()))
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}


def test_configuration_names_port_of_documentation() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9464"]}]
    assert "prometheus=9464" in (ROOT / "docs" / "operations.md").read_text()
