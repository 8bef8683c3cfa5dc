"""Entries of a bucket, written and read (ADR-8), after a write (ADR-53), and against a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyDeletedError,
    KeyExistsError,
    KeyNotFoundError,
    MinLastSequenceError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import api, create_bucket, publish, put
from tests.support.proxy.fault_proxy import Proxy

pytestmark = pytest.mark.servers


async def test_put_get_delete_purge(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("basic", history=10)) as kv:
        assert await kv.put("auth.username", b"bob") == 1
        entry = await kv.get("auth.username")
        assert (entry.bucket, entry.key, entry.value) == ("basic", "auth.username", b"bob")
        assert (entry.revision, entry.delta, entry.operation) == (1, 0, "PUT")
        last = {"last_by_subj": "$KV.basic.auth.username"}
        stored = api(url, "STREAM.MSG.GET.KV_basic", last)
        assert entry.created_ns == nanoseconds(stored["message"]["time"])
        assert entry.created == datetime.fromtimestamp(
            entry.created_ns // 1000 / 10**6, timezone.utc
        )
        assert entry.headers is None
        assert await kv.put("auth.username", b"alice") == 2
        assert (await kv.get("auth.username")).value == b"alice"
        old = await kv.get_revision("auth.username", 1)
        # The distance to the latest is known in lists only.
        assert (old.value, old.delta) == (b"bob", 0)
        assert await kv.delete("auth.username") == 3
        with pytest.raises(KeyDeletedError, match="DEL at revision 3") as caught:
            await kv.get("auth.username")
        assert (caught.value.revision, caught.value.operation) == (3, "DEL")
        with pytest.raises(KeyDeletedError):
            await kv.get_revision("auth.username", 3)
        history = await kv.history("auth.username")
        assert [(e.value, e.revision, e.delta, e.operation) for e in history] == [
            (b"bob", 1, 2, "PUT"),
            (b"alice", 2, 1, "PUT"),
            (b"", 3, 0, "DEL"),
        ]
        assert await kv.purge("auth.username") == 4
        (only,) = await kv.history("auth.username")
        assert (only.revision, only.operation, only.delta) == (4, "PURGE", 0)
        with pytest.raises(KeyNotFoundError, match="revision 2 not found"):
            await kv.get_revision("auth.username", 2)
        # What is sent is what the document says.
        headers = only.headers
        assert headers is not None
        assert headers.get("KV-Operation") == "PURGE"
        assert headers.get("Nats-Rollup") == "sub"
        assert history[2].headers is not None
        assert history[2].headers.fields == (("KV-Operation", "DEL"),)


async def test_keys_that_are_not_there(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("missing")) as kv:
        for missing in (kv.get("a"), kv.history("a"), kv.get_revision("a", 1)):
            with pytest.raises(KeyNotFoundError, match="'a'"):
                await missing
        assert await kv.keys() == []
        first = await kv.put("a", b"1")
        await kv.put("b", b"2")
        with pytest.raises(KeyNotFoundError, match="belongs to another key"):
            await kv.get_revision("b", first)
        for no_revision in (0, -1, None, "1", True, 1.0, 2**64):
            with pytest.raises(ConfigurationError, match="expected an integer from 1 to"):
                await kv.get_revision("b", no_revision)


async def test_names_are_checked_in_every_call(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("names")) as kv:
        for name in ("", ".a", "a.", "a..b", "a b", "a*", "*", ">", "a.>", None, 5, b"a"):
            for call in (
                kv.get(name),
                kv.get_revision(name, 1),
                kv.history(name),
                kv.put(name, b""),
                kv.create(name, b""),
                kv.update(name, b"", 1),
                kv.delete(name),
                kv.purge(name),
            ):
                with pytest.raises(InvalidNameError):
                    await call
        for pattern in ("a.>.b", 5, b"a"):
            with pytest.raises(InvalidNameError):
                await kv.keys(pattern)
        with pytest.raises(ConfigurationError, match="overlap"):
            await kv.keys("a.*", "a.b")
        assert (await kv.status()).last_revision == 0, "nothing was written"


async def test_arguments_are_checked_before_anything_is_sent(url: str) -> None:
    """A revision that is None would make the write unconditional; a server parses the others."""
    async with new_bucket(url, KeyValueConfig("checked")) as kv:
        await kv.put("a", b"1")
        untyped: Any = kv
        for revision in (None, "", "1", -1, True, 1.0, 2**64):
            calls = [untyped.update("a", b"2", revision)]
            if revision is not None:
                calls += [
                    untyped.delete("a", revision=revision),
                    untyped.purge("a", revision=revision),
                    untyped.get("a", min_last_revision=revision),
                    untyped.history("a", min_last_revision=revision),
                    untyped.keys(min_last_revision=revision),
                ]
            for call in calls:
                with pytest.raises(ConfigurationError, match=r"expected an integer from 0 to 2"):
                    await call
        for value in ("text", None, 5):
            for call in (untyped.put("a", value), untyped.update("a", value, 1)):
                with pytest.raises(ConfigurationError, match="expected bytes"):
                    await call
        for ttl in (True, "5"):
            with pytest.raises(ConfigurationError, match="expected an integer of 1 second"):
                await untyped.put("a", b"2", ttl=ttl)
        assert (await kv.status()).last_revision == 1, "nothing was written"
        assert await untyped.put("a", bytearray(b"2")) == 2
        assert (await kv.get("a")).value == b"2"


async def test_reserved_keys_are_left_alone(url: str) -> None:
    """``_kv…`` is read by its name, not listed, and never written."""
    async with new_bucket(url, KeyValueConfig("own")) as kv:
        for name in ("_kv", "_kv.x", "_kvx"):
            for call in (
                kv.put(name, b""),
                kv.create(name, b""),
                kv.update(name, b"", 1),
                kv.delete(name),
                kv.purge(name),
            ):
                with pytest.raises(InvalidNameError, match="reserved"):
                    await call
        put(url, "own", "_kv.x", b"internal")
        publish(url, [("$KV.own._kv.y", b"", {"KV-Operation": "DEL"})])
        await kv.put("a._kv", b"1")
        assert await kv.keys() == ["a._kv"]
        assert (await kv.get("_kv.x")).value == b"internal"
        assert await kv.keys("_kv.>") == ["_kv.x"]
        async with kv.watch() as watch:
            assert [entry.key for entry in await watch.initial()] == ["a._kv"]
        assert await kv.purge_deletes(0) == 0


async def test_put_repeated_with_message_id(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("dup", history=5)) as kv:
        assert await kv.put("a", b"1", msg_id="x") == 1
        assert await kv.put("a", b"1", msg_id="x") == 1
        assert (await kv.status()).values == 1


async def test_update_needs_revision(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("cas", history=3)) as kv:
        first = await kv.update("a", b"1", 0)
        await kv.put("other", b"")
        assert await kv.update("a", b"2", first) == 3
        with pytest.raises(WrongLastSequenceError, match="wrong last sequence: 3") as caught:
            await kv.update("a", b"3", first)
        assert caught.value.last_seq == 3
        assert (caught.value.code, caught.value.err_code) == (400, 10071)
        for conditional in (kv.delete("a", revision=1), kv.purge("a", revision=1)):
            with pytest.raises(WrongLastSequenceError):
                await conditional
        assert (await kv.get("a")).value == b"2"
        assert await kv.delete("a", revision=3) == 4
        assert await kv.purge("a", revision=4) == 5


async def test_create(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("create", history=3)) as kv:
        assert await kv.create("a", b"1") == 1
        with pytest.raises(KeyExistsError, match="at revision 1") as caught:
            await kv.create("a", b"2")
        assert caught.value.last_seq == 1
        await kv.delete("a")
        assert await kv.create("a", b"3") == 3
        await kv.purge("a")
        assert await kv.create("a", b"4") == 5
        assert (await kv.get("a")).value == b"4"
        # The subject purged: 0 is right again.
        await kv.jetstream.call("STREAM.PURGE.KV_create", {"filter": "$KV.create.a"})
        assert await kv.create("a", b"5") == 6


@pytest.mark.parametrize("numbered", [True, False])
async def test_create_with_and_without_sequence_in_refusal(
    nats_server: NatsServer, numbered: bool
) -> None:
    """ADR-53: ``wrong last sequence: 5`` and ``wrong last sequence``."""
    create_bucket(nats_server.url, "b", history=3)
    refusals = []

    def verdict(frame: bytes) -> bool | bytes:
        if b"wrong last sequence: " not in frame:
            return True
        refusals.append(frame)
        if numbered:
            return frame
        line, rest = frame.split(b"\r\n", 1)
        head, size = line.rsplit(b" ", 1)
        payload = rest[: int(size)].replace(b"wrong last sequence: 2", b"wrong last sequence")
        return head + b" %d\r\n" % len(payload) + payload + b"\r\n"

    with Proxy(nats_server.port, verdict) as proxy:
        async with connect(proxy.url) as js:
            kv = await KeyValue.open(js, "b")
            await kv.put("a", b"1")
            await kv.delete("a")
            asked = len(proxy.seen)
            assert await kv.create("a", b"2") == 3
            # Where the refusal has the sequence, a Direct Get that has reached it is enough.
            leader = any(b"stream_msg_get_response" in frame for frame in proxy.seen[asked:])
            assert leader is not numbered
            with pytest.raises(KeyExistsError, match="revision 3"):
                await kv.create("a", b"3")
    assert len(refusals) == 2


async def test_creators_that_race(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("race")) as kv:
        await kv.put("a", b"old")
        await kv.delete("a")
        outcomes = await asyncio.gather(
            *(kv.create("a", b"%d" % i) for i in range(20)), return_exceptions=True
        )
        (revision,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert all(isinstance(o, KeyExistsError) for o in outcomes if not isinstance(o, int))
        assert (await kv.get("a", min_last_revision=revision)).revision == revision


async def test_min_last_revision_that_is_too_high_and_then_reached(
    url: str,
) -> None:
    """The document's own test: 412, then the write that reaches it, then the same read again."""
    async with connect(url, request_timeout=0.5) as js:
        kv = await KeyValue.create_bucket(js, KeyValueConfig("raw", history=5))
        last = await kv.put("a", b"1")
        reads: list[Callable[[int], Coroutine[Any, Any, Any]]] = [
            lambda least: kv.get("a", min_last_revision=least),
            lambda least: kv.get_revision("a", 1, min_last_revision=least),
            lambda least: kv.history("a", min_last_revision=least),
            lambda least: kv.keys(min_last_revision=least),
            lambda least: kv.watch(min_last_revision=least).initial(),
        ]
        for read in reads:
            with pytest.raises(MinLastSequenceError, match="412, 10180"):
                await read(last + 1)
            last = await kv.put("a", b"2")
            assert await read(last)


