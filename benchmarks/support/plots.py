"""Plots of the figures as SVG; requires matplotlib (extra ``bench``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.support.report import Figures

INK, GRID = "#334155", "#e2e8f0"
OURS, OTHER, THIRD, FOURTH = "#2b6cb0", "#a0aec0", "#dd6b20", "#805ad5"
_DARK = {INK: "#cbd5e1", GRID: "#3b4656", OURS: "#63a4e8", OTHER: "#7b8798", THIRD: "#f0954a"}
"""What a colour is on a dark page."""

_THOUSANDS = "{x:,.0f}"

# Text is not converted to paths, and equal figures produce equal files.
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "bench",
        "font.size": 10,
        "axes.titlesize": 10.5,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "grid.color": GRID,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"), INK),
        "ytick.color": INK,
    }
)


def _reader(axes: Axes, figures: Figures) -> None:
    cases = figures["reader"]
    names = [f"{one['size']:,} B" + ("\nheaders" if one["headers"] else "") for one in cases]
    _bars(
        axes,
        names,
        {
            "bare socket": [one["bare"]["rate"] for one in cases],
            "reader": [one["reader"]["rate"] for one in cases],
        },
    )


def _spark(axes: Axes, figures: Figures) -> None:
    rates: dict[str, dict[str, float]] = {}
    for outcome in figures["spark"]:
        for one in outcome["results"]:
            case = f"{one['rows']:,}\n{outcome['size']:,} B\n{one['sink']}"
            rates.setdefault(one["source"], {})[case] = one["rate"]
    cases = list(rates["nats_kv"])
    _bars(axes, cases, {source: [found[case] for case in cases] for source, found in rates.items()})


def _latency(axes: Axes, figures: Figures) -> None:
    colors = {"nats_kv": OURS, "kafka": OTHER, "nats_kv to table": THIRD}
    styles = {"defaults": "--", "configured": "-"}
    cases: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for one in figures["latency"]:
        cases.setdefault((one["source"], one["way"]), []).append((one["rate"], one["p50"]))
    for (source, way), points in cases.items():
        _line(axes, points, f"{source}, {way}", f"o{styles[way]}", colors[source])
    axes.set_ylim(0, 1.6 * axes.get_ylim()[1])
    axes.set_xlabel("puts per second")
    axes.set_ylabel("p50 from the put, ms")


def _line(axes: Axes, points: list[tuple[int, float]], label: str, style: str, color: str) -> None:
    """One line over a logarithmic axis of numbers."""
    numbers, values = zip(*sorted(points), strict=True)
    axes.plot(numbers, values, style, color=color, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_THOUSANDS)
    axes.legend(loc="upper left", ncols=2)


def _bars(axes: Axes, names: list[str], series: Mapping[str, list[float]]) -> None:
    width = 0.8 / len(series)
    colors = dict(zip(series, (OTHER, OURS), strict=False))
    if "nats_kv" in series:
        colors = dict(zip(series, (OURS, OTHER, THIRD), strict=False))
    for i, (label, rates) in enumerate(series.items()):
        places = [at + i * width for at in range(len(names))]
        axes.bar(places, rates, width, label=label, color=colors[label])
    axes.set_xticks([at + width * (len(series) - 1) / 2 for at in range(len(names))], names)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.set_ylabel("rows per second")
    axes.legend()


def _freshness(axes: Axes, figures: Figures) -> None:
    points: dict[str, list[tuple[int, float]]] = {}
    for one in figures["freshness"]:
        if one["rate"] == 1_000:
            points.setdefault(one["way"], []).append((one["keys"], one["p50"] / 1_000))
    _by_keys(axes, points)
    axes.set_xlabel("keys of the table, 1,000 puts per second")
    axes.set_ylabel("put to visible, p50, seconds")


def _table_size(axes: Axes, figures: Figures) -> None:
    points: dict[str, list[tuple[int, float]]] = {}
    for one in figures["merge"]:
        points.setdefault(one["engine"], []).append((one["keys"], one["median"]))
    _by_keys(axes, points)
    axes.set_xlabel("keys of the table")
    axes.set_ylabel(f"merge of {figures['merge'][0]['rows']:,} rows, seconds")


_ENGINES = {
    "follow": ("this package, without Spark", FOURTH),
    "driver": ("this package, deletion vectors", OURS),
    "spark": ("Spark's MERGE", THIRD),
    "foreachBatch": ("read only, without a table", OTHER),
}
"""The label and the colour of an engine of ``merge``, and of the read alone."""


def _by_keys(axes: Axes, series: Mapping[str, list[tuple[int, float]]]) -> None:
    """Lines over the keys of the table, with the seconds above each point, below the lowest one."""
    lowest = {
        keys: min(seconds for points in series.values() for at, seconds in points if at == keys)
        for points in series.values()
        for keys, _ in points
    }
    for engine, points in series.items():
        label, color = _ENGINES[engine]
        _line(axes, points, label, "o-", color)
        for point in points:
            below = len(series) > 1 and point[1] == lowest[point[0]]
            axes.annotate(
                f"{point[1]:.2g} s",
                point,
                (0, -14 if below else 6),
                textcoords="offset points",
                ha="center",
            )
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / 1.6, top * 4)  # room for the labels and the legend
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _writing(axes: Axes, figures: Figures) -> None:
    rates: dict[str, list[float]] = {}
    for one in figures["spark"]:
        rates.setdefault(one["sink"], []).append(one["rate"])
    tasks = sorted({one["tasks"] for one in figures["spark"]})
    _bars(axes, [f"{count} task{'s' * (count > 1)}" for count in tasks], rates)


_PLOTS: dict[str, dict[str, tuple[str, Callable[[Axes, Figures], None]]]] = {
    "reader": {"reader": ("One reader, and a bare socket", _reader)},
    "spark": {"spark": ("A query in Spark, and Spark's Kafka source", _spark)},
    "latency": {"latency": ("From put to foreachBatch, and to a table", _latency)},
    "freshness": {
        "freshness": ("From put to visible row, by the size of the table", _freshness),
        "table_size": ("One merge, by the size of the table", _table_size),
    },
    "writing": {"writing": ("df.write of 1,000,000 rows, and Spark's Kafka sink", _writing)},
}
"""The plots of each benchmark by the name of their file, with their titles."""


def plot(name: str, figures: Figures, directory: Path) -> list[Path]:
    """Write the plots of one benchmark into ``directory``; empty for benchmarks without a plot."""
    paths = []
    for file, (title, draw) in _PLOTS.get(name, {}).items():
        figure = Figure(figsize=(7.5, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontweight="bold")
        draw(axes, figures)
        paths.append(directory / f"{file}.svg")
        save(figure, paths[-1])
    return paths


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG that is readable on a light and on a dark page."""
    buffer = StringIO()
    metadata: dict[str, Any] = {"Date": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    rules = "".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }} '
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>"
    text = buffer.getvalue().replace("'DejaVu Sans'", "system-ui, 'Segoe UI', Helvetica, Arial")
    text = re.sub(r"(<svg [^>]*>)", rf"\1{style}", text, count=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # matplotlib leaves spaces at the ends of lines.
    path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()))
