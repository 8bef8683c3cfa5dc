"""Columns are encoded and decoded as single keys and values are."""

from __future__ import annotations

import base64
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from nats_stream_source.wire.codec import columns
from nats_stream_source.wire.codec.columns import (
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
)
from nats_stream_source.wire.codec.definition import (
    Chain,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from nats_stream_source.wire.framing import scanner
from tests.unit.wire.codec.kvcodec import CHAINS, recorded

_CHAINS = sorted({chain for chain in CHAINS.values() if chain})
_VALUE_CHAINS: list[Chain] = [("base64",), ("base64", "base64")]
_KEYS = [key for _, *keys, _, _ in recorded("keys") for key in keys if isinstance(key, str)] + [
    stored for _, stored, *_ in recorded("stored_keys")
]
_PARTS = [
    "a",
    "YQ",
    "YR",
    "_root_",
    "X3Jvb3Rf",
    "w6k",
    "/",
    ".",
    "*",
    "-_",
    "+",
    "=",
    "é",
    "\n",
    "",
]


@pytest.fixture(autouse=True, params=scanner.available())
def selected(request: pytest.FixtureRequest) -> Iterator[str]:
    """The way of this installation, and the definition."""
    before = scanner.selected()
    scanner.select(request.param)
    yield request.param
    scanner.select(before)


def texts(seed: int, count: int) -> list[str]:
    """Keys of the vectors, or of their parts: decodable ones, and others of any kind."""
    random.seed(seed)
    made = ["".join(random.choices(_PARTS, k=random.randrange(1, 7))) for _ in range(count // 2)]
    return made + random.choices(_KEYS, k=count - len(made))


def encoded(chain: Chain, keys: list[str]) -> list[str]:
    return [encode_key(chain, key) for key in keys]


@pytest.mark.parametrize("chain", _CHAINS, ids=",".join)
@pytest.mark.parametrize("seed", range(20))
def test_keys(chain: Chain, seed: int) -> None:
    keys = texts(seed, 200)
    for some in (keys, encoded(chain, keys), keys[:1], [key for key in keys if key.isascii()], []):
        column = pa.array(some, pa.string())
        assert encode_keys(chain, column).to_pylist() == encoded(chain, some)
        decoded = decode_keys(chain, column)
        decoded.validate(full=True)
        assert decoded.to_pylist() == [decode_key(chain, key) for key in some]


@pytest.mark.parametrize("chain", _CHAINS, ids=",".join)
def test_keys_that_all_decode(chain: Chain) -> None:
    """The usual case: each stored key is decodable; also of a part of a longer column."""
    keys = [key for key in encoded(chain, texts(1, 400)) if decode_key(chain, key) is not None]
    assert len(keys) > 50
    expected = [decode_key(chain, key) for key in keys]
    column = pa.array(["?", *keys, "?"], pa.string())
    assert decode_keys(chain, column.slice(1, len(keys))).to_pylist() == expected
    ends = decode_key(chain, "?")
    assert decode_keys(chain, column).to_pylist() == [ends, *expected, ends]


@pytest.mark.parametrize("chain", _VALUE_CHAINS, ids=",".join)
@pytest.mark.parametrize("seed", range(20))
def test_values(chain: Chain, seed: int) -> None:
    random.seed(seed)
    values = [random.randbytes(random.randrange(0, 300)) for _ in range(100)]
    stored = [encode_value(chain, value) for value in values]
    odd = [base64.b64decode(given) for _, _, given, *_ in recorded("values")]
    odd += [text.encode() for text in texts(seed, 100)]
    for some in ([*stored, None], [*stored, *odd, None], [], [None]):
        column = pa.array(some, pa.binary())
        decoded = decode_values(chain, column)
        decoded.validate(full=True)
        assert decoded.to_pylist() == [v if v is None else decode_value(chain, v) for v in some]
    assert encode_values(chain, pa.array([*values, None])).to_pylist() == [*stored, None]
    assert decode_values(chain, pa.array(["?", *stored], pa.binary())[1:]).to_pylist() == values


needs_compiled = pytest.mark.skipif(
    columns.compiled_base64 is None, reason="the compiled decoder is not built"
)


@needs_compiled
def test_compiled_decoder_takes_columns_that_all_decode(
    selected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition is not called, so rows do not become Python objects."""
    keys = encoded(("path", "base64"), ["/", "/a/b c", "d/Ω", "e" * 100])
    calls: list[str] = []
    monkeypatch.setattr(columns, "decode_key", lambda chain, key: calls.append(key))
    monkeypatch.setattr(columns, "decode_value", lambda chain, value: calls.append(value))
    found = decode_keys(("path", "base64"), pa.array(keys))
    values = decode_values(("base64",), pa.array([b"YQ", None, b""]))
    if selected == "compiled":
        assert found.to_pylist() == ["/", "/a/b c", "d/Ω", "e" * 100]
        assert (values.to_pylist(), calls) == ([b"a", None, b""], [])
    else:
        assert len(calls) == 6


@needs_compiled
@pytest.mark.parametrize(
    ("offsets", "decoded_offsets", "room", "problem"),
    [
        ([], 0, 8, "expected equal numbers of at least 1"),
        ([0, 4], 3, 8, "expected equal numbers of at least 1"),
        ([0, 9], 2, 9, "their offsets are not within 8 bytes"),
        ([-4, 4], 2, 8, "their offsets are not within 8 bytes"),
        ([4, 0], 2, 8, "their offsets are not within 8 bytes"),
        ([0, 8], 2, 7, "there is room for 7 bytes, expected 8"),
        ([0, 4, 3, 8], 4, 8, "the offsets of row 1 do not rise"),
        ([0, 12, 8], 3, 8, "the offsets of row 0 do not rise"),
    ],
)
def test_compiled_decoder_refuses_rows_outside_data(
    offsets: list[int], decoded_offsets: int, room: int, problem: str
) -> None:
    data = np.frombuffer(b"YWJjZGVm", np.uint8)
    arguments = (np.empty(decoded_offsets, np.int32), np.empty(room, np.uint8))
    with pytest.raises(ValueError, match=problem):
        columns.compiled_base64.decode(data, np.array(offsets, np.int32), False, *arguments)


@needs_compiled
def test_compiled_decoder_stays_within_its_memory() -> None:
    """Beside pages that must not be read or written: a mistake ends the process."""
    code = """
import ctypes, mmap, random
import numpy as np
from nats_stream_source.wire.codec import compiled_base64, definition

def beside_page(size):
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + 2 * page), page, 0) == 0
    return np.frombuffer(memory, np.uint8, size, 2 * page - size)

random.seed(4)
letters = b"ABCDabcd0189-_..=+/" + bytes([0, 255])
for _ in range(3000):
    rows = [bytes(random.choices(letters, k=random.randrange(12))) for _ in range(4)]
    rows += [definition.encode_value(("base64",), random.randbytes(random.randrange(30)))]
    random.shuffle(rows)
    data = beside_page(sum(map(len, rows)))
    data[:] = np.frombuffer(b"".join(rows), np.uint8)
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    for tokens in (False, True):
        memory = beside_page(data.size)
        compiled_base64.decode(data, offsets, tokens, np.empty(6, np.int32), memory)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
