"""pytest as a Spark driver: what ``spark-submit`` starts. The arguments are pytest's."""

import sys

import pytest

# First, from the archive on the path: pytest puts the checkout in front of it.
import nats_stream_source  # noqa: F401

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
