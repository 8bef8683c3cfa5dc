"""The fault proxy, by the name that tests know it by: see ``faults/proxy.py``."""

from __future__ import annotations

from faults.proxy import Proxy, Verdict, is_delivery, is_status, with_header

__all__ = ["Proxy", "Verdict", "is_delivery", "is_status", "with_header"]
