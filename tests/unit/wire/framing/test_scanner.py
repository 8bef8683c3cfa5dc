"""The scanner and its definition: selection, equal results, no access outside of a block."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nats_stream_source.connection.connection import SCANNER_VARIABLE
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.parse import Field, Table
from nats_stream_source.zip_package import write_archive
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.unit.wire.reference.streams import ACK, STREAMS, msg, using

needs_compiled = pytest.mark.skipif(
    scanner.compiled_scan is None, reason="the compiled scanner is not built"
)
REPORT = """
from nats_stream_source.connection.connection import select_frame_scanner
from nats_stream_source.wire.framing import scanner
print(scanner.available(), select_frame_scanner(), scanner.selected())
"""


def run(code: str, *, path: Path = ROOT, **variables: str) -> str:
    given = {SCANNER_VARIABLE: "", "PYTHONPATH": str(path), **variables}
    return ran(sys.executable, "-c", code, cwd=path.parent, **given).stdout.strip()


# -- the selection ---------------------------------------------------------------------------------


@needs_compiled
def test_compiled_scanner_is_default() -> None:
    assert run(REPORT) == "('compiled', 'python') compiled compiled"


def test_variable_selects_scanner() -> None:
    for name in scanner.available():
        assert run(REPORT, **{SCANNER_VARIABLE: name}).endswith(f"{name} {name}")


def test_extension_missing_selects_definition() -> None:
    hidden = "import sys; sys.modules['nats_stream_source.wire.framing.compiled_scan'] = None\n"
    assert run(hidden + REPORT) == "('python',) python python"


@needs_compiled
def test_zip_file_has_compiled_scanner(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "package.zip")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for _ in range(2):  # the second process finds the modules that the first one has unpacked
        report = run(REPORT, path=archive, TMPDIR=str(scratch))
        assert report == "('compiled', 'python') compiled compiled"
    assert len(list(scratch.iterdir())) == 1


@needs_compiled
def test_zip_file_of_other_platform_uses_definition(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "package.zip")
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(tmp_path / "other.zip", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, b"not a library" if name.endswith(".so") else data)
    report = run(REPORT, path=tmp_path / "other.zip", TMPDIR=str(tmp_path))
    assert report == "('python',) python python"


@pytest.mark.parametrize("name", ["rust", "Compiled"])
def test_unknown_scanner_is_refused(name: str) -> None:
    before = scanner.selected()
    with pytest.raises(ConfigurationError, match=f"could not select frame scanner '{name}'"):
        scanner.select(name)
    assert scanner.selected() == before


def test_compiled_scanner_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "compiled_scan", None)
    with pytest.raises(ConfigurationError, match=r"this installation has python; .* C compiler"):
        scanner.select("compiled")


# -- equal results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", scanner.available())
@pytest.mark.parametrize(
    "sizes", [[1] * 5000, [50_000, *[0] * 20_000], [*[0] * 5000, 300_000], [70_000] * 3]
)
def test_tables_of_any_size(way: scanner.Scanner, sizes: list[int]) -> None:
    """Also where the first frames give a wrong estimate of the number of columns."""
    stream = b"".join(msg(b"a", i, bytes(size)) for i, size in enumerate(sizes))
    with using(way):
        table, position, needed = scanner.find_frames(stream)
    assert table[3].tolist() == list(range(len(sizes)))
    assert (position, needed) == (len(stream), 0)
    base = table if table.base is None else table.base
    assert base.nbytes <= 5 * table.nbytes + 64 * 8 * table.shape[0]


@needs_compiled
def test_growing_tables_are_copied_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = scanner.Columns.grow
    copied = []

    def count(columns: scanner.Columns, first: int, expected: int) -> None:
        copied.append(columns.count - first)
        grow(columns, first, expected)

    monkeypatch.setattr(scanner.Columns, "grow", count)
    stream = msg(b"a", 1, bytes(1 << 20)) + msg(b"a", 1, b"") * 100_000
    with using("compiled"):
        assert scanner.find_frames(stream)[0].shape[1] == 100_001
    assert copied
    assert sum(copied) < 2 * 100_001


# -- deliveries in sequence ------------------------------------------------------------------------

Row = tuple[int, int, int, int]  # sid, delivered, stream_seq, consumer_seq


def table_of(rows: list[Row]) -> Table:
    table = np.full((len(Field), len(rows)), -1, np.int64)
    table[[Field.SID, Field.DELIVERED, Field.STREAM_SEQ, Field.CONSUMER_SEQ]] = (
        np.array(rows, np.int64).reshape(-1, 4).T
    )
    return table


@needs_compiled
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], False),
        ([(4, 1, 7, 1)], True),
        ([(4, -1, -1, -1)], False),  # a frame without ACK numbers
        ([(4, 1, 7, 1), (4, 1, 9, 2), (4, 2, 10, 3)], True),
        ([(4, 1, 7, 1), (5, 1, 9, 2)], False),
        ([(4, 1, 7, 1), (4, -1, 9, 2)], False),
        ([(4, 1, 7, 1), (4, 1, 7, 2)], False),
        ([(4, 1, 7, 1), (4, 1, 6, 2)], False),
        ([(4, 1, 7, 1), (4, 1, 8, 3)], False),
        ([(4, 1, 7, 1), (4, 1, 8, 1)], False),
    ],
)
def test_deliveries_in_sequence(rows: list[Row], expected: bool) -> None:
    assert scanner.in_sequence(table_of(rows)) is expected


@needs_compiled
def test_rows_of_different_lengths_are_refused() -> None:
    rows = [np.ones(3, np.int64)] * 3
    for short in range(4):
        several = [*rows[:short], np.ones(2, np.int64), *rows[short:]]
        with pytest.raises(ValueError, match="could not compare sequences"):
            scanner.compiled_scan.in_sequence(*several)


@needs_compiled
def test_fields_of_compiled_scanner_are_those_of_table() -> None:
    frame_fields = {field.name: field.value for field in Field if field <= Field.DELIVERED}
    assert frame_fields == scanner.compiled_scan.FIELDS
    assert list(Field) == list(range(len(Field)))


# -- safety ----------------------------------------------------------------------------------------


@needs_compiled
@pytest.mark.parametrize(
    ("begin", "size", "rows", "count"),
    [(-1, 3, 16, 0), (4, 3, 16, 0), (0, 7, 16, 0), (0, 6, 15, 0), (0, 6, 16, 5), (0, 6, 16, -1)],
)
def test_positions_outside_of_block_or_table_are_refused(
    begin: int, size: int, rows: int, count: int
) -> None:
    table = np.empty((rows, 4), np.int64)
    with pytest.raises(ValueError, match=r"could not (scan bytes|append to column)"):
        scanner.compiled_scan.scan(b"PING\r\n", begin, size, table, count)


@needs_compiled
def test_tables_of_other_shapes_are_refused() -> None:
    scan_block = scanner.compiled_scan.scan
    for table in (np.empty((16, 4), np.int32), np.empty((4, 16), np.int64).T):
        with pytest.raises(ValueError, match=r"mismatch|contiguous"):
            scan_block(b"PING\r\n", 0, 6, table, 0)
    read_only = np.empty((16, 4), np.int64)
    read_only.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        scan_block(b"PING\r\n", 0, 6, read_only, 0)


@needs_compiled
@pytest.mark.parametrize("columns", [0, 1, 2, 3])
def test_full_table_ends_scan(columns: int) -> None:
    stream = msg(b"a", 1, b"x", ACK) * 3
    # The memory after the table must stay as it is.
    memory = np.full(16 * columns + 64, -7, np.int64)
    table = memory[: 16 * columns].reshape(16, columns)
    found = scanner.compiled_scan.scan(stream, 0, len(stream), table, 0)
    assert found == (columns, columns * len(stream) // 3, 0)
    assert (memory[16 * columns :] == -7).all()


@needs_compiled
@pytest.mark.skipif(sys.platform == "win32", reason="guarded pages are those of POSIX")
@pytest.mark.parametrize("name", STREAMS)
def test_memory_outside_block_is_not_read(name: str) -> None:
    """A stream that ends at any byte, between two pages that end the process if they are read."""
    code = (
        "from nats_stream_source.errors import ProtocolError\n"
        "from nats_stream_source.wire.framing.scanner import find_frames_compiled\n"
        "from tests.unit.wire.reference.fuzz_scanners import GuardedBlock\n"
        "from tests.unit.wire.reference.streams import STREAMS\n"
        f"stream = STREAMS[{name!r}]\n"
        "block = GuardedBlock(len(stream))\n"
        "for begin in range(len(stream)):\n"
        "    for end in {*range(begin, min(begin + 60, len(stream))), len(stream)}:\n"
        "        for place in (block.at_start, block.at_end):\n"
        "            try:\n"
        "                find_frames_compiled(place(stream[begin:end]))\n"
        "            except ProtocolError:\n"
        "                pass\n"
    )
    run(code)


@needs_compiled
@pytest.mark.skipif(sys.platform == "win32", reason="guarded pages are those of POSIX")
def test_fuzz_target_bounded_run() -> None:
    """In a process of its own, which a read outside of a block ends."""
    run(
        "from tests.unit.wire.reference.fuzz_scanners import fuzz_scanners\n"
        "fuzz_scanners(seed=1, cases=100_000)"
    )
