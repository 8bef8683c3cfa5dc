"""``python -m tests.support.proxy --help``."""

from __future__ import annotations

import sys

from tests.support.proxy.command import main

if __name__ == "__main__":
    sys.exit(main())
