"""Draws ``overview.svg``, the picture of the README: from a put to a row of a Delta table.

``make docs`` writes it. The latency comes from the figures of ``benchmarks/latency.py``.
"""

from __future__ import annotations

from docs.front_page import figures, visible

PUTS, KEYS = 1_000, 4_000  # of :func:`docs.front_page.visible`
_WIDTH, _HEIGHT = 880, 326
_FIRST, _SPLIT = 1193, 4  # first sequence shown, sequences of a split
_SUPERSEDED = {1194, 1197, 1198, 1203}

_STYLE = """
  .page { fill: #f8fafc; stroke: #d5dde8 }
  .box { fill: #ffffff; stroke: #94a3b8; stroke-width: 1.3 }
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1e293b }
  .title { font-weight: 600; font-size: 14px } .small { font-size: 11.5px; fill: #56657a }
  .cell { font-size: 10.5px; text-anchor: middle } .mid { text-anchor: middle }
  .gone { fill: none; stroke: #94a3b8; stroke-dasharray: 3 2 } .gone-text { fill: #7c8aa0 }
  .a { fill: #bfdbfe } .b { fill: #bbf7d0 } .c { fill: #fde68a }
  .line { stroke: #64748b; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  .tip { fill: #64748b }
  .key { font-size: 22px; font-weight: 700; fill: #1d4ed8 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0f172a; stroke: #334155 } .box { fill: #1e293b; stroke: #64748b }
    text { fill: #e2e8f0 } .small, .gone-text { fill: #a3b1c6 } .gone { stroke: #64748b }
    .a { fill: #1d4ed8 } .b { fill: #15803d } .c { fill: #a16207 }
    .line { stroke: #94a3b8 } .tip { fill: #94a3b8 } .key { fill: #93c5fd }
  }
"""


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{words}</text>'


def _box(x: float, y: float, width: float, height: float, style: str = "box") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{style}"/>'


def _line(path: str) -> str:
    return f'<path d="{path}" class="line"/>'


def _stream() -> list[str]:
    """The sequences of the bucket's stream: three splits, some sequences superseded."""
    parts = [_box(20, 48, 250, 222), _text(36, 72, "bucket (a stream)", "title")]
    for i in range(3 * _SPLIT):
        split, column = divmod(i, _SPLIT)
        x, y, sequence = 36 + column * 55, 92 + split * 54, _FIRST + i
        gone = sequence in _SUPERSEDED
        parts += [
            _box(x, y, 50, 30, "gone" if gone else "abc"[split]),
            _text(x + 25, y + 19, str(sequence), "cell gone-text" if gone else "cell"),
        ]
    return [*parts, _text(36, 258, "dashed: superseded revisions", "small")]


def _readers() -> list[str]:
    """One reader for each split, and the way of its rows into the table."""
    parts = []
    for split in range(3):
        y = 92 + split * 54
        start = _FIRST - 1 + split * _SPLIT
        parts += [
            _line(f"M 264 {y + 15} H 342"),
            _box(350, y - 6, 190, 42),
            _text(364, y + 11, f"split ({start}, {start + _SPLIT}]"),
            _text(364, y + 27, "ordered consumer → Arrow", "small"),
            _line(f"M 540 {y + 15} C 590 {y + 15} 575 {139 + split * 10} 622 {139 + split * 10}"),
        ]
    return [*parts, _text(445, 72, "executors, in parallel", "title mid")]


def _table() -> list[str]:
    """The Delta table: a row for each key."""
    parts = [
        _box(630, 48, 230, 184),
        _text(646, 72, "Delta table", "title"),
        _text(646, 216, "one row for each key", "small"),
    ]
    rows = (("plane.1", "1201", "c"), ("plane.2", "1196", "a"), ("plane.3", "1200", "b"))
    for i, (key, revision, style) in enumerate(rows):
        y = 92 + i * 37
        parts += [
            _box(646, y, 198, 28, style),
            _text(658, y + 18, key),
            _text(790, y + 18, revision),
        ]
    return parts


def overview() -> str:
    """The picture as SVG."""
    case = visible(figures()["latency"])
    caption = (
        "From a NATS key-value bucket to a Delta table: splits of the stream are read in parallel"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{caption}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="7" refY="4" orient="auto" '
        'markerUnits="userSpaceOnUse"><path d="M 0 0 L 9 4 L 0 8 z" class="tip"/></marker></defs>',
        _box(0.5, 0.5, _WIDTH - 1, _HEIGHT - 1, "page"),
        _text(20, 30, "nats-server", "small"),
        _text(350, 30, "Spark", "small"),
        *_stream(),
        *_readers(),
        *_table(),
        _text(350, 266, "checkpoint: stream_seq 1204", "title"),
        _text(350, 284, "the only state of a query;", "small"),
        _text(350, 300, "the server stores nothing of it", "small"),
        _text(630, 272, f"{case['p50']:.0f} ms", "key"),
        _text(630, 292, "from put to visible row, median", "small"),
        _text(630, 308, f"p99 {case['p99']:.0f} ms, {PUTS:,} puts/s, {KEYS:,} keys", "small"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
