"""pytest as a Spark driver: what ``spark-submit`` starts. The arguments are pytest's."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
