"""Plots of the figures as SVG; requires matplotlib (extra ``bench``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.support.report import Figures

# Text is not converted to paths, and equal figures produce equal files.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9})

_OURS, _OTHER, _THIRD = "#2b6cb0", "#a0aec0", "#dd6b20"
_COLORS = _OTHER, _OURS, _THIRD, "#718096"


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
    axes.set_yscale("log")


def _spark(axes: Axes, figures: Figures) -> None:
    rates: dict[str, dict[str, float]] = {}
    for outcome in figures["spark"]:
        for one in outcome["results"]:
            case = f"{one['rows']:,}\n{outcome['size']:,} B\n{one['sink']}"
            rates.setdefault(one["source"], {})[case] = one["rate"]
    cases = list(rates["nats_kv"])
    _bars(axes, cases, {source: [found[case] for case in cases] for source, found in rates.items()})


def _freshness(axes: Axes, figures: Figures) -> None:
    colors = dict(zip(("foreachBatch", "merge-on-read", "copy-on-write"), _COLORS, strict=False))
    cases: dict[str, list[tuple[int, float]]] = {}
    for one in figures["freshness"]:
        if one["rate"] == 1_000:
            cases.setdefault(one["way"], []).append((one["keys"], one["p50"]))
    for way, points in cases.items():
        keys, latencies = zip(*sorted(points), strict=True)
        axes.plot(keys, latencies, "o-", color=colors.get(way, _COLORS[-1]), label=way)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("keys of the table, 1,000 puts per second")
    axes.set_ylabel("put to visible, p50, ms")
    axes.legend(frameon=False)


def _latency(axes: Axes, figures: Figures) -> None:
    colors = {"nats_kv": _OURS, "kafka": _OTHER, "nats_kv to table": _THIRD}
    styles = {"defaults": "--", "configured": "-"}
    cases: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for one in figures["latency"]:
        cases.setdefault((one["source"], one["way"]), []).append((one["rate"], one["p50"]))
    for (source, way), points in cases.items():
        rates, latencies = zip(*sorted(points), strict=True)
        style = f"o{styles[way]}"
        axes.plot(rates, latencies, style, color=colors[source], label=f"{source}, {way}")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("puts per second")
    axes.set_ylabel("p50 from the put, ms")
    axes.legend(frameon=False)


def _bars(axes: Axes, names: list[str], series: Mapping[str, list[float]]) -> None:
    width = 0.8 / len(series)
    colors = dict(zip(series, (_OTHER, _OURS), strict=False))
    if "nats_kv" in series:
        colors = dict(zip(series, (_OURS, _OTHER, _THIRD), strict=False))
    for i, (label, rates) in enumerate(series.items()):
        places = [at + i * width for at in range(len(names))]
        axes.bar(places, rates, width, label=label, color=colors[label])
    axes.set_xticks([at + width * (len(series) - 1) / 2 for at in range(len(names))], names)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("rows per second")
    axes.legend(frameon=False)


_PLOTS: dict[str, Callable[[Axes, Figures], None]] = {
    "reader": _reader,
    "spark": _spark,
    "latency": _latency,
    "freshness": _freshness,
}


def plot(name: str, figures: Figures, directory: Path) -> list[Path]:
    """Write the plot of one benchmark into ``directory``; empty for benchmarks without a plot."""
    if name not in _PLOTS:
        return []
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    _PLOTS[name](axes, figures)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.svg"
    metadata: dict[str, Any] = {"Date": None}
    figure.savefig(path, metadata=metadata)
    return [path]
