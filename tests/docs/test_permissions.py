"""The permissions in docs/security.md suffice; each line of the blocks in ``USES`` is needed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples.demo import flights
from examples.demo.writer import Writer, create_bucket
from nats_stream_source.connection.connection import Connection
from nats_stream_source.delta.compare_with_bucket import TableRow, find_differences
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import AckTimeoutError, KeyExistsError, PermissionDeniedError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.options import CONNECTION, connection_settings, parse
from nats_stream_source.options.writing import (
    KvWriteOptions,
    StreamWriteOptions,
    kv_write_options,
    stream_write_options,
)
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.spark.writing.task import write_task
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import with_user
from tests.support.paths import ROOT
from tests.support.query_driver.batch import batch_reader, read_batch, tasks_of
from tests.support.query_driver.driver import new_query

DOCUMENT = (ROOT / "docs/security.md").read_text()
BLOCKS = dict(re.findall(r"<!-- permissions: (\w+) -->\n```\n(.*?)```", DOCUMENT, re.DOTALL))
ENTRIES, SIZE = 240, 40_000  # more than the server sends before it wants a flow-control answer
LIMIT = 200


def subjects(block: str) -> list[str]:
    return re.findall(r'"([^"]+)"', BLOCKS[block])


def without(block: str, subject: str) -> str:
    left = BLOCKS[block].replace(f'"{subject}"', "")
    assert left != BLOCKS[block]
    return left.replace("[]", '"nothing"')  # an empty list would allow all


def users() -> dict[str, str]:
    """A user for each block, and for each block without each of its lines."""
    found = dict(BLOCKS)
    for block in BLOCKS:
        found |= {f"{block}-{i}": without(block, one) for i, one in enumerate(subjects(block))}
    create = "$JS.API.CONSUMER.CREATE.KV_fleet."
    found["narrow"] = BLOCKS["nats_kv"].replace(f"{create}>", f"{create}*.$KV.fleet.a.>")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with all those users and one who may everything, and a filled bucket ``fleet``."""
    entries = "\n".join(
        f"{{ user: {name}, password: {name}, {permissions} }}"
        for name, permissions in users().items()
    )
    config = tmp_path_factory.mktemp("server") / "server.conf"
    config.write_text(
        f"authorization {{ users: [ {{ user: admin, password: admin }}\n{entries} ] }}"
    )
    with NatsServer(config=config) as server:
        url = with_user(server.url, "admin")
        buckets.create_bucket(url, "fleet")
        filled = ((f"a.{i}", bytes(SIZE)) for i in range(ENTRIES))
        buckets.put_many(url, "fleet", filled)
        create_stream(url, "ORDERS", "orders.>", allow_direct=True)
        buckets.publish(url, [(f"orders.{i % 3}", bytes(SIZE), None) for i in range(ENTRIES)])
        yield server


def violations(server: NatsServer, user: str) -> list[str]:
    """What the server has logged of subjects that the user was denied."""
    lines = server.log.splitlines()
    return [line for line in lines if " Violation - " in line and f'{user}"' in line]


def options(server: NatsServer, user: str) -> dict[str, str]:
    return {
        "servers": server.url,
        "user": user,
        "password": user,
        "inboxPrefix": "_INBOX_spark",
        "requestTimeout": "20",  # what is said in time is not said by a timeout
    }


def follow(server: NatsServer, user: str, **named: str) -> int:
    """How many rows a streaming query reads, from its first call to its last."""
    given = options(server, user) | named
    with new_query(given.pop("servers"), **given, maxRowsPerTrigger=LIMIT) as query:
        query.prepare_available_now()
        return len(query.read_new())


def at_once(server: NatsServer, user: str, **named: str) -> int:
    """How many rows a batch reads."""
    given = options(server, user) | named
    try:
        return len(read_batch(given.pop("servers"), **given))
    finally:
        close_cached_runners()


def read(server: NatsServer, user: str, keys: str = "a.>") -> int:
    return follow(server, user, bucket="fleet", keys=keys)


def compare(server: NatsServer, user: str) -> tuple[int, int]:
    """The requests of ``reconcile``: how many of two rows are removed, and the last sequence."""
    info = buckets.bucket_info(with_user(server.url, "admin"), "fleet")
    created = nanoseconds(info["created"]) // 1000
    rows = [TableRow("a.1", created, 2), TableRow("never.there", created, 2)]
    settings = connection_settings(parse(options(server, user), CONNECTION))
    gone, last_seq = asyncio.run(find_differences(rows, "t", "fleet", settings))
    return len(gone), last_seq


def test_pattern_without_list_permission_fails(server: NatsServer) -> None:
    user = f"several-{subjects('several').index('$JS.API.STREAM.LIST')}"
    with pytest.raises(PermissionDeniedError, match=r"\$JS\.API\.STREAM\.LIST"):
        follow(server, user, keys="a.>", bucketPattern="fl.*")
    assert follow(server, user, keys="a.>", buckets="fleet") == ENTRIES


