"""Renders the figures as tables of the page ``docs/internals/performance_method.md``.

The page is prose with generated blocks. The text between ``<!-- bench: NAME -->`` and
``<!-- /bench -->`` is replaced, the rest is unchanged. This module creates the text and does no
I/O; ``benchmarks.support.plots`` creates the plots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
"""The JSON of one benchmark: its results, ``machine``, ``others`` and ``date``."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value:,.0f}/s"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def environment(figures: Figures) -> str:
    """The machine of the benchmark."""
    host = figures["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    return f"{host['cores']} cores, Python {host['python']}, {packages}"


def _conditions(figures: Figures) -> str:
    """One line: the date, and the load of other processes."""
    line, others = figures.get("date", ""), figures.get("others", {})
    if "share" in others:
        line += f", other processes used {others['share']:.0%} of the CPU time"
    return f"*{line}.*"


def _reader(figures: Figures) -> str:
    head = ["value size", "headers", "bare socket", "reader", "reader ÷ bare socket"]
    head += ["by CPU time", "÷ nats-py callback", "CPU ns/row, reader + server"]
    rows = (
        [
            f"{one['size']:,} B",
            _yes(one["headers"]),
            _rate(one["bare"]["rate"]),
            _rate(one["reader"]["rate"]),
            f"**{one['ratio']:.2f}**",
            f"{one['cpu_ratio']:.2f}",
            f"{one['over_callback']:.1f}",
            f"{one['reader']['own_cpu']:.0f} + {one['reader']['server_cpu']:.0f}",
        ]
        for one in figures["reader"]
    )
    return table(head, rows)


def _spark(figures: Figures) -> str:
    rows = []
    most = max(one["rows"] for outcome in figures["spark"] for one in outcome["results"])
    for outcome in figures["spark"]:
        ours = {one["sink"]: one for one in outcome["results"] if one["source"] == "nats_kv"}
        for one in sorted(outcome["results"], key=lambda one: str(one["sink"])):
            if one["sink"] != "noop" and one["rows"] < most:
                continue
            mine, cpu = ours[one["sink"]], executor_cpu(one)
            rows.append(
                [
                    f"{one['rows']:,}",
                    f"{outcome['size']:,} B",
                    one["sink"],
                    one["source"],
                    _rate(one["rate"]),
                    f"{mine['rate'] / one['rate']:.2f}",
                    f"{cpu:,.0f}",
                    f"{executor_cpu(mine) / cpu:.2f}" if cpu else "",
                ]
            )
    head = ["rows", "value size", "sink", "source", "rate", "nats_kv ÷ it"]
    return table([*head, "executor CPU ns/row", "nats_kv ÷ it, CPU"], rows)


def executor_cpu(result: Mapping[str, Any]) -> float:
    """CPU nanoseconds per row of Python workers and JVM."""
    cpu = result["cpu_ns_per_row"]
    return float(cpu.get("python", 0) + cpu.get("jvm", 0))


def _latency(figures: Figures) -> str:
    rows = (
        [
            f"{one['rate']:,}",
            one["way"],
            one["source"],
            f"{one['p50']:.0f} / {one['p99']:.0f} ms",
            "" if one["ratio"] is None else f"**{one['ratio']:.2f}**",
            f"{one['gap']:.0f} ms",
        ]
        for one in figures["latency"]
        if one["way"] == "configured" or one["rate"] == 1_000
    )
    return table(["puts/s", "session", "source", "p50 / p99", "p50 ÷ Kafka's", "gap"], rows)


def _freshness(figures: Figures) -> str:
    cases: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for one in figures["freshness"]:
        cases.setdefault((one["keys"], one["rate"]), {})[one["way"]] = one
    ways = list(dict.fromkeys(one["way"] for one in figures["freshness"]))
    rows = []
    for (keys, rate), found in cases.items():
        measured = [found.get(way) for way in ways]
        cells = [f"{one['p50']:,.0f} / {one['p99']:,.0f} ms" if one else "" for one in measured]
        rows.append([f"{keys:,}", f"{rate:,}", *cells])
    puts = table(["keys", "puts/s", *(f"{way}, p50 / p99" for way in ways)], rows)
    merges: dict[int, dict[str, str]] = {}
    for one in figures["merge"]:
        merges.setdefault(one["keys"], {})[one["engine"]] = f"{one['median']:.2f} s"
    engines = list(dict.fromkeys(one["engine"] for one in figures["merge"]))
    merged = ([f"{k:,}", *(found.get(one, "") for one in engines)] for k, found in merges.items())
    head = [f"keys, merge of {figures['merge'][0]['rows']:,} rows", *engines]
    return f"{puts}\n\n{table(head, merged)}"


def _commits(figures: Figures) -> str:
    rows = []
    for one in figures["commits"]:
        written = one["data"] + one["vectors"] + one["log"]
        rows.append(
            [
                f"{one['keys']:,}",
                f"{one['commits']:,} of {one['rows']:,}",
                f"{one['p50']:,.0f} / {one['p99']:,.0f} ms",
                f"**{written:.1f}** / **{written + one['upkeep']:.1f}**",
                f"{one['files']:,} (most {one['most_files']:,})",
                f"{one['opened']:,.0f} ms",
                f"{one['built']:.1f} s, {one['index']:.0f} B",
                f"{one['memory'] >> 20:,} MiB",
            ]
        )
    head = ["keys", "commits of rows", "merge, p50 / p99", "written ÷ changed / with upkeep"]
    return table([*head, "files", "open by delta-rs", "index: built, a key", "peak memory"], rows)


def _history(figures: Figures) -> str:
    one = figures["history"]
    cases = {
        f"merge of {one['rows']:,} rows": "",
        f"put → visible row at {one['rate']:,} puts/s": "visible_",
    }
    rows = (
        [
            what,
            *(f"{one[f'{name}p50_{of}']:,.0f} / {one[f'{name}p99_{of}']:,.0f} ms" for of in (1, 2)),
            f"**{one[f'{name}ratio']:.2f}**",
        ]
        for what, name in cases.items()
    )
    return table([f"{one['keys']:,} keys", "type 1, p50 / p99", "type 2", "p50 ÷ type 1's"], rows)


def _writing(figures: Figures) -> str:
    results = figures["writing"]
    bare, *ways = [way for way in WRITERS if any(way in one["ways"] for one in results)]
    rows = (
        [
            f"{one['size']:,} B",
            _yes(one["headers"]),
            _rate(one["ways"][bare]["rate"]),
            *(f"{one['ratio'][way]:.2f}" if way in one["ways"] else "" for way in ways),
        ]
        for one in results
        if one["headers"] == one["ids"]
    )
    head = ["value size", "headers and message ids", bare, *(f"{way} ÷ it" for way in ways)]
    text = table(head, rows)
    if "spark" not in figures:
        return text
    rates = {(one["sink"], one["tasks"]): one["rate"] for one in figures["spark"]}
    sinks = (
        [
            one["sink"],
            str(one["tasks"]),
            _rate(one["rate"]),
            f"{rates['nats_kv', one['tasks']] / one['rate']:.2f}",
            " + ".join(f"{one['cpu'][role]:,.0f}" for role in ("server", "python", "jvm")),
        ]
        for one in figures["spark"]
    )
    head = ["sink", "tasks", "rate", "nats_kv ÷ it", "CPU ns/row: server + Python + JVM"]
    return f"{text}\n\n{table(head, sinks)}"


WRITERS = ("bare socket", "BatchPublisher", "sink")
"""The clients of ``benchmarks.writing``; the first is the baseline."""


def _planner(figures: Figures) -> str:
    planned = (
        [
            one["filters"],
            one["where"],
            "" if one["limit"] is None else f"{one['limit']:,}",
            f"{one['p50']:.1f} / {one['worst']:.1f} ms",
            str(one["requests"]),
        ]
        for one in figures["planned"]
        if one["where"] in ("beginning", "99 %")
    )
    head = ["filters", "start position", "limit", "p50 / maximum", "requests"]
    return table(head, planned)


def _several(figures: Figures) -> str:
    idle, buckets = figures["idle"], figures["buckets"]
    rows = [["idle query", f"{idle['planner']:.1%} of a core", f"{idle['requests']:.1f}/s"]]
    rows += [
        [
            f"planning after a write to {one['touched']:,} buckets",
            f"{one['p50']:.0f} ms, at most {one['worst']:.0f} ms",
            f"{one['requests']:,}",
        ]
        for one in figures["planned"]
    ]
    text = table([f"{buckets:,} buckets", "", "requests"], rows)
    ratios = f"First read, {buckets:,} buckets ÷ one: without Spark **{figures['ratio']:.2f}**"
    if "spark_ratio" in figures:
        ratios += f", query in Spark **{figures['spark_ratio']:.2f}**"
    return f"{text}\n\n{ratios}."


def _lookup(figures: Figures) -> str:
    tasks = table(
        ["keys of the bucket", "look-ups in one task", "CPU for each, task + server"],
        (
            [
                f"{one['keys']:,}",
                f"**{_rate(one['rate'])}**",
                f"{one['own_cpu']:,.0f} + {one['server_cpu']:,.0f} ns",
            ]
            for one in figures["tasks"]
        ),
    )
    runs = (
        [
            f"{one['keys']:,}",
            f"{one['rows']:,}",
            f"{one['lookup']:.2f} s",
            f"{one['join']:.2f} s",
            f"**{one['join'] / one['lookup']:.1f}**",
        ]
        for one in figures["spark"]
    )
    head = ["keys of the bucket", "rows", "`lookup`", "join", "join ÷ `lookup`"]
    return f"{tasks}\n\n{table(head, runs)}" if figures["spark"] else tasks


SECTIONS: Mapping[str, tuple[str, Callable[[Figures], str]]] = {
    "reader": ("One reader against a bare socket", _reader),
    "spark": ("End to end in Spark, compared with Spark's Kafka source", _spark),
    "latency": ("Latency from put to `foreachBatch` and to a table", _latency),
    "freshness": ("Freshness of a Delta table: from put to visible row", _freshness),
    "commits": ("Many commits into one table by deletion vectors", _commits),
    "history": ("A history (SCD type 2), compared with the newest entries (type 1)", _history),
    "writing": ("Writing, compared with a bare socket and Spark's Kafka sink", _writing),
    "planner": ("Planning", _planner),
    "several": ("Many buckets in one query", _several),
    "lookup": ("Look-ups by key, compared with a join", _lookup),
}
"""The title of each benchmark, and the function that renders its table."""


def block(name: str, figures: Figures, plots: Sequence[str] = ()) -> str:
    """The text between the comments of a block; ``plots`` are paths, relative to the page."""
    title, text = SECTIONS[name]
    pictures = "".join(f"![{title}]({path})\n\n" for path in plots)
    return f"\n{text(figures)}\n\n{pictures}{_conditions(figures)}\n\n"


def replace_block(page: str, name: str, content: str) -> str:
    """``page`` with the block ``name`` replaced, or appended under a heading."""
    begin, end = f"<!-- bench: {name} -->", "<!-- /bench -->"
    new = f"{begin}\n{content}{end}"
    found = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    if found.search(page):
        return found.sub(lambda _: new, page, count=1)
    return f"{page.rstrip()}\n\n## {SECTIONS[name][0]}\n\n{new}\n"
