"""From the figures (``docs/performance.json``) to tables and plots in ``docs/performance.md``.

The page is prose with generated blocks: what stands between ``<!-- bench: NAME -->`` and
``<!-- /bench -->`` is replaced, the rest is left alone. A block that the page lacks is appended
under a heading of its own. Text is made here, without any I/O; plots are ``benchmarks.plots``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
"""What one benchmark has written: its results, ``machine`` and ``others``."""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value:,.0f}/s"


def where(figures: Figures) -> str:
    """One line: what the benchmark ran on, and what else ran."""
    place, others = figures["machine"], figures.get("others", {})
    packages = ", ".join(f"{name} {number}" for name, number in place["versions"].items())
    line = (
        f"{figures.get('date', '')}: {place['cores']} cores, Python {place['python']}, {packages}"
    )
    if "share" in others:
        line += (
            f"; load before {others['load']:.2f}, other processes had {others['share']:.0%} of the "
            f"cores meanwhile"
        )
    return f"*{line}.*"


def _reader(figures: Figures) -> str:
    rows = [
        [
            f"{one['size']:,} B",
            "yes" if one["headers"] else "no",
            _rate(one["bare"]["rate"]),
            _rate(one["reader"]["rate"]),
            f"**{one['ratio']:.2f}**",
            f"{min(one['rounds']):.2f} to {max(one['rounds']):.2f}",
            f"{one['cpu_ratio']:.2f}",
            f"{one['over_callback']:.1f} ({_rate(one['callback'])})",
            f"{one['over_watch']:.0f} ({_rate(one['watch'])}"
            + (f", lost {one['watch_lost']:,})" if one["watch_lost"] else ")"),
            f"{one['bare']['own_cpu']:.0f} + {one['bare']['server_cpu']:.0f}",
            f"{one['reader']['own_cpu']:.0f} + {one['reader']['server_cpu']:.0f}",
        ]
        for one in figures["reader"]
    ]
    head = ["value", "headers", "bare socket", "reader", "ratio", "rounds", "ratio by CPU"]
    head += ["÷ nats-py's callback", "÷ its KV watch"]
    return _table([*head, "CPU ns/row, bare + server", "CPU ns/row, reader + server"], rows)


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
    return _table(["what", "way", "messages", "rate", "÷ bare", "÷ nats-py", "lost"], rows)


def _spark(figures: Figures) -> str:
    rows = []
    for outcome in figures["spark"]:
        rates = {(one["source"], one["sink"]): one["rate"] for one in outcome["results"]}
        for one in sorted(outcome["results"], key=lambda one: str(one["sink"])):
            ratio = rates["nats_kv", one["sink"]] / one["rate"]
            cold = _rate(one["rows"] / one["cold"]["seconds"]) if one["cold"] else ""
            cpu = one["cpu_ns_per_row"]
            rows.append(
                [
                    f"{one['rows']:,}",
                    f"{outcome['size']:,} B",
                    one["sink"],
                    one["source"],
                    _rate(one["rate"]),
                    _rate(one["batch_rate"]),
                    cold,
                    f"{ratio:.2f}",
                    " + ".join(f"{cpu.get(role, 0):,.0f}" for role in ("server", "python", "jvm")),
                ]
            )
    head = [
        "rows",
        "value",
        "sink",
        "source",
        "warm",
        "micro-batch alone",
        "cold",
        "nats_kv ÷ this",
    ]
    return _table([*head, "CPU ns/row: server + Python + JVM"], rows)


def _microbatch(figures: Figures) -> str:
    rows = [
        [
            f"{one['bucket']['keys']:,}",
            f"{1 - one['bucket']['keys'] / one['bucket']['writes']:.0%}",
            f"{one['nats']:.0f} ms",
            f"{one['empty']:.0f} ms",
            f"**{one['extra']:.0f} ms**",
            ", ".join(
                f"{name} {ms - one['empty_parts'].get(name, 0):+.0f}"
                for name, ms in one["nats_parts"].items()
            ),
        ]
        for one in figures["microbatch"]
    ]
    return _table(["keys", "holes", "nats_kv", "empty source", "more", "where, ms"], rows)


def _small_reads(figures: Figures) -> str:
    ways = list(dict.fromkeys(one["way"] for one in figures["small_reads"]))
    cases: dict[tuple[int, int, str, int], dict[str, float]] = {}
    for one in figures["small_reads"]:
        bucket = one["bucket"]
        case = (bucket["keys"], bucket["writes"], one["place"], one["span"])
        cases.setdefault(case, {})[one["way"]] = one["ms"]
    rows = [
        [
            f"{keys:,}",
            f"{1 - keys / writes:.0%}",
            place,
            f"{span:,}",
            *(f"{found[way]:.1f}" for way in ways),
        ]
        for (keys, writes, place, span), found in cases.items()
    ]
    return _table(["keys", "holes", "place", "sequences", *(f"{way}, ms" for way in ways)], rows)


def _latency(figures: Figures) -> str:
    rows = [
        [
            f"{one['rate']:,}",
            f"{one['p50']:.0f} ms",
            f"{one['p99']:.0f} ms",
            f"{one['entries'] / one['batches']:,.0f}",
        ]
        for one in figures["latency"]
    ]
    return _table(["puts a second", "p50", "p99", "entries a micro-batch"], rows)


def _growth(figures: Figures) -> str:
    rows = [
        [
            f"{one['rows']:,}",
            f"{one['keys']:,}",
            str(one["splits"]),
            f"{one['plan_seconds'] * 1000:.0f} ms",
            str(one["plan_requests"]),
            f"{one['plan_base'] >> 20} + {one['plan_peak'] - one['plan_base'] >> 20} MiB",
            _rate(one["rows"] / one["read_seconds"]),
            f"{one['read_base'] >> 20} + {one['read_peak'] - one['read_base'] >> 20} MiB",
        ]
        for one in figures["growth"]
    ]
    head = ["messages", "keys", "splits", "planning", "requests", "planner's memory", "reading"]
    return _table([*head, "a reader's memory"], rows)


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
    head = ["filters", "from", "limit", "p50", "worst", "requests", "splits", "rows"]
    idle = ["filters", "other writes", "planner, of a core", "server, of a core", "requests"]
    return _table(head, planned) + "\n\nAn idle query:\n\n" + _table(idle, resting)


SECTIONS: Mapping[str, tuple[str, Callable[[Figures], str]]] = {
    "reader": ("One reader into Arrow, beside a bare socket and nats-py", _reader),
    "jetstream": ("The JetStream layer, beside a bare socket and nats-py", _jetstream),
    "spark": ("End to end in Spark, beside its own Kafka source", _spark),
    "microbatch": ("A small micro-batch, beside an empty Python source", _microbatch),
    "small_reads": ("Ways to read a small range", _small_reads),
    "latency": ("From the put to `foreachBatch`", _latency),
    "growth": ("How cost grows", _growth),
    "planner": ("Planning a large bucket of mostly holes", _planner),
}
"""Each benchmark's heading and what makes its table."""


def block(name: str, figures: Figures, plots: Sequence[str] = ()) -> str:
    """What stands between a block's comments.

    Args:
        plots: paths of pictures, as the page links to them.
    """
    title, text = SECTIONS[name]
    pictures = "".join(f"![{title}]({path})\n\n" for path in plots)
    return f"\n{text(figures)}\n\n{pictures}{where(figures)}\n\n"


def placed(page: str, name: str, content: str) -> str:
    """``page`` with the block ``name`` replaced, or appended under a heading."""
    begin, end = f"<!-- bench: {name} -->", "<!-- /bench -->"
    new = f"{begin}\n{content}{end}"
    found = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    if found.search(page):
        return found.sub(lambda _: new, page, count=1)
    return f"{page.rstrip()}\n\n## {SECTIONS[name][0]}\n\n{new}\n"
