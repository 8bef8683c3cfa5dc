"""Exit with an error if the installation lacks the compiled modules, or packages of ``follow``."""

import sys

from pyspark.sql.pandas.utils import require_minimum_pandas_version

import nats_stream_source.delta
from nats_stream_source.wire import compiled_slices
from nats_stream_source.wire.framing import compiled_scan, scanner

require_minimum_pandas_version()  # for `mapInArrow`, with which `follow` reduces a batch
for module in (nats_stream_source.delta, compiled_scan, compiled_slices):
    print(module.__file__)
if scanner.selected() != "compiled":
    sys.exit("the compiled frame scanner is not selected; unset NATS_STREAM_SOURCE_SCANNER")
