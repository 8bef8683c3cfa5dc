"""Select the frame scanner of this process, by an environment variable.

``NATS_STREAM_SOURCE_SCANNER`` is ``compiled`` or ``numpy``. Without it, the compiled one is
selected where the installation has it (``wire/scanner.py``). The first connection makes the
selection.
"""

from __future__ import annotations

import functools
import os

from nats_stream_source.logs import field_logger
from nats_stream_source.wire import scanner

SCANNER_VARIABLE = "NATS_STREAM_SOURCE_SCANNER"
"""Environment variable with the name of the scanner."""

log = field_logger(__name__)


@functools.cache
def select_frame_scanner() -> scanner.Scanner:
    """Select the scanner once, and return its name.

    Raises:
        ConfigurationError: this installation lacks the scanner that the variable names.
    """
    name = scanner.select(os.environ.get(SCANNER_VARIABLE))
    write = log.debug if name == "compiled" else log.info
    write("frame scanner selected", scanner=name)
    return name
