"""Renders the figures as tables of the page ``docs/internals/performance_method.md``.

The page is prose with generated blocks. The text between ``<!-- bench: NAME -->`` and
``<!-- /bench -->`` is replaced, the rest is unchanged. A block that the page lacks is appended
under a new heading. This module creates the text and does no I/O; ``benchmarks.support.plots``
creates the plots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
"""The JSON of one benchmark: its results, ``machine``, ``others`` and ``date``."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value:,.0f}/s"


def environment(figures: Figures) -> str:
    """One line: the machine of the benchmark, and the load of other processes."""
    host, others = figures["machine"], figures.get("others", {})
    packages = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    line = f"{figures.get('date', '')}: {host['cores']} cores, Python {host['python']}, {packages}"
    if "share" in others:
        line += (
            f"; load before the run {others['load']:.2f}, other processes used "
            f"{others['share']:.0%} of the CPU time during it"
        )
    return f"*{line}.*"


def _reader(figures: Figures) -> str:
    text = _reader_table(figures["reader"])
    if figures.get("pinned"):
        text += "\n\nServer and reader pinned to one core each:\n\n"
        text += _reader_table(figures["pinned"])
    return text


def _reader_table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"{one['size']:,} B",
            "yes" if one["headers"] else "no",
            _rate(one["bare"]["rate"]),
            f"{_rate(one['reader']['rate'])} ({one.get('scanner', 'python')})",
            _rate(one["python"]["rate"]) if one.get("python") else "",
            f"**{one['ratio']:.2f}**",
            f"{min(one['rounds']):.2f} to {max(one['rounds']):.2f}",
            f"{one['cpu_ratio']:.2f}",
            f"{one['over_callback']:.1f} ({_rate(one['callback'])})",
            f"{one['over_watch']:.0f} ({_rate(one['watch'])}"
            + (f", lost {one['watch_lost']:,})" if one["watch_lost"] else ")"),
            f"{one['bare']['own_cpu']:.0f} + {one['bare']['server_cpu']:.0f}",
            f"{one['reader']['own_cpu']:.0f} + {one['reader']['server_cpu']:.0f}",
            f"{one['python']['own_cpu']:.0f} + {one['python']['server_cpu']:.0f}"
            if one.get("python")
            else "",
        ]
        for one in results
    ]
    head = [
        "value size",
        "headers",
        "bare socket",
        "reader (frame scanner)",
        "reader, definition",
        "reader ÷ bare socket",
        "range of rounds",
        "ratio by CPU time",
        "reader ÷ nats-py callback",
        "reader ÷ nats-py KV watch",
        "CPU ns/row, bare socket + server",
        "CPU ns/row, reader + server",
        "CPU ns/row, reader with the definition + server",
    ]
    return table(head, rows)


def _jetstream(figures: Figures) -> str:
    rows = [
        [
            one["what"],
            one["way"],
            f"{one['messages']:,}",
            _rate(one["rate"]),
            f"{one['over_bare']:.2f}",
            f"{one['over_nats_py']:.1f}",
            f"{one['lost']:,}" if one["lost"] else "",
        ]
        for one in figures["jetstream"]["results"]
    ]
    return table(
        ["operation", "client", "messages", "rate", "÷ bare socket", "÷ nats-py", "lost"], rows
    )


_SPARK_ROLES = ("server", "planner", "python", "jvm")


def _spark(figures: Figures) -> str:
    rows = []
    for outcome in figures["spark"]:
        rates = {(one["source"], one["sink"]): one["rate"] for one in outcome["results"]}
        executors = {(one["source"], one["sink"]): executor_cpu(one) for one in outcome["results"]}
        for one in sorted(outcome["results"], key=lambda one: str(one["sink"])):
            ratio = rates["nats_kv", one["sink"]] / one["rate"]
            cold = _rate(one["rows"] / one["cold"]["seconds"]) if one["cold"] else ""
            cpu = one["cpu_ns_per_row"]
            executor = executors[one["source"], one["sink"]]
            executor_ratio = executors["nats_kv", one["sink"]] / executor if executor else 0.0
            source, over_bare = one["source"], ""
            if source == "nats_kv" and "bare" in outcome:
                source += f" ({outcome['scanner']})"
                over_bare = f"{one['rate'] / outcome['bare']:.2f} ({_rate(outcome['bare'])})"
            rows.append(
                [
                    f"{one['rows']:,}",
                    f"{outcome['size']:,} B",
                    one["sink"],
                    source,
                    _rate(one["rate"]),
                    _rate(one["batch_rate"]),
                    cold,
                    f"{ratio:.2f}",
                    over_bare,
                    " + ".join(f"{cpu.get(role, 0):,.0f}" for role in _SPARK_ROLES),
                    f"{executor:,.0f}",
                    f"{executor_ratio:.2f}",
                ]
            )
    head = [
        "rows",
        "value size",
        "sink",
        "source (frame scanner)",
        "warm",
        "micro-batch alone",
        "cold",
        "nats_kv ÷ this source",
        "÷ bare socket without Spark",
    ]
    head += ["CPU ns/row: server + planner + workers + JVM", "executor CPU ns/row: workers + JVM"]
    return table([*head, "nats_kv ÷ this source, executor CPU"], rows)


