"""Select the frame scanner of this process, by an environment variable.

``NATS_STREAM_SOURCE_SCANNER`` is ``compiled`` or ``python``. Without it, the compiled one is
selected where the installation has it (``wire/framing/scanner.py``), else the one in Python with a
warning. The first connection makes the selection.
"""

from __future__ import annotations

import functools
import os

from nats_stream_source.logs import field_logger
from nats_stream_source.wire.framing import scanner

SCANNER_VARIABLE = "NATS_STREAM_SOURCE_SCANNER"
"""Environment variable with the name of the scanner."""

log = field_logger(__name__)


@functools.cache
def select_frame_scanner() -> scanner.Scanner:
    """Select the scanner once, and return its name.

    Raises:
        ConfigurationError: this installation lacks the scanner that the variable names.
    """
    wanted = os.environ.get(SCANNER_VARIABLE)
    name = scanner.select(wanted)
    log.debug("frame scanner selected", scanner=name)
    if name == "python" and not wanted:
        log.warning(
            "the compiled frame scanner is missing",
            scanner=name,
            action="install a wheel of this platform, or a C compiler and then the package again",
        )
    return name
