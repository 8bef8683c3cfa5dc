"""conformance.md names, for each rule, tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

TEXT = (ROOT / "docs/internals/conformance.md").read_text()
RULES = re.findall(r"^\| (.*) \| (.*) \|$", TEXT, re.MULTILINE)
RULES = [rule for rule in RULES if rule[0] not in ("rule", "---")]


def test_documents_have_rules() -> None:
    parts = re.findall(r"^## (ADR-\d+) ", TEXT, re.MULTILINE)
    assert parts == ["ADR-31", "ADR-53", "ADR-15", "ADR-8", "ADR-19"]
    assert len(RULES) > 70


@pytest.mark.parametrize(("rule", "shown_by"), RULES, ids=lambda text: text[:40])
def test_rule_names_tests(rule: str, shown_by: str) -> None:
    tests = re.findall(r"`([\w/]+\.py)`", shown_by)
    # A rule that is not kept by anything needs its reason.
    assert any(not name.startswith("unit/") for name in tests) or "*Not kept*" in rule
    assert [name for name in tests if not (ROOT / "tests" / name).exists()] == []
