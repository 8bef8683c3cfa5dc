"""A query on a bucket in another account or another domain (ADR-19)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
)
from tests.support.spark.scenario import (
    Create,
    Delete,
    ExpectInitialThrough,
    ExpectNoConsumers,
    ExpectRows,
    Put,
    Run,
    Scene,
    play,
)

Place = tuple[str, dict[str, str]]
"""The address of the bucket's owner, and the options of a query that comes from elsewhere."""


@contextlib.contextmanager
def imported() -> Iterator[Place]:
    """Account I, as in the document: neither flow control nor a second response arrives."""
    with adr19_server() as accounts:
        yield (
            accounts.exporter,
            {
                "servers": accounts.server.url,
                "user": "i",
                "password": "i",
                "apiPrefix": ADR19_API_PREFIX,
                "inboxPrefix": ADR19_INBOX_PREFIX,
            },
        )


@contextlib.contextmanager
def in_domain() -> Iterator[Place]:
    """A leaf node's client reads what the hub has."""
    with hub_and_leaf() as both:
        yield both.hub.url, {"servers": both.leaf.url, "domain": "hub"}


@pytest.mark.parametrize("place", [imported, in_domain])
def test_query_through_prefix(
    spark: SparkSession, tmp_path: Path, place: Callable[[], AbstractContextManager[Place]]
) -> None:
    with place() as (owner, options):
        scene = Scene(spark, SimpleNamespace(url=owner), "map", tmp_path)
        # A filter and a limit, so that the planner ranks: its requests take the prefix too.
        options |= {"keys": "a,b,c", "includeHistory": "true", "maxRowsPerTrigger": "2"}
        play(
            scene,
            Create(5),
            *(Put("a", "1"), Put("x", "1"), Put("b", "1"), Put("a", "2")),
            Run(options),
            ExpectRows("1 PUT a=1 initial", "3 PUT b=1 initial", "4 PUT a=2 initial"),
            ExpectInitialThrough(4),
            *(Put("c", "1"), Delete("a"), Put("x", "2")),
            Run(options),
            ExpectRows(
                *("1 PUT a=1 initial", "3 PUT b=1 initial", "4 PUT a=2 initial"),
                *("5 PUT c=1", "6 DEL a"),
            ),
            ExpectNoConsumers(),
        )