_KEYS = st.sampled_from(["a", "b", "c.d"])
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "create", "update", "stale", "delete", "purge", "purge_deletes"]),
        _KEYS,
    ),
    max_size=25,
)


class Model:
    """A bucket as a dict: of each key the kept revisions, ``(revision, value, operation)``."""

    def __init__(self, history: int) -> None:
        self.history = history
        self.last = 0
        self.kept: dict[str, list[tuple[int, bytes, str]]] = {}

    def write(self, key: str, value: bytes, operation: str) -> int:
        self.last += 1
        before = [] if operation == "PURGE" else self.kept.get(key, [])
        self.kept[key] = [*before, (self.last, value, operation)][-self.history :]
        return self.last

    def revision(self, key: str) -> int:
        return self.kept[key][-1][0] if self.kept.get(key) else 0

    def has(self, key: str) -> bool:
        return bool(self.kept.get(key)) and self.kept[key][-1][2] == "PUT"

    def purge_deletes(self) -> None:
        for key in list(self.kept):
            if not self.has(key):
                del self.kept[key]

    @property
    def keys(self) -> list[str]:
        return sorted(key for key in self.kept if self.has(key))

    @property
    def latest(self) -> list[tuple[str, int, bytes, str]]:
        found = [(key, *kept[-1]) for key, kept in self.kept.items()]
        return sorted(found, key=lambda one: one[1])

    @property
    def everything(self) -> list[tuple[str, int, bytes, str]]:
        found = [(key, *one) for key, kept in self.kept.items() for one in kept]
        return sorted(found, key=lambda one: one[1])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(history=st.sampled_from([1, 2, 5]), steps=_STEPS)
