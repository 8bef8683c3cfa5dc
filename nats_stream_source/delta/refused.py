"""What the engines refuse: one table of table features, types, names and paths, and its look-up.

A rare situation is refused by a named error before anything is written. Each row has the engine
that refuses it, the reason, and what to do. With ``engine="auto"``, a row of the driver makes Spark
change the table; a row of both engines is an error. ``docs/reference/refusals.md`` is generated
from :data:`REFUSED`.

The lists were tried with deltalake 1.6.6 and Delta Lake 4.4, by
``tests/integration/delta/test_refused.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from nats_stream_source.delta.schema import declared_length, is_opaque, sql_type
from nats_stream_source.errors import ConfigurationError

DELETION_VECTORS = "delta.enableDeletionVectors"
"""The table property with which writers may write deletion vectors."""

By = Literal["driver", "spark", "both"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A situation that an engine refuses.

    Attributes:
        kind: what it is found in.
        name: of the feature, property, type or character; ``*`` is any other one.
        by: the engine that refuses it.
        reason: for the error; ``{0}`` is the value or column that was found.
        action: what to do instead of the engine.
    """

    kind: str
    name: str
    by: By
    reason: str
    action: str = "engine='spark'"


FEATURE, PROPERTY, COLUMN, PARTITION, PATH, FILE, STORE = (
    *("table feature", "table property", "column", "partition column"),
    *("path", "data file", "storage option"),
)

PATH_CHARACTERS = r"%41 [ ] | ^ \ control characters; in a URI also ? #"

_UNMERGED = "cast the column to STRING, or leave it out of the batch"
_NEW_TABLE = "replay the events into a table without it"

REFUSED = (
    Refusal(FEATURE, "*", "driver", "the table has a feature that the driver lacks ({0})"),
    Refusal(
        PROPERTY, "delta.appendOnly=true", "both", "the table is append-only ({0})", "unset it"
    ),
    Refusal(
        PROPERTY, "delta.enableChangeDataFeed=true", "driver", "the table has a change feed ({0})"
    ),
    Refusal(
        PROPERTY, "delta.columnMapping.mode=id", "driver", "the table has column mapping ({0})"
    ),
    Refusal(
        PROPERTY, "delta.columnMapping.mode=name", "driver", "the table has column mapping ({0})"
    ),
    Refusal(PROPERTY, "delta.constraints.*", "driver", "the table has a constraint ({0})"),
    Refusal(COLUMN, "delta.generationExpression", "driver", "column {0!r} is generated"),
    Refusal(COLUMN, "delta.identity.step", "driver", "column {0!r} is an identity column"),
    Refusal(COLUMN, "delta.invariants", "driver", "column {0!r} has an invariant"),
    Refusal(COLUMN, "CHAR, VARCHAR", "driver", "column {0!r} has a declared length"),
    Refusal(COLUMN, "CHAR in a key", "both", "rows are found by {0!r}, a CHAR", _NEW_TABLE),
    Refusal(COLUMN, "VARIANT, INTERVAL, …", "driver", "Arrow lacks the type of column {0!r}"),
    Refusal(COLUMN, "VARIANT, … in a batch", "both", "Arrow lacks the type of {0!r}", _UNMERGED),
    Refusal(
        COLUMN,
        "NOT NULL with deletes='mark'",
        "both",
        "column {0!r} would be null in a marked row",
        "drop NOT NULL from the column",
    ),
    Refusal(
        COLUMN,
        "wider type",
        "spark",
        "the table's column {0!r} gets a wider type",
        "cast the column of the batch, or ALTER TABLE it",
    ),
    Refusal(PARTITION, "TIMESTAMP", "driver", "partition column {0!r} is a TIMESTAMP"),
    Refusal(PARTITION, "TIMESTAMP_NTZ", "driver", "partition column {0!r} is a TIMESTAMP_NTZ"),
    Refusal(PARTITION, "DOUBLE", "driver", "partition column {0!r} is a DOUBLE"),
    Refusal(PARTITION, "FLOAT", "driver", "partition column {0!r} is a FLOAT"),
    Refusal(
        PARTITION,
        "BINARY",
        "both",
        "partition column {0!r} is a BINARY, which is stored as UTF-8",
        _NEW_TABLE,
    ),
    Refusal(PATH, PATH_CHARACTERS, "driver", "delta-rs does not take {0!r} in a path literally"),
    Refusal(
        FILE, "outside of the table", "driver", "{0} is outside of the table, as in a shallow clone"
    ),
    Refusal(STORE, "aws_s3_allow_unsafe_rename", "driver", "storage option {0} is given"),
    Refusal(STORE, "aws_s3_locking_provider", "driver", "storage option {0} is given"),
    Refusal(STORE, "allow_unsafe_rename", "driver", "storage option {0} is given"),
)
"""All rows; the first one that fits counts."""

