"""Marks that carry the settings of fixtures, such as ``@pytest.mark.cluster(lines=True)``."""

from __future__ import annotations

from typing import Any

import pytest


def mark_settings(node: pytest.Item | pytest.Collector, name: str) -> dict[str, Any]:
    """Return the keyword arguments of the marks ``name`` of a test and of its module.

    An argument of the test's mark overrides that of the module's mark.
    """
    settings: dict[str, Any] = {}
    for mark in reversed(list(node.iter_markers(name))):
        settings.update(mark.kwargs)
    return settings
