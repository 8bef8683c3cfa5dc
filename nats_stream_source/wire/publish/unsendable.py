"""What a sink does with headers that cannot be sent; here, since options do not import Arrow."""

from __future__ import annotations

from enum import Enum


class Unsendable(Enum):
    """What to do with a header whose name or value cannot be sent unchanged."""

    FAIL = "fail"
    SKIP = "skip"
    ENCODE = "encode"
