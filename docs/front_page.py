"""The figures of the last benchmarks for ``README.md``, ``index.md``, ``internals/performance.md``.

``index.md`` also has the program of the README, and ``overview.svg`` the latency.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.report import environment, executor_cpu, table

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
FIGURES = DOCS / "internals/performance.json"

Figures = Mapping[str, Any]

_FRESH = "put to visible row of a Delta table, p50 / p99, at 1,000 puts/s"
_TO_BATCH = "put to `foreachBatch`, p50 / p99, at 1,000 puts/s"


def figures() -> Figures:
    """The figures of all benchmarks, by name."""
    known: Figures = json.loads(FIGURES.read_text())
    return known


def one_of(results: Sequence[Figures], **values: object) -> Figures:
    """The only result with these values."""
    (found,) = (one for one in results if values.items() <= one.items())
    return found


def program() -> str:
    """The README's program."""
    found = re.findall(r"^```python\n.*?^```\n", README.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = map(str, found)
    return block


def figure_table(*, all_rows: bool) -> str:
    """The figures that decide whether the package fits, each beside its alternatives.

    Args:
        all_rows: also those that only the page about performance has.
    """
    known = figures()
    fresh = [
        f"{_FRESH}, without Spark",
        _followed(known["freshness"]),
        f"by a query of Spark in the same run: {_followed(known['freshness'], 'driver')}",
    ]
    merged = [_merged(known["freshness"], keys) for keys in (100_000, 1_000_000, 10_000_000)]
    read, (queried, cpu) = _read(known["reader"]), _in_spark(known["spark"])
    rows = [fresh, merged[-1], read, queried]
    if all_rows:
        latencies = (("nats_kv to table", _FRESH), ("nats_kv", _TO_BATCH))
        rows = [fresh, *(_latency(known["latency"], *one) for one in latencies)]
        rows += [
            *merged,
            read,
            queried,
            cpu,
            _written(known["writing"]),
            *_planned(known["several"]),
        ]
    head = ["", "this package", "beside it"]
    machine = environment(known["spark"])
    return (
        f"{table(head, rows)}\n\n"
        f"*{machine}. Server, Spark and writer share the cores; both sides of a line were measured "
        "in turns.*\n"
    )


def readme_lines() -> str:
    """The figures that decide, each beside what it is compared with, for the README."""
    known = figures()
    spark = _followed(known["freshness"], "driver").strip("*")
    merged, read = _merged(known["freshness"], 10_000_000), _in_spark(known["spark"])[0]
    return (
        f"- {_FRESH}: {_followed(known['freshness'])} by the command `follow`, {spark} by Spark\n"
        f"- {merged[0]}: {merged[1]}; {merged[2]}\n"
        f"- {read[0].replace('such rows', 'rows of 128 bytes')}: {read[1]}; {read[2]}\n"
    )


def with_latency(picture: str) -> str:
    """``overview.svg`` with the time from put to visible row at 1,000 puts/s."""
    results = figures()["latency"]["latency"]
    one = one_of(results, way="configured", source="nats_kv to table", rate=1_000)
    picture = re.sub(r'(class="key">)\d+', rf"\g<1>{one['p50']:.0f}", picture)
    return re.sub(r"(>p99 )\d+", rf"\g<1>{one['p99']:.0f}", picture)


def _latency(known: Figures, source: str, name: str) -> list[str]:
    case = {"way": "configured", "rate": 1_000}
    ours, kafka = (one_of(known["latency"], source=one, **case) for one in (source, "kafka"))
    return [
        name,
        f"**{ours['p50']:,.0f} / {ours['p99']:,.0f} ms**",
        f"Kafka's source to `foreachBatch`, no table: {kafka['p50']:,.0f} / {kafka['p99']:,.0f} ms",
    ]


def _followed(known: Figures, way: str = "follow") -> str:
    """The latency of the command, or of a query of Spark in the same run."""
    results = known["freshness"] if way == "follow" else known["beside"]
    one = one_of(results, way=way, keys=100_000, rate=1_000)
    return f"**{one['p50']:,.0f} / {one['p99']:,.0f} ms**"


def _merged(known: Figures, keys: int) -> list[str]:
    ours = one_of(known["merge"], engine="driver", keys=keys)
    spark = one_of(known["merge"], engine="spark", keys=keys)
    return [
        f"merge of {ours['rows']:,} rows into a table of {keys:,} keys",
        f"**{ours['median']:.2g} s**",
        f"Spark's MERGE: {spark['median']:.2g} s",
    ]


def _read(known: Figures) -> list[str]:
    case = one_of(known["reader"], size=128, headers=False)
    return [
        "one reader into Arrow, values of 128 bytes",
        f"**{case['reader']['rate']:,.0f} rows/s**",
        f"a bare socket that discards them: {case['bare']['rate']:,.0f}/s; "
        f"nats-py: {case['callback']:,.0f}/s",
    ]


def _in_spark(known: Figures) -> list[list[str]]:
    outcomes = [
        one
        for outcome in known["spark"]
        for one in outcome["results"]
        if (outcome["size"], one["rows"], one["sink"]) == (128, 10_000_000, "noop")
    ]
    ours, kafka = (one_of(outcomes, source=name) for name in ("nats_kv", "kafka, 1 partition"))
    return [
        [
            "a Spark query of ten million such rows",
            f"**{ours['rate']:,.0f} rows/s**",
            f"Spark's Kafka source, one partition: {kafka['rate']:,.0f}/s",
        ],
        [
            "CPU of the executor for a row",
            f"**{executor_cpu(ours):,.0f} ns**",
            f"Spark's Kafka source: {executor_cpu(kafka):,.0f} ns",
        ],
    ]


def _written(known: Figures) -> list[str]:
    ours, kafka = (one_of(known["spark"], sink=sink, tasks=1) for sink in ("nats_kv", "kafka"))
    return [
        f"a write of {ours['rows']:,} rows of 128 bytes by one task",
        f"**{ours['rate']:,.0f} rows/s**",
        f"Spark's Kafka sink: {kafka['rate']:,.0f}/s",
    ]


def _planned(known: Figures) -> list[list[str]]:
    buckets, idle = known["buckets"], known["idle"]
    ours = one_of(known["planned"], touched=buckets)
    return [
        [
            f"planning of a micro-batch of {buckets:,} changed buckets",
            f"**{ours['p50']:,.0f} ms**",
            f"an idle query of them: {idle['planner']:.1%} of a core",
        ]
    ]