SUPPORTED_FEATURES = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "identityColumns",
        "invariants",
        "timestampNtz",
        "variantType",  # delta-rs adds it to each table with deletion vectors that it alters
    }
)
"""Features that a table may have for the driver; the rows above find the use of most of them."""

IMPLIED_FEATURES: dict[int, tuple[str, ...]] = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
"""Features that a writer version has without their names, with those of the versions below."""

_OUTSIDE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:/")
_IN_COLUMNS = ("delta.generationExpression", "delta.identity.step", "delta.invariants")


def row(kind: str, name: str) -> Refusal:
    """The row of this kind and name."""
    return next(one for one in REFUSED if one.kind == kind and one.name == name)


def reason(kind: str, name: str, value: object = "") -> str:
    """The reason of a row, with the value that was found."""
    return row(kind, name).reason.format(value)


def _found(one: Refusal, value: object) -> str:
    """The reason of a row that the driver has found; an error for a row of both engines."""
    text = one.reason.format(value)
    if one.by == "both":
        raise ConfigurationError(f"could not change the table: {text}; {one.action}")
    return text


def implied_features(writer_version: int) -> set[str]:
    """The features of a protocol that lists none."""
    if writer_version >= 7:
        return set()
    return {
        name
        for version, names in IMPLIED_FEATURES.items()
        if version <= writer_version
        for name in names
    }


def feature_problem(features: Iterable[str], properties: Mapping[str, str]) -> str | None:
    """Why the driver cannot change a table with these features and properties; None if it can.

    Raises:
        ConfigurationError: no engine can.
    """
    unknown = sorted({*features} - SUPPORTED_FEATURES)
    if unknown:
        return reason(FEATURE, "*", ", ".join(unknown))
    for one in REFUSED:
        if one.kind != PROPERTY:
            continue
        name, _, value = one.name.partition("=")
        for key, given in properties.items():
            if key == name and given.lower() == value:
                return _found(one, f"{key}={given}")
            if name.endswith("*") and key.startswith(name[:-1]):
                return _found(one, key.removeprefix(name[:-1]))
    return None


def path_outside(paths: Iterable[str]) -> str | None:
    """Why the driver cannot change a table with files of these paths; None if it can.

    Args:
        paths: as the log has them: relative, except those of a shallow clone's source.
    """
    path = next((path for path in paths if _OUTSIDE.match(path)), None)
    return None if path is None else reason(FILE, "outside of the table", path)


def column_problem(schema: pa.Schema, partitions: Iterable[str]) -> str | None:
    """Why the driver cannot write columns of a table; None if it can.

    Args:
        schema: the table's columns, with the metadata that the log has.

    Raises:
        ConfigurationError: no engine can.
    """
    for field in schema:
        for name in _IN_COLUMNS:
            if name.encode() in (field.metadata or {}):
                return reason(COLUMN, name, field.name)
        if declared_length(field):
            return reason(COLUMN, "CHAR, VARCHAR", field.name)
        if is_opaque(field.type):
            return reason(COLUMN, "VARIANT, INTERVAL, …", field.name)
    refused = {one.name for one in REFUSED if one.kind == PARTITION}
    for name in partitions:
        kind = sql_type(schema.field(name).type).upper()
        if kind in refused:
            return _found(row(PARTITION, kind), name)
    return None
