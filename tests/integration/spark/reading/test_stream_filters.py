"""``nats_stream`` without Spark: filters, the stream that has a subject, changed subjects."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConfigurationError, NoMatchingStreamError, OffsetError
from tests.integration.spark.reading.streams import fill, read
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream
from tests.support.query_driver.driver import new_query, sequences


def test_looked_up(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create_stream(url, name, f"{name}.a.>", f"{name}.b")
    publish(url, [(f"{name}.a.1", b"", None), (f"{name}.b", b"", None)])
    assert sequences(read(url, None, subject=f"{name}.a.1")) == [1]
    assert sequences(read(url, None, subject=f"{name}.*")) == [2]
    assert sequences(read(url, None, subject=f"{name}.>")) == [1, 2]
    with pytest.raises(NoMatchingStreamError, match="no stream has it") as none:
        read(url, None, subject=f"{name}.c")
    assert "'stream'" in str(none.value)
    create_stream(url, f"{name}X", f"{name}.x")
    with pytest.raises(NoMatchingStreamError, match=f"2 streams have it .{name}, {name}X"):
        read(url, None, subject=f"{name}.>")


def test_query_stays_with_its_stream(shared_server: NatsServer, name: str) -> None:
    """Another stream has the subject by now: the offset is of the first one."""
    url = shared_server.url
    create_stream(url, name)
    fill(url, name, 2)
    with new_query(url, subject=f"{name}.1") as query:
        query.read_new()
        offset = query.offset
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.2"]})
    create_stream(url, f"{name}B", f"{name}.1")
    with (
        pytest.raises(OffsetError, match=f"of stream {name}, the query reads {name}B"),
        new_query(url, offset=offset, subject=f"{name}.1") as query,
    ):
        query.read_new()
    with new_query(url, stream=name, offset=offset, filterSubjects=f"{name}.1") as query:
        assert query.read_new() == []


def test_filters(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create_stream(url, name)
    publish(url, [(f"{name}.{one}", b"", None) for one in ("a", "a.b", "c.d", "a", "e.f.g")])
    for filters, expected in {
        f"{name}.a": [1, 4],
        f"{name}.*": [1, 4],
        f"{name}.*.*, {name}.a": [1, 2, 3, 4],
        f"{name}.>": [1, 2, 3, 4, 5],
        ">": [1, 2, 3, 4, 5],
        f"{name}.never": [],
    }.items():
        assert sequences(read(url, name, filterSubjects=filters)) == expected, filters


def test_stream_subjects_changed(shared_server: NatsServer, name: str) -> None:
    """Messages of a former subject are read by a filter that matches it, and by no other."""
    url = shared_server.url
    create_stream(url, name, f"{name}.old.*")
    fill(url, name, 0)
    publish(url, ((f"{name}.old.{i % 2}", b"", None) for i in range(40)))
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new.*"]})
    publish(url, ((f"{name}.new.{i % 2}", b"", None) for i in range(40)))
    for size in (10, 1000):
        given = {"maxRowsPerTrigger": size, "minPartitions": 2}
        new = read(url, name, filterSubjects=f"{name}.new.*", **given)
        assert sequences(new) == list(range(41, 81))
        old = read(url, name, filterSubjects=f"{name}.old.1", **given)
        assert sequences(old) == list(range(2, 41, 2))
    assert sequences(read(url, name)) == list(range(1, 81))
    api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old.*"})
    with pytest.raises(
        ConfigurationError, match=r"expected a filter within S\d+\.new\.\*.*'filterSubjects'"
    ):
        read(url, name, filterSubjects=f"{name}.old.1")


def test_last_message_of_former_subject_expires(shared_server: NatsServer, name: str) -> None:
    """Nothing is wrong with a query that has read it, nor with its restart."""
    url = shared_server.url
    create_stream(url, name, f"{name}.old")
    publish(url, [(f"{name}.old", b"", None)])
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new"]})
    given = {"filterSubjects": f"{name}.old"}
    with new_query(url, stream=name, **given) as query:
        assert query.plan()
        api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old"})
        publish(url, [(f"{name}.new", b"", None)])
        assert query.read().records == []
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.*"]})
    with new_query(url, stream=name, **given) as query:
        publish(url, [(f"{name}.old", b"", None)])
        assert sequences(query.read_new()) == [3]
        api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new"]})
        api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old"})
        publish(url, [(f"{name}.new", b"", None)])
        assert query.read_new() == []
        offset = query.offset
    with new_query(url, stream=name, offset=offset, **given) as query:
        assert query.read_new() == []


def test_filter_outside_stream(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create_stream(url, name)
    with pytest.raises(
        ConfigurationError, match=r"'elsewhere\.\*' of stream .* has no subject that it matches"
    ):
        read(url, name, filterSubjects=f"{name}.a,elsewhere.*")