def test_subject_lookup_without_list_permission_fails(server: NatsServer) -> None:
    user = f"nats_stream-{subjects('nats_stream').index('$JS.API.STREAM.NAMES')}"
    with pytest.raises(PermissionDeniedError, match=r"STREAM\.NAMES"):
        at_once(server, user, subject="orders.>")
    assert at_once(server, user, stream="ORDERS") == ENTRIES


def test_consumers_have_prefix_of_option(server: NatsServer) -> None:
    given = options(server, "nats_stream") | {"stream": "ORDERS", "consumerPrefix": "ours"}
    reader = batch_reader(given.pop("servers"), **given)
    (split,) = tasks_of(reader)
    rows: Any = reader.read(split)
    try:
        next(rows)
        names = buckets.api(with_user(server.url, "admin"), "CONSUMER.NAMES.ORDERS")["consumers"]
        assert names
        assert all(name.startswith("ours-") for name in names)
    finally:
        rows.close()
        close_cached_runners()


FALLBACKS = {
    "$JS.API.CONSUMER.DELETE.KV_fleet.*": "consumer could not be deleted.*CONSUMER.DELETE",
    "$JS.API.DIRECT.GET.KV_fleet": None,
    "$JS.FC.KV_fleet.>": r"flow-control answers do not reach the server.*\$JS\.FC\.>",
}


