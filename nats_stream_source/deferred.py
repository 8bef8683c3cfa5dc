"""Names of a package whose modules are imported when a name is first used.

Spark starts several processes for a query, which need few modules. Each of them would spend time on
the import of all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def deferred(package: str, modules: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """``__all__`` and ``__getattr__`` of a package.

    Args:
        modules: the names that a module has, by the module's name below ``nats_stream_source``.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"nats_stream_source.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(module_of), load