def executor_cpu(result: Mapping[str, Any]) -> float:
    """CPU nanoseconds per row of Python workers and JVM."""
    cpu = result["cpu_ns_per_row"]
    return float(cpu.get("python", 0) + cpu.get("jvm", 0))


def _latency(figures: Figures) -> str:
    rows = [
        [
            f"{one['rate']:,}",
            one["way"],
            one["source"],
            f"{one['p50']:.0f} / {one['p99']:.0f} ms",
            "" if one["ratio"] is None else f"**{one['ratio']:.2f}**",
            f"{one['gap']:.0f} ms",
            f"{one['entries'] / one['batches']:,.0f}",
            ", ".join(f"{part} {ms:.0f}" for part, ms in one["parts"].items()),
        ]
        for one in figures["latency"]
    ]
    head = ["puts/s", "session", "source", "p50 / p99", "p50 ÷ Kafka's", "gap", "entries in it"]
    return table([*head, "parts of a micro-batch, medians in ms"], rows)


def _freshness(figures: Figures) -> str:
    cases: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for one in figures["freshness"]:
        cases.setdefault((one["keys"], one["rate"]), {})[one["way"]] = one
    ways = list(dict.fromkeys(one["way"] for one in figures["freshness"]))
    rows = []
    for (keys, rate), found in cases.items():
        measured = [found.get(way) for way in ways]
        cells = [f"{one['p50']:,.0f} / {one['p99']:,.0f} ms" if one else "" for one in measured]
        behind = ", ".join(f"{one['behind']:.1f} s" for one in measured if one)
        rows.append([f"{keys:,}", f"{rate:,}", *cells, behind])
    names = {"foreachBatch": "bare `foreachBatch`", "spark": "Spark MERGE"}
    head = [
        "keys",
        "puts/s",
        *(f"{names.get(way, way)}, p50 / p99" for way in ways),
        "last put visible after",
    ]
    merges = [
        [
            f"{one['keys']:,}",
            f"{one['table_bytes'] >> 20:,} MiB",
            one["engine"],
            f"{one['median']:.2f} s",
            f"{one['slowest']:.2f} s",
        ]
        for one in figures["merge"]
    ]
    rows_merged = f"{figures['merge'][0]['rows']:,}"
    second = ["keys of the table", "data files", "engine", f"merge of {rows_merged} rows, median"]
    second += ["slowest"]
    return f"{table(head, rows)}\n\nOne merge by the size of the table:\n\n{table(second, merges)}"


def _planner(figures: Figures) -> str:
    planned = [
        [
            one["filters"],
            one["where"],
            "" if one["limit"] is None else f"{one['limit']:,}",
            f"{one['p50']:.1f} ms",
            f"{one['worst']:.1f} ms",
            str(one["requests"]),
            str(one["splits"]),
            f"{one['rows']:,}",
        ]
        for one in figures["planned"]
    ]
    resting = [
        [
            one["filters"],
            f"{one['writes']}/s",
            f"{one['planner']:.2%}",
            f"{one['server'] - one['baseline']:.2%}",
            f"{one['requests']:.0f}/s",
        ]
        for one in figures["resting"]
    ]
    head = ["filters", "start position", "limit", "p50", "maximum", "requests", "splits", "rows"]
    idle = [
        "filters",
        "other writes",
        "planner CPU, of a core",
        "server CPU, of a core",
        "requests",
    ]
    return table(head, planned) + "\n\nAn idle query:\n\n" + table(idle, resting)


