"""Exit with an error if the installation lacks the compiled modules, or packages of ``follow``.

With the argument ``follow``, for the command; else for Spark too.
"""

import sys

from nats_stream_source.delta import Follower
from nats_stream_source.wire import compiled_slices
from nats_stream_source.wire.framing import compiled_scan, scanner

if sys.argv[1:] != ["follow"]:
    from pyspark.sql.pandas.utils import require_minimum_pandas_version

    require_minimum_pandas_version()  # for `mapInArrow`, with which a query reduces a batch
for module in (sys.modules[Follower.__module__], compiled_scan, compiled_slices):
    print(module.__file__)
if scanner.selected() != "compiled":
    sys.exit("the compiled frame scanner is not selected; unset NATS_STREAM_SOURCE_SCANNER")
