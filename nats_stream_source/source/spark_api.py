"""What the Spark that is installed offers to a Python data source.

=====================================  ====  ====  ====  ====
                                       4.0   4.1   4.2   4.3
=====================================  ====  ====  ====  ====
streaming and batch reads, Arrow       yes   yes   yes   yes
``pushFilters``, ``Filter``            no    yes   yes   yes
admission control: ``latestOffset``    no    no    yes   yes
with a start and a limit, the end
reported for the lag,
``SupportsTriggerAvailableNow``
=====================================  ====  ====  ====  ====

Asked by feature where it can be, so that a vendor's Spark with other version numbers is taken for
what it can do. Nothing here imports what an older Spark does not have.
"""

from __future__ import annotations

import importlib.util

import pyspark
from pyspark.sql.datasource import DataSourceReader

from nats_stream_source.errors import OptionError
from nats_stream_source.options import Reading

ADMISSION_CONTROL = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark gives a micro-batch's start and limit to ``latestOffset`` (since 4.2)."""


def check_limits(reading: Reading, *, admission_control: bool = ADMISSION_CONTROL) -> None:
    """Raise OptionError for a limit that this Spark cannot keep: it would read everything."""
    if admission_control:
        return
    for name, value in (
        ("maxRowsPerTrigger", reading.max_rows),
        ("maxBytesPerTrigger", reading.max_bytes),
    ):
        if value is not None:
            raise OptionError(
                f"option {name!r} needs Spark 4.2 or newer, this is {pyspark.__version__}: it "
                f"gives a Python source no limit, and each micro-batch is all that there is. "
                f"Leave the option out, or use a newer Spark"
            )


def check_pushdown(
    reading: Reading, *, pushdown: bool = hasattr(DataSourceReader, "pushFilters")
) -> None:
    """Raise OptionError for ``filterPushdown`` where Spark has no filters for a Python source."""
    if reading.filter_pushdown and not pushdown:
        raise OptionError(
            f"option 'filterPushdown' needs Spark 4.1 or newer, this is {pyspark.__version__}: it "
            f"tells a Python source nothing of a query's filters. Leave the option out: the rows "
            f"are the same"
        )
