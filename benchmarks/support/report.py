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


def listed(results: Iterable[Figures], head: str, row: str) -> str:
    """A table of Markdown with a row for each result.

    Args:
        row: the text of a row, with the names of a result's figures in braces.
    """
    lines = [row.format_map({k: _shown(v) for k, v in one.items()}) for one in results]
    return "\n".join((head, "| --- " * (head.count("|") - 1) + "|", *lines))


class _Missing:
    """A figure that is None: its cell is empty."""

    def __format__(self, _: str) -> str:
        return ""


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _Missing() if value is None else value


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
    return listed(
        figures["reader"],
        "| value size | headers | bare socket | reader | reader ÷ bare socket | by CPU time "
        "| ÷ nats-py callback | CPU ns/row, reader + server |",
        "| {size:,} B | {headers} | {bare[rate]:,.0f}/s | {reader[rate]:,.0f}/s | **{ratio:.2f}** "
        "| {cpu_ratio:.2f} | {over_callback:.1f} "
        "| {reader[own_cpu]:.0f} + {reader[server_cpu]:.0f} |",
    )


def _spark(figures: Figures) -> str:
    results = []
    most = max(one["rows"] for outcome in figures["spark"] for one in outcome["results"])
    for outcome in figures["spark"]:
        ours = {one["sink"]: one for one in outcome["results"] if one["source"] == "nats_kv"}
        for one in sorted(outcome["results"], key=lambda one: str(one["sink"])):
            if one["sink"] != "noop" and one["rows"] < most:
                continue
            mine, cpu = ours[one["sink"]], executor_cpu(one)
            of_cpu = executor_cpu(mine) / cpu if cpu else None
            times = mine["rate"] / one["rate"]
            results.append(
                {**one, "size": outcome["size"], "times": times, "cpu": cpu, "of_cpu": of_cpu}
            )
    return listed(
        results,
        "| rows | value size | sink | source | rate | nats_kv ÷ it | executor CPU ns/row "
        "| nats_kv ÷ it, CPU |",
        "| {rows:,} | {size:,} B | {sink} | {source} | {rate:,.0f}/s | {times:.2f} | {cpu:,.0f} "
        "| {of_cpu:.2f} |",
    )


def executor_cpu(result: Mapping[str, Any]) -> float:
    """CPU nanoseconds per row of Python workers and JVM."""
    cpu = result["cpu_ns_per_row"]
    return float(cpu.get("python", 0) + cpu.get("jvm", 0))


def _latency(figures: Figures) -> str:
    results = (
        {**one, "ratio": None if one["ratio"] is None else f"**{one['ratio']:.2f}**"}
        for one in figures["latency"]
        if one["way"] == "configured" or one["rate"] == 1_000
    )
    return listed(
        results,
        "| puts/s | session | source | p50 / p99 | p50 ÷ Kafka's | gap |",
        "| {rate:,} | {way} | {source} | {p50:.0f} / {p99:.0f} ms | {ratio} | {gap:.0f} ms |",
    )


def _freshness(figures: Figures) -> str:
    cases: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    followed = [one for one in figures["freshness"] if one["way"] == "follow"]
    queries = [one for one in figures["freshness"] if one["way"] != "follow"]
    for one in queries:
        cases.setdefault((one["keys"], one["rate"]), {})[one["way"]] = one
    ways = list(dict.fromkeys(one["way"] for one in queries))
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
    beside = figures["beside"] if followed else []
    parts = [puts, table(head, merged), *(_followed(followed, beside) if followed else ())]
    return "\n\n".join(parts)


def _followed(
    results: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]]
) -> list[str]:
    by_spark = {
        (one["keys"], one["rate"]): f"{one['p50']:,.0f} / {one['p99']:,.0f} ms"
        for one in beside
        if one["way"] == "driver"
    }
    work = listed(
        [
            {
                **one,
                "memory": one["memory"] >> 20,
                "spark": by_spark.get((one["keys"], one["rate"]), ""),
            }
            for one in results
        ],
        "| `follow`: keys | puts/s | p50 / p99 | a query, same run | start to caught up "
        "| peak memory | CPU | idle | commits |",
        "| {keys:,} | {rate:,} | **{p50:,.0f} / {p99:,.0f} ms** | {spark} | {caught_up:.1f} s "
        "| {memory:,} MiB | {cpu:.0%} | {idle:.1%} | {commits:,} |",
    )
    read = [one for one in results if "rest" in one["readers"]]
    if not read:
        return [work]
    rows = []
    for one in read:
        states = [one["readers"][state] for state in ("written", "rest", "one")]
        cells = (" / ".join(f"{state[name]:,.0f}" for state in states) for name in states[1])
        rows.append([f"{one['keys']:,}", f"{one['readers']['files']}", *cells])
    names = (f"{name}, ms" for name in read[0]["readers"]["rest"])
    return [work, table(["keys", "files", *names], rows)]