@pytest.mark.parametrize("subject", FALLBACKS)
def test_missing_optional_permission_is_tolerated(
    server: NatsServer, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    user = f"nats_kv-{subjects('nats_kv').index(subject)}"
    assert read(server, user) == ENTRIES
    assert any(subject.rstrip("*>") in line for line in violations(server, user))
    said = FALLBACKS[subject]
    warnings = "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert re.search(said, warnings) if said else not warnings
    left = buckets.consumers(with_user(server.url, "admin"), "fleet")
    assert bool(left) == ("DELETE" in subject)
    for consumer in left:
        buckets.api(with_user(server.url, "admin"), f"CONSUMER.DELETE.KV_fleet.{consumer}")


def test_consumers_of_some_keys_only(server: NatsServer) -> None:
    assert read(server, "narrow") == ENTRIES
    named = re.escape("'$JS.API.CONSUMER.CREATE.KV_fleet.")
    with pytest.raises(PermissionDeniedError, match=named):
        read(server, "narrow", keys="*.1")


def write(server: NatsServer, user: str, bucket: str = "fleet", revision: int | None = None) -> int:
    """How many rows a task of a sink has stored."""
    given = {**options(server, user), "bucket": bucket, "ifMissing": "create"}
    rows = pa.record_batch(
        {
            "key": pa.array(["b.1", "b.2"]),
            "value": pa.array([b"x", b"y"]),
            "expected_revision": pa.array([None, revision], pa.int64()),
        }
    )
    return stored(kv_write_options({**given, "onConflict": "skip"}), rows)


def write_with_conflict(server: NatsServer, user: str) -> int:
    """How many rows are stored where one is skipped because of a conflict."""
    return write(server, user, revision=10**6)


def write_stream(server: NatsServer, user: str, stream: str = "ORDERS") -> int:
    given = {**options(server, user), "stream": stream, "ifMissing": "create"}
    rows = pa.record_batch({"data": pa.array([b"x", b"y"])})
    written = {"subject": f"{stream.lower()}.1", "subjects": f"{stream.lower()}.>"}
    return stored(stream_write_options({**given, **written}), rows)


def stored(given: KvWriteOptions | StreamWriteOptions, rows: pa.RecordBatch) -> int:
    try:
        return write_task(given, iter([rows]), job="job", partition=0).stored
    finally:
        close_cached_runners()


def use_keys(server: NatsServer, user: str) -> None:
    asyncio.run(_use_keys(server, user))


async def _use_keys(server: NatsServer, user: str) -> None:
    """What a program does with single keys."""
    key = "a.own"
    settings = connection_settings(parse(options(server, user), CONNECTION))
    async with await Connection.open(settings) as connection:
        kv = await KeyValue.open(JetStream(connection), "fleet")
        revision = await kv.put(key, b"1")
        assert (await kv.get(key, min_last_revision=revision)).value == b"1"
        await kv.update(key, b"2", revision)
        await kv.delete(key)
        created = await kv.create(key, b"3")
        with pytest.raises(KeyExistsError):
            await kv.create(key, b"4")
        assert (await kv.get(key)).revision == created
        await kv.purge(key)


Use = Callable[[NatsServer, str], object]

READS: list[tuple[str, Use, object]] = [
    ("nats_kv", read, ENTRIES),
    ("nats_kv", partial(follow, keys="a.>", buckets="fleet"), ENTRIES),
    ("several", partial(follow, keys="a.>", bucketPattern="fl.*"), ENTRIES),
    ("nats_kv", partial(at_once, bucket="fleet"), ENTRIES),
    ("nats_kv", partial(at_once, bucket="fleet", asOfSequence=str(ENTRIES)), ENTRIES),
    ("nats_kv", partial(at_once, bucket="fleet", includeHistory="true"), ENTRIES),
    ("nats_kv", partial(at_once, bucket="fleet", keys="a.>"), ENTRIES),
    *(
        ("nats_stream", partial(how, **named), rows)
        for which in (
            {"stream": "ORDERS"},
            {"subject": "orders.>"},
            {"stream": "ORDERS", "filterSubjects": "orders.0,orders.1,orders.2"},
        )
        for how, named, rows in (
            (follow, which, ENTRIES),
            (at_once, which, ENTRIES),
            (at_once, {**which, "deliverPolicy": "last_per_subject"}, 3),
        )
    ),
    ("reconcile", compare, (1, ENTRIES)),
]
"""What needs the permissions of a block, and its result."""

WRITES: list[tuple[str, Use, object]] = [
    ("write_kv", write, 2),
    ("write_kv", write_with_conflict, 1),
    ("write_stream", write_stream, 2),
    ("key_value", use_keys, None),
]


@pytest.mark.parametrize(("block", "use", "result"), [*READS, *WRITES])
def test_permissions_suffice(
    server: NatsServer, block: str, use: Use, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert use(server, block) == result
    if (block, use, result) in READS:
        fallbacks = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert not fallbacks
    assert not violations(server, block)
    assert buckets.consumers(with_user(server.url, "admin"), "fleet") == []


USES: dict[str, Use] = {
    "nats_kv": read,
    "reconcile": compare,
    "write_kv": write_with_conflict,
    "write_stream": write_stream,
    "key_value": use_keys,
}
"""What needs each line of a block."""

REQUIRED = [
    (block, line, subject)
    for block in USES
    for line, subject in enumerate(subjects(block))
    if "STREAM.CREATE" not in subject and not (block == "nats_kv" and subject in FALLBACKS)
]


@pytest.mark.parametrize(("block", "line", "subject"), REQUIRED)
def test_missing_permission_is_named(
    server: NatsServer, block: str, line: int, subject: str
) -> None:
    """Not the permission to read every key, where that of one key is missing."""
    named = subject.replace("a.>", "a.own").replace(".>", ".")
    with pytest.raises(PermissionDeniedError, match=re.escape(f"'{named}")):
        USES[block](server, f"{block}-{line}")


def test_creating_needs_its_permission(tmp_path: Path) -> None:
    """On a server without the bucket and the stream, which the users may create."""
    entries = [f"{{ user: {name}, password: {name}, {BLOCKS[name]} }}" for name in CREATING]
    entries += [
        f"{{ user: {name}-0, password: {name}-0, {without(name, subject)} }}"
        for name, subject in CREATING.items()
    ]
    config = tmp_path / "server.conf"
    config.write_text("authorization { users: [\n" + "\n".join(entries) + "\n] }")
    with NatsServer(config=config) as server:
        with pytest.raises(PermissionDeniedError, match=r"STREAM\.CREATE\.KV_fleet"):
            write(server, "write_kv-0")
        with pytest.raises(PermissionDeniedError, match=r"STREAM\.CREATE\.ORDERS"):
            write_stream(server, "write_stream-0")
        assert write(server, "write_kv") == 2
        assert write_stream(server, "write_stream") == 2


CREATING = {
    "write_kv": "$JS.API.STREAM.CREATE.KV_fleet",
    "write_stream": "$JS.API.STREAM.CREATE.ORDERS",
}


@pytest.mark.parametrize("imported", [True, False])
def test_import_of_bucket_subjects_carries_puts(imported: bool, tmp_path: Path) -> None:
    (accounts,) = re.findall(r"```\n(OWNER: \{.*?)```", DOCUMENT, re.DOTALL)
    (line,) = re.findall(r".*\$KV.*to: .*\n", accounts)
    if not imported:
        accounts = accounts.replace(line, "")
    for account, user in (("OWNER", "owner"), ("READER", "reader")):
        users = f"users: [ {{ user: {user}, password: {user} }} ]"
        accounts = accounts.replace(f"{account}: {{", f"{account}: {{\n  {users}")
    config = tmp_path / "server.conf"
    config.write_text(f"jetstream: enabled\naccounts {{\n{accounts}\n}}")

    async def put(url: str) -> int:
        settings: dict[str, Any] = {"api_prefix": "owner", "inbox_prefix": "spark"}
        async with connect(with_user(url, "reader"), request_timeout=2, **settings) as reader:
            return await (await KeyValue.open(reader, "fleet")).put("a", b"1")

    with NatsServer(config=config) as server:
        buckets.create_bucket(with_user(server.url, "owner"), "fleet")
        if imported:
            assert asyncio.run(put(server.url)) == 1
        else:
            with pytest.raises(AckTimeoutError):
                asyncio.run(put(server.url))


def test_demo_writer_permissions_suffice(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text(
        f"authorization {{ users: [ {{ user: w, password: w, {BLOCKS['writer']} }} ] }}"
    )
    with NatsServer(config=config) as server:
        url = with_user(server.url, "w")
        asyncio.run(create_bucket(url))
        replay = flights.load(100)
        Writer(url, replay).go_on(replay.writes)
        assert "Violation" not in server.log
