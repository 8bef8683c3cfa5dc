"""Random operations on a key-value bucket return what a model of the bucket returns."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import KeyExistsError, KeyNotFoundError, WrongLastSequenceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue

pytestmark = pytest.mark.servers

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
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(history=st.sampled_from([1, 2, 5]), steps=_STEPS)
def test_bucket_equals_model(
    shared_server: NatsServer, history: int, steps: list[tuple[str, str]]
) -> None:
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
        async with connect(shared_server.url) as js:
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
