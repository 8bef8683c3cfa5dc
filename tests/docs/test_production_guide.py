"""docs/production.md: a section for each alert, and names that exist."""

from __future__ import annotations

import re

import yaml

from nats_stream_source import errors
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/production.md").read_text()


def test_alerts_of_page_are_alerts_of_rules() -> None:
    (group,) = yaml.safe_load((ROOT / "examples/monitoring/rules.yml").read_text())["groups"]
    alerts = [rule["alert"] for rule in group["rules"] if "alert" in rule]
    sections = PAGE.partition("\n## Alerts\n")[2]
    assert re.findall(r"^### (\w+)$", sections, re.MULTILINE) == alerts
    metrics = (ROOT / "docs/operations.md").read_text()
    for name in re.findall(r"\bnats_stream_source_\w+", PAGE):
        assert f"`{name}`" in metrics


def test_names_of_page_exist() -> None:
    for name in re.findall(r"`(\w+Error)`", PAGE):
        assert hasattr(errors, name)
    table = PAGE.partition("| `reason` | what to do |")[2].partition("\n\n")[0]
    reasons = set(re.findall(r"`([a-z ]+)`", table))
    assert reasons == {reason.value for reason in Rebuild}
