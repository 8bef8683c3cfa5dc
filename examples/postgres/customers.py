"""The Postgres table of the example, and what compares it with the Delta table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from examples.postgres.local_postgres import LocalPostgres

CREATE = """
CREATE TABLE customers (
    id int PRIMARY KEY, name text NOT NULL, email text, balance numeric(12,2),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(), notes text
);
-- Values of more than 2 kB, which compression does not make smaller.
CREATE FUNCTION long_text() RETURNS text LANGUAGE sql VOLATILE AS
    $$ SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 100) $$;
"""
_COMPARED = "id, name, email, balance, updated_at, notes, phone"


def postgres_rows(postgres: LocalPostgres) -> list[dict[str, Any]]:
    """The rows in Postgres, by id."""
    return postgres.rows(
        "(SELECT id, name, email, balance::text, "
        "(extract(epoch FROM updated_at) * 1000000)::bigint AS updated_at, notes, "
        "to_jsonb(c) ->> 'phone' AS phone FROM customers c)",
        "id",
    )


def delta_rows(table: Path) -> list[dict[str, Any]]:
    """The rows in the Delta table, by id; none before its first commit."""
    try:
        builder = QueryBuilder().register("t", DeltaTable(table))
    except TableNotFoundError:
        return []
    rows = pa.table(builder.execute(f"SELECT {_COMPARED} FROM t ORDER BY id"))
    at = rows.column_names.index("updated_at")
    rows = rows.set_column(at, "updated_at", rows["updated_at"].cast(pa.int64()))
    return [
        {**row, "balance": None if row["balance"] is None else str(row["balance"])}
        for row in rows.to_pylist()
    ]
