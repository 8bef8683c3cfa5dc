"""``python -m nats_stream_source``: the command line, if its script is not on the PATH."""

import sys

from nats_stream_source.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
