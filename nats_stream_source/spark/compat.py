"""The features that the installed version of Spark offers to a Python data source.

=====================================  ====  ====  ====  ====
                                       4.0   4.1   4.2   4.3
=====================================  ====  ====  ====  ====
streaming and batch reads, Arrow       yes   yes   yes   yes
admission control: ``latestOffset``    no    no    yes   yes
with a start and a limit, the end
reported for the lag,
``SupportsTriggerAvailableNow``
=====================================  ====  ====  ====  ====

Detected by feature where possible, so that a vendor's Spark with other version numbers works too.
This module imports only what every supported version has.
"""

from __future__ import annotations

import importlib.util

import pyspark

from nats_stream_source.errors import OptionError
from nats_stream_source.options import CommonOptions
from nats_stream_source.options.table import setting_of

ADMISSION_CONTROL = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark passes a micro-batch's start and limit to ``latestOffset`` (since 4.2)."""


def validate_limits(options: CommonOptions, *, admission_control: bool = ADMISSION_CONTROL) -> None:
    """Raise OptionError for a limit that this Spark version would ignore."""
    if admission_control:
        return
    for name in ("maxRowsPerTrigger", "maxBytesPerTrigger", "minRowsPerTrigger"):
        if getattr(options, setting_of(name)) is not None:
            raise OptionError(
                f"could not limit micro-batches: option {name!r} needs Spark 4.2 or newer, found "
                f"{pyspark.__version__}, which does not pass limits to a Python source; remove the "
                f"option to read all available messages in each micro-batch, or use a newer Spark"
            )