def _commits(figures: Figures) -> str:
    results = []
    for one in figures["commits"]:
        written = one["data"] + one["vectors"] + one["log"]
        whole, mebibytes = written + one["upkeep"], one["memory"] >> 20
        results.append({**one, "written": written, "whole": whole, "memory": mebibytes})
    return listed(
        results,
        "| keys | commits of rows | merge, p50 / p99 | written ÷ changed / with upkeep | files "
        "| open by delta-rs | index: built, a key | peak memory |",
        "| {keys:,} | {commits:,} of {rows:,} | {p50:,.0f} / {p99:,.0f} ms "
        "| **{written:.1f}** / **{whole:.1f}** | {files:,} (most {most_files:,}) "
        "| {opened:,.0f} ms | {built:.1f} s, {index:.0f} B | {memory:,} MiB |",
    )


def _writing(figures: Figures) -> str:
    text = listed(
        (one for one in figures["writing"] if one["headers"] == one["ids"]),
        "| value size | headers and message ids | bare socket | BatchPublisher ÷ it | sink ÷ it |",
        "| {size:,} B | {headers} | {ways[bare socket][rate]:,.0f}/s | {ratio[BatchPublisher]:.2f} "
        "| {ratio[sink]:.2f} |",
    )
    if "spark" not in figures:
        return text
    ours = {one["tasks"]: one["rate"] for one in figures["spark"] if one["sink"] == "nats_kv"}
    sinks = listed(
        ({**one, "times": ours[one["tasks"]] / one["rate"]} for one in figures["spark"]),
        "| sink | tasks | rate | nats_kv ÷ it | CPU ns/row: server + Python + JVM |",
        "| {sink} | {tasks} | {rate:,.0f}/s | {times:.2f} "
        "| {cpu[server]:,.0f} + {cpu[python]:,.0f} + {cpu[jvm]:,.0f} |",
    )
    return f"{text}\n\n{sinks}"


def _planner(figures: Figures) -> str:
    return listed(
        figures["planned"],
        "| filters | start position | limit | p50 / maximum | requests |",
        "| {filters} | {where} | {limit:,} | {p50:.1f} / {worst:.1f} ms | {requests} |",
    )


def _several(figures: Figures) -> str:
    buckets = f"{figures['buckets']:,} buckets"
    idle = "| idle query | {planner:.1%} of a core | {requests:.1f}/s |".format_map(figures["idle"])
    plans = listed(
        figures["planned"],
        f"| {buckets} |  | requests |",
        "| planning after a write to {touched:,} buckets | {p50:.0f} ms, at most {worst:.0f} ms "
        "| {requests:,} |",
    )
    head, rule, *lines = plans.splitlines()
    ratio = f"First read without Spark, {buckets} ÷ one: **{figures['ratio']:.2f}**."
    return "\n".join((head, rule, idle, *lines, "", ratio))


def _lookup(figures: Figures) -> str:
    tasks = listed(
        figures["tasks"],
        "| keys of the bucket | look-ups in one task | CPU for each, task + server |",
        "| {keys:,} | **{rate:,.0f}/s** | {own_cpu:,.0f} + {server_cpu:,.0f} ns |",
    )
    runs = listed(
        ({**one, "times": one["join"] / one["lookup"]} for one in figures["spark"]),
        "| keys of the bucket | rows | `lookup` | join | join ÷ `lookup` |",
        "| {keys:,} | {rows:,} | {lookup:.2f} s | {join:.2f} s | **{times:.1f}** |",
    )
    return f"{tasks}\n\n{runs}"


SECTIONS: Mapping[str, tuple[str, Callable[[Figures], str]]] = {
    "reader": ("One reader against a bare socket", _reader),
    "spark": ("End to end in Spark, compared with Spark's Kafka source", _spark),
    "latency": ("Latency from put to `foreachBatch` and to a table", _latency),
    "freshness": ("Freshness of a Delta table: from put to visible row", _freshness),
    "commits": ("Many commits into one table by deletion vectors", _commits),
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
    """``page`` with the block ``name`` replaced."""
    begin, end = f"<!-- bench: {name} -->", "<!-- /bench -->"
    new = f"{begin}\n{content}{end}"
    found = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    return found.sub(lambda _: new, page, count=1)
