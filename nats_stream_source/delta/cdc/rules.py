"""The rules of change data as the caller gives them: keys, sequence, deletes, columns, SCD type.

The words are those of Spark's AUTO CDC. :class:`ChangeRules` checks what can be checked without a
batch; :mod:`nats_stream_source.delta.cdc.events` applies the rules to the columns of a batch, with
the functions here that resolve a column or an expression in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta.table import Deletes, quote, validate_deletes
from nats_stream_source.errors import ConfigurationError

ScdType = Literal[1, 2]
# Not a string: `inspect.signature(merge, eval_str=True)` evaluates it.
SequenceBy: TypeAlias = str | Column | list[str | Column] | tuple[str | Column, ...]


@dataclass(frozen=True)
class ChangeRules:
    """How the events of a batch change a table; see :func:`nats_stream_source.delta.merge`.

    Attributes:
        keys: columns that identify a key; None for those of a bucket's entries.
        sequence_by: columns or expressions that order the events of a key, compared one by one;
            None for the order of a stream's entries.
        apply_as_deletes: condition of an event that deletes its key; None for the markers of a
            bucket's entries, and for no deletes in other rows.
        column_list: the selected columns; None for all.
        except_column_list: the columns that are not selected; None for none.
        scd_type: 1 for one row per key, 2 for one row per version.
        track_list: with SCD type 2, the columns whose changes make a version; None for the default.
        track_except_list: with SCD type 2, columns that do not make a version beside those of the
            default.
        unavailable_columns: column with the names of the columns whose value the row keeps.
    """

    deletes: Deletes = "remove"
    keys: tuple[str, ...] | None = None
    sequence_by: tuple[str | Column, ...] | None = None
    apply_as_deletes: str | Column | None = None
    column_list: tuple[str, ...] | None = None
    except_column_list: tuple[str, ...] | None = None
    scd_type: ScdType = 1
    track_list: tuple[str, ...] | None = None
    track_except_list: tuple[str, ...] | None = None
    unavailable_columns: str | None = None

    @staticmethod
    def of(
        *,
        deletes: Deletes = "remove",
        keys: Iterable[str] | str | None = None,
        sequence_by: SequenceBy | None = None,
        apply_as_deletes: str | Column | None = None,
        column_list: Iterable[str] | None = None,
        except_column_list: Iterable[str] | None = None,
        stored_as_scd_type: ScdType | str = 1,
        track_history_column_list: Iterable[str] | None = None,
        track_history_except_column_list: Iterable[str] | None = None,
        unavailable_columns: str | None = None,
    ) -> ChangeRules:
        """The rules of the arguments of :func:`nats_stream_source.delta.merge`.

        Raises:
            ConfigurationError: an argument is invalid, or two contradict each other.
        """
        validate_deletes(deletes)
        for name, given in (("column_list", column_list), ("keys", keys)):
            if given is not None and not list(given):
                raise ConfigurationError(
                    f"invalid argument: {name} is empty, expected column names, or None"
                )
        if column_list is not None and except_column_list is not None:
            raise ConfigurationError(
                "invalid arguments: column_list with except_column_list; pass one of them"
            )
        if track_history_column_list is not None and track_history_except_column_list is not None:
            raise ConfigurationError(
                "invalid arguments: track_history_column_list with "
                "track_history_except_column_list; pass one of them"
            )
        # Spark's AUTO CDC also takes the type as a text.
        scd_type = {"1": 1, "2": 2}.get(str(stored_as_scd_type))
        if isinstance(stored_as_scd_type, bool) or scd_type not in get_args(ScdType):
            raise ConfigurationError(
                f"invalid argument: stored_as_scd_type is {stored_as_scd_type!r}, expected 1 or 2"
            )
        for name, value in (
            ("track_history_column_list", track_history_column_list),
            ("track_history_except_column_list", track_history_except_column_list),
        ):
            if value is not None and scd_type == 1:
                raise ConfigurationError(
                    f"invalid arguments: {name} with stored_as_scd_type=1, which keeps one row per "
                    f"key; pass stored_as_scd_type=2, or remove {name}"
                )
        if scd_type == 2 and deletes == "mark":
            raise ConfigurationError(
                "invalid arguments: deletes='mark' with stored_as_scd_type=2, where a delete "
                "closes the key's row; remove deletes"
            )
        if unavailable_columns is not None and not isinstance(unavailable_columns, str):
            raise ConfigurationError(
                f"invalid argument: unavailable_columns is {unavailable_columns!r}, expected the "
                f"name of a column"
            )
        if scd_type == 2 and unavailable_columns is not None:
            raise ConfigurationError(
                "invalid arguments: unavailable_columns with stored_as_scd_type=2, which does not "
                "keep values of another version; pass stored_as_scd_type=1, or have the source "
                "send all values (REPLICA IDENTITY FULL in Postgres)"
            )
        return ChangeRules(
            deletes,
            _names("keys", [keys] if isinstance(keys, str) else keys),
            _sequence(sequence_by),
            _condition(apply_as_deletes),
            _names("column_list", column_list),
            _names("except_column_list", except_column_list),
            2 if scd_type == 2 else 1,
            _names("track_history_column_list", track_history_column_list),
            _names("track_history_except_column_list", track_history_except_column_list),
            unavailable_columns,
        )


def expression(part: str | Column, columns: Sequence[str]) -> Column:
    """A column by its name, else an SQL expression."""
    if isinstance(part, Column):
        return part
    return F.col(quote(part)) if part in columns else F.expr(part)


def sequence_column(parts: Sequence[str | Column], columns: Sequence[str]) -> Column:
    """The sequence: a struct if it has several parts."""
    if len(parts) == 1:
        return expression(parts[0], columns)
    named = [
        part if isinstance(part, str) and part in columns else f"_{number}"
        for number, part in enumerate(parts, start=1)
    ]
    return F.struct(
        *(expression(part, columns).alias(name) for part, name in zip(parts, named, strict=True))
    )


def columns_in_sequence(batch: DataFrame, parts: Sequence[str | Column]) -> frozenset[str]:
    """The columns of a batch that are a part of its sequence as they are or cast, or in a struct.

    A column that an expression computes a part from is not one of them: a payload can have the
    sequence and the values. Of a client of Spark Connect, only names are known.
    """
    columns = batch.columns
    found = {part for part in parts if isinstance(part, str) and part in columns}
    others = [part for part in parts if not isinstance(part, str) or part not in columns]
    if others and hasattr(batch, "_jdf"):
        selected = batch.select(*(expression(part, columns) for part in others))
        plan = selected._jdf.queryExecution().analyzed()
        # As an expression has named them; names that differ in case only are refused.
        own = {name.lower(): name for name in columns}
        found.update(own[name.lower()] for name in _attributes(plan.projectList()))
    return frozenset(found)


def _names(argument: str, given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(given) if not isinstance(given, str) else given
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"invalid argument: {argument} is {given!r}, expected a list of column names"
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigurationError(
            f"invalid argument: {argument} has {repeated[0]!r} twice; name each column once"
        )
    return names


def _sequence(given: SequenceBy | None) -> tuple[str | Column, ...] | None:
    if given is None:
        return None
    parts = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not parts or not all(isinstance(part, (str, Column)) and not _blank(part) for part in parts):
        raise ConfigurationError(
            f"invalid argument: sequence_by is {given!r}, expected a column name, an SQL "
            f"expression, a Column, or a list of these"
        )
    return parts


def _condition(given: str | Column | None) -> str | Column | None:
    if given is not None and (not isinstance(given, (str, Column)) or _blank(given)):
        raise ConfigurationError(
            f"invalid argument: apply_as_deletes is {given!r}, expected an SQL condition or a "
            f"Column"
        )
    return given


def _blank(part: str | Column) -> bool:
    return isinstance(part, str) and not part.strip()


def _attributes(expressions: Any) -> Iterator[str]:
    """The names of the attributes that Catalyst's expressions are, or that their structs have."""
    for number in range(expressions.length()):
        one = expressions.apply(number)
        while (kind := one.getClass().getSimpleName()) in ("Alias", "Cast"):
            one = one.child()
        if kind == "AttributeReference":
            yield one.name()
        elif kind == "CreateNamedStruct":
            yield from _attributes(one.valExprs())