def test_bucket_equals_model(url: str, history: int, steps: list[tuple[str, str]]) -> None:
    async def step(kv: KeyValue, model: Model, what: str, key: str, value: bytes) -> None:
        if what == "put":
            assert await kv.put(key, value) == model.write(key, value, "PUT")
        elif what == "create" and model.has(key):
            with pytest.raises(KeyExistsError):
                await kv.create(key, value)
        elif what == "create":
            assert await kv.create(key, value) == model.write(key, value, "PUT")
        elif what == "update":
            revision = model.revision(key)
            assert await kv.update(key, value, revision) == model.write(key, value, "PUT")
        elif what == "stale":
            with pytest.raises(WrongLastSequenceError):
                await kv.update(key, value, model.revision(key) + 1)
        elif what == "delete":
            assert await kv.delete(key) == model.write(key, b"", "DEL")
        elif what == "purge":
            assert await kv.purge(key) == model.write(key, b"", "PURGE")
        else:
            await kv.purge_deletes(0)
            model.purge_deletes()

    async def whole() -> None:
        async with connect(url) as js:
            kv = await KeyValue.create_bucket(
                js, KeyValueConfig("model", history=history, storage="memory")
            )
            try:
                model = Model(history)
                for i, (what, key) in enumerate(steps):
                    await step(kv, model, what, key, b"%d" % i)
                last = model.last or None
                for key in ("a", "b", "c.d"):
                    if model.has(key):
                        entry = await kv.get(key, min_last_revision=last)
                        assert (entry.revision, entry.value, "PUT") == model.kept[key][-1]
                    else:
                        with pytest.raises(KeyNotFoundError):
                            await kv.get(key, min_last_revision=last)
                    if key in model.kept:
                        history_ = await kv.history(key)
                        found = [(e.revision, e.value, e.operation) for e in history_]
                        assert found == model.kept[key]
                assert sorted(await kv.keys()) == model.keys
                for include_history, expected in ((False, model.latest), (True, model.everything)):
                    async with kv.watch(include_history=include_history, heartbeat=0.1) as watch:
                        entries = await watch.initial()
                    assert [(e.key, e.revision, e.value, e.operation) for e in entries] == expected
            finally:
                await KeyValue.delete_bucket(js, "model")

    asyncio.run(whole())
