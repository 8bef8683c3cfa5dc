"""AUTO CDC of Spark's declarative pipelines, into Iceberg, beside merges of this package."""

_VERSION = ("key", "__START_AT", "__END_AT", "seq", "a", "b")
COLUMNS = {
    "scd1": ("key", "seq", "a", "b"),
    "scd2_track_a_b": _VERSION,
    "scd2_track_a": _VERSION,
}
"""The tables of ``flows.py``, and the columns that are compared."""
