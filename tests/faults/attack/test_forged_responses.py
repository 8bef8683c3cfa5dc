"""Forged responses of JetStream's API.

A real server's responses pass through a proxy that damages one at a time: each place in each kind
of response, by every value that a place of JSON can have, and the whole of it. A query that
receives one reads the right rows, or fails with an error of this package.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nats_stream_source.errors import NatsSourceError
from tests.faults.attack.forged_frames import KINDS, ForgedReplies, payload
from tests.support.attack_target import FORMATS, PATIENCE
from tests.support.proxy.fault_proxy import Proxy

BUCKET = "attacked"
ROWS = 40  # more than a small range: read by a consumer
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    2**64,
    "",
    "x",
    "2026-13-45T00:00:00Z",
    "9999-12-31T23:59:59Z",
    [],
    [{}],
    {},
    {"a": 1},
)
WHOLE = (
    b"",
    b"no JSON",
    b"null",
    b"5",
    b'"text"',
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b'{"error": 5}',
    b'{"error": {}}',
    b'{"error": {"code": "many", "err_code": [], "description": {}}}',
    b'{"error": {"code": 404, "err_code": 10059}}',
    b"[" + b"0," * (4 << 20) + b"0]",
)


def places(found: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, from the outside in."""
    if at:
        yield at
    children: Any = ()
    if isinstance(found, dict):
        children = found.items()
    elif isinstance(found, list):
        children = enumerate(found)
    for name, child in children:
        yield from places(child, (*at, name))


def changed(found: Any, at: tuple[Any, ...], value: Any) -> Any:
    """``found`` with another value at a place; Ellipsis leaves it out."""
    other = copy.deepcopy(found)
    inner = other
    for name in at[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return other


@pytest.fixture(scope="module")
def sound(proxy: Proxy) -> dict[str, bytes]:
    """One valid response of each kind."""
    found: dict[str, bytes] = {}

    def look(frame: bytes) -> bool:
        for kind, name in KINDS.items():
            if name.encode() in payload(frame)[:120]:
                found.setdefault(kind, payload(frame))
        return True

    proxy.verdict = look
    FORMATS["nats_kv"](proxy.url, BUCKET, None)
    FORMATS["nats_kv"](proxy.url, BUCKET, None, startSequence=ROWS - 3)
    assert set(found) == set(KINDS)
    return found


def outcome(
    proxy: Proxy,
    kind: str,
    damage: Callable[[bytes], bytes],
    first: int = 1,
    reading: str = "nats_kv",
) -> str:
    """The outcome of a query that receives forged responses: ``rows``, or the name of its error."""
    for patience in PATIENCE:
        liar = ForgedReplies(kind, damage, first)
        found = _outcome(proxy, liar, reading, small=kind == "message", patience=patience)
        if liar.done or first > 1:
            return found
    raise AssertionError(f"no answer was damaged: {found}")


def _outcome(
    proxy: Proxy,
    liar: ForgedReplies,
    reading: str = "nats_kv",
    *,
    small: bool = False,
    patience: float,
) -> str:
    options = {"startSequence": ROWS - 3} if small else {}
    times = {"requestTimeout": patience, "connectTimeout": 0.5 * patience}
    proxy.verdict = liar
    try:
        rows = FORMATS[reading](proxy.url, BUCKET, None, **times, **options)
    except NatsSourceError as error:
        return type(error).__name__
    finally:
        proxy.verdict = lambda frame: True
    expected = range(ROWS - 3 if small else 1, ROWS + 1)
    assert [seq for seq, _ in rows] == list(expected)
    # What is asked for one by one has its value in the answer, which is the lie.
    assert small or [value for _, value in rows] == [b"%d" % (seq - 1) for seq in expected]
    return "rows"


# Who reads current values asks for no single message, unless some are overtaken.
ASKED = [
    (reading, kind)
    for reading in FORMATS
    for kind in KINDS
    if kind != "message" or reading not in ("batch", "kv current")
]


@pytest.mark.parametrize(("reading", "kind"), ASKED)
@pytest.mark.parametrize("whole", WHOLE, ids=lambda text: f"{text[:12]!r}, {len(text)}")
def test_invalid_response_is_refused(
    proxy: Proxy, sound: dict[str, bytes], reading: str, kind: str, whole: bytes
) -> None:
    # That a consumer is deleted is not waited for at any price: the server does it by itself.
    found = outcome(proxy, kind, lambda answer: whole, reading=reading)
    assert found != "rows" or kind == "deletion"


@pytest.mark.parametrize("value", [..., *VALUES], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_response_damaged_at_every_position(
    proxy: Proxy, sound: dict[str, bytes], kind: str, value: Any
) -> None:
    for at in places(json.loads(sound[kind])):
        if kind == "consumer" and at[0] == "config":
            continue  # never looked at; the server echoes it

        later = kind == "stream_info" and value in (None, -1)
        for first in (1, 3) if later else (1,):
            name = ".".join(map(str, at))
            try:
                outcome(proxy, kind, damaged(at, value), first)
            except Exception as error:
                raise AssertionError(f"{name} = {value!r}, from answer {first} on") from error


def damaged(at: tuple[Any, ...], value: Any) -> Callable[[bytes], bytes]:
    return lambda answer: json.dumps(changed(json.loads(answer), at, value)).encode()


@pytest.mark.parametrize("at", [("state", "first_seq"), ("state", "last_seq"), ("created",)])
def test_impossible_response_is_reported(proxy: Proxy, at: tuple[str, ...]) -> None:
    liar = ForgedReplies("stream_info", damaged(at, -1))
    assert _outcome(proxy, liar, patience=PATIENCE[-1]) == "ProtocolError"
    assert liar.done
