"""Exit with an error if the installed package lacks its compiled modules."""

import sys

from nats_stream_source.wire import compiled_slices
from nats_stream_source.wire.codec import compiled_base64
from nats_stream_source.wire.framing import compiled_scan, scanner

for module in (compiled_scan, compiled_slices, compiled_base64):
    print(module.__file__)
if scanner.selected() != "compiled":
    sys.exit("the compiled frame scanner is not selected; unset NATS_STREAM_SOURCE_SCANNER")