def _writing(figures: Figures) -> str:
    results = figures["writing"]
    ways = list(dict.fromkeys(way for one in results for way in one["ways"]))
    bare, others = ways[0], ways[1:]
    rows = []
    costs = []
    for one in results:
        case = [
            f"{one['size']:,} B",
            "yes" if one["headers"] else "no",
            "yes" if one["ids"] else "no",
        ]
        ratios = [
            f"{one['ratio'][way]:.2f} ({min(one['ratios'][way]):.2f})" if way in one["ways"] else ""
            for way in others
        ]
        rows.append([*case, _rate(one["ways"][bare]["rate"]), *ratios])
        runs = [one["ways"].get(way) for way in ways]
        costs.append(
            case
            + [f"{run['own_cpu']:,.0f} + {run['server_cpu']:,.0f}" if run else "" for run in runs]
        )
    head = ["value size", "headers", "message ids"]
    text = table([*head, bare, *(f"{way} ÷ {bare}" for way in others)], rows)
    text += "\n\nCPU ns/row, client + server:\n\n" + table([*head, *ways], costs)
    if "spark" not in figures:
        return text
    rates = {(one["sink"], one["tasks"]): one["rate"] for one in figures["spark"]}
    sinks = [
        [
            one["sink"],
            str(one["tasks"]),
            f"{one['rows']:,}",
            _rate(one["rate"]),
            f"{rates['nats_kv', one['tasks']] / one['rate']:.2f}",
            " + ".join(f"{one['cpu'][role]:,.0f}" for role in ("server", "python", "jvm")),
        ]
        for one in figures["spark"]
    ]
    head = ["sink", "tasks", "rows", "rate", "nats_kv ÷ this sink"]
    head.append("CPU ns/row: server + Python + JVM")
    return f"{text}\n\n`df.write` of a Parquet file, values of 128 bytes:\n\n{table(head, sinks)}"


def _several(figures: Figures) -> str:
    idle = figures["idle"]
    rest = table(
        ["idle query", "planner CPU, of a core", "server CPU, of a core", "requests"],
        [
            [
                f"{figures['buckets']:,} buckets",
                f"{idle['planner']:.1%}",
                f"{idle['server']:.1%} ({idle['baseline']:.1%} without a query)",
                f"{idle['requests']:.1f}/s",
            ]
        ],
    )
    plans = table(
        ["planning after a write to", "p50", "worst", "requests", "tasks"],
        [
            [
                f"{one['touched']:,} buckets",
                f"{one['p50']:.0f} ms",
                f"{one['worst']:.0f} ms",
                f"{one['requests']:,}",
                f"{one['tasks']}",
            ]
            for one in figures["planned"]
        ],
    )
    reads = table(
        ["first read of", "rows", "rate", "planning", "tasks"],
        [
            [
                f"{one['buckets']:,} buckets" if one["buckets"] > 1 else "one bucket",
                f"{one['rows']:,}",
                _rate(one["rows_per_second"]),
                f"{one['planning']:.2f} s",
                f"{one['tasks']}",
            ]
            for one in figures["reads"]
        ],
    )
    text = f"{rest}\n\n{plans}\n\n{reads}"
    ratios = f"Many buckets ÷ one, medians of the rounds: without Spark **{figures['ratio']:.2f}**"
    if figures.get("spark_reads"):
        in_spark = table(
            ["first read in Spark of", "rows", "query", "its micro-batch"],
            [
                [
                    f"{one['buckets']:,} buckets" if one["buckets"] > 1 else "one bucket",
                    f"{one['rows']:,}",
                    f"{one['seconds']:.2f} s",
                    f"{one['micro_batch']:.2f} s",
                ]
                for one in figures["spark_reads"]
            ],
        )
        text += f"\n\n{in_spark}"
        ratios += f", query in Spark **{figures['spark_ratio']:.2f}**"
    return f"{text}\n\n{ratios}."


def _commits(figures: Figures) -> str:
    rows = [
        [
            f"{one['keys']:,}",
            f"{one['commits']:,} of {one['rows']:,}",
            f"{one['p50']:,.0f} / {one['p99']:,.0f} ms",
            f"**{one['data'] + one['vectors'] + one['log']:.1f}** "
            f"({one['data']:.1f} + {one['vectors']:.1f} + {one['log']:.1f})",
            f"**{one['data'] + one['vectors'] + one['log'] + one['upkeep']:.1f}**",
            f"{one['files']:,} (most {one['most_files']:,})",
            f"{one['disk'] >> 20:,} MiB",
            f"{one['opened']:,.0f} ms",
            f"{one['built']:.1f} s, {one['index']:.0f} B",
            f"{one['memory'] >> 20:,} MiB",
        ]
        for one in figures["commits"]
    ]
    head = [
        "keys",
        "commits of rows",
        "merge, p50 / p99",
        "written ÷ changed (data + vectors + log)",
        "with upkeep",
        "files",
        "disk",
        "open by delta-rs",
        "index: built in, for each key",
        "peak memory",
    ]
    return table(head, rows)


def _history(figures: Figures) -> str:
    one = figures["history"]
    rows = [
        [
            what,
            f"{one[f'{name}p50_1']:,.0f} / {one[f'{name}p99_1']:,.0f} ms",
            f"{one[f'{name}p50_2']:,.0f} / {one[f'{name}p99_2']:,.0f} ms",
            f"**{one[f'{name}ratio']:.2f}**",
        ]
        for what, name in (
            (f"merge of {one['rows']:,} rows", ""),
            (f"put → visible row at {one['rate']:,} puts/s", "visible_"),
        )
    ]
    head = [f"{one['keys']:,} keys", "type 1, p50 / p99", "type 2, p50 / p99", "p50 ÷ type 1's"]
    more = one["written_2"] - one["written_1"]
    return (
        f"{table(head, rows)}\n\nIn {one['batches']:,} merges, type 2 wrote {more:,} rows more "
        f"than type 1 and closed {one['closed']:,} versions; its state table got "
        f"{one['state']:,} rows."
    )


def _lookup(figures: Figures) -> str:
    tasks = table(
        ["keys of the bucket", "look-ups in one task", "CPU for each, task + server"],
        [
            [
                f"{one['keys']:,}",
                f"**{_rate(one['rate'])}**",
                f"{one['own_cpu']:,.0f} + {one['server_cpu']:,.0f} ns",
            ]
            for one in figures["tasks"]
        ],
    )
    if not figures.get("spark"):
        return tasks
    runs = table(
        ["keys of the bucket", "rows", "`lookup`", "join", "join ÷ `lookup`"],
        [
            [
                f"{one['keys']:,}",
                f"{one['rows']:,}",
                f"{one['lookup']:.2f} s ({_rate(one['rows'] / one['lookup'])})",
                f"{one['join']:.2f} s",
                f"**{one['join'] / one['lookup']:.1f}**",
            ]
            for one in figures["spark"]
        ],
    )
    return f"{tasks}\n\n{runs}"


SECTIONS: Mapping[str, tuple[str, Callable[[Figures], str]]] = {
    "reader": ("One reader into Arrow, compared with a bare socket and nats-py", _reader),
    "jetstream": ("The JetStream client, compared with a bare socket and nats-py", _jetstream),
    "spark": ("End to end in Spark, compared with Spark's Kafka source", _spark),
    "latency": ("Latency from put to `foreachBatch` and to a table", _latency),
    "freshness": ("Freshness of a Delta table: from put to visible row", _freshness),
    "commits": ("Many commits into one table by deletion vectors", _commits),
    "history": ("A history (SCD type 2), compared with the newest entries (type 1)", _history),
    "writing": ("Writing, compared with a bare socket and Spark's Kafka sink", _writing),
    "planner": ("Planning on a large bucket with mostly holes", _planner),
    "several": ("Many buckets in one query", _several),
    "lookup": ("Look-ups by key, compared with a join", _lookup),
}
"""The title of each benchmark, and the function that renders its table."""


def block(name: str, figures: Figures, plots: Sequence[str] = ()) -> str:
    """The text between the comments of a block.

    Args:
        plots: paths of the plots, relative to the page.
    """
    title, text = SECTIONS[name]
    pictures = "".join(f"![{title}]({path})\n\n" for path in plots)
    return f"\n{text(figures)}\n\n{pictures}{environment(figures)}\n\n"


def replace_block(page: str, name: str, content: str) -> str:
    """``page`` with the block ``name`` replaced, or appended under a heading."""
    begin, end = f"<!-- bench: {name} -->", "<!-- /bench -->"
    new = f"{begin}\n{content}{end}"
    found = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    if found.search(page):
        return found.sub(lambda _: new, page, count=1)
    return f"{page.rstrip()}\n\n## {SECTIONS[name][0]}\n\n{new}\n"
