"""Draws ``dashboard.svg``: the panels of the dashboard during a demo.

``python -m docs.dashboard_picture``: a Prometheus scrapes ``make demo`` each second; the queries of
the panels are then evaluated for the time of the demo. Requires the extra ``dev``, and Debian's
package ``prometheus``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.support.plots import OTHER, OURS, THIRD, save
from tests.support.prometheus import MONITORING, Prometheus

PICTURE = Path(__file__).parent / "dashboard.svg"
_COLUMNS = 3
_POINTS = 100  # of a panel
_WINDOW = "15s"  # in place of Grafana's $__rate_interval
_COLOURS = (OURS, THIRD, "#2f9e6e", "#b0569b", OTHER, "#8b6fd6", "#c9a227", "#5aa9a3")
_SUFFIXES = {"s": " s", "rps": "/s", "ops": "/s", "Bps": " B/s", "bytes": " B", "percentunit": " %"}
_LABEL = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Series:
    """A line of a panel: seconds since the start, and values."""

    legend: str
    seconds: list[float]
    values: list[float]


Rows = dict[str, list[tuple[dict[str, Any], list[Series]]]]
"""The panels of each row of the dashboard, with their series."""


def legend(text: str, labels: Mapping[str, str], names: dict[str, str]) -> str:
    """Grafana's legend with the labels of a series; ``names`` numbers the queries in order."""

    def value(match: re.Match[str]) -> str:
        found = labels.get(match[1], "")
        if match[1] == "query" and found:
            return names.setdefault(found, f"query {len(names) + 1}")
        return found.rpartition("/")[2]

    return _LABEL.sub(value, text).strip()


def watch_demo(scratch: Path) -> Rows:
    """Run the demo under Prometheus.

    Raises:
        RuntimeError: the demo failed.
    """
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "examples.demo"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    port = next(
        int(found[1]) for line in demo.stdout if (found := re.search(r":(\d+)/metrics", line))
    )
    with Prometheus(scratch / "prometheus", port, 60) as prometheus:
        begin = time.time()
        for line in demo.stdout:
            print(line, end="")
        if demo.wait() != 0:
            raise RuntimeError(
                f"could not draw the dashboard: the demo ended with {demo.returncode}"
            )
        return panels(prometheus, begin, time.time())


def panels(prometheus: Prometheus, begin: float, end: float) -> Rows:
    """The panels of each row, and their series between two times."""
    rows: Rows = {}
    names: dict[str, str] = {}
    step = max(1.0, (end - begin) / _POINTS)
    for panel in json.loads((MONITORING / "nats-stream-source.json").read_text())["panels"]:
        if panel["type"] == "row":
            rows[panel["title"]] = []
            continue
        series = []
        for target in panel["targets"]:
            query = target["expr"].replace("$query", ".*").replace("$__rate_interval", _WINDOW)
            found = prometheus.get(
                "query_range", query=query, start=str(begin), end=str(end), step=str(step)
            )
            for one in found["result"]:
                at, values = zip(*one["values"], strict=True)
                series.append(
                    Series(
                        legend(target["legendFormat"], one["metric"], names),
                        [float(second) - begin for second in at],
                        [float(value) for value in values],
                    )
                )
        rows[list(rows)[-1]].append((panel, series))
    return rows


def draw(rows: Rows) -> Figure:
    """The panels in rows of three, below the title of their row."""
    lines = [
        (title if start == 0 else "", found[start : start + _COLUMNS])
        for title, found in rows.items()
        for start in range(0, len(found), _COLUMNS)
    ]
    read = [one.seconds for _, series in rows["Micro-batches"] for one in series]
    begin, end = min(seconds[0] for seconds in read), max(seconds[-1] for seconds in read)
    height = 2.1 * len(lines)  # inches, of which the margins are fixed
    figure = Figure(figsize=(12, height))
    figure.subplots_adjust(0.05, 0.55 / height, 0.99, 1 - 0.5 / height, wspace=0.22, hspace=0.85)
    grid = figure.subplots(len(lines), _COLUMNS, squeeze=False)
    for line, (title, found) in zip(grid, lines, strict=True):
        for axes, (panel, series) in zip(line, found, strict=False):
            _draw_panel(axes, panel, series, begin)
            axes.set_xlim(0, end - begin)
        for axes in line[len(found) :]:
            axes.set_axis_off()
        if title:
            line[0].annotate(
                title,
                (-0.14, 1.22),
                xycoords="axes fraction",
                fontsize=12,
                fontweight="bold",
                annotation_clip=False,
            )
    return figure


def _draw_panel(axes: Axes, panel: Mapping[str, Any], series: list[Series], begin: float) -> None:
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    scale = 100 if unit == "percentunit" else 1
    ordered = sorted(series, key=lambda one: one.legend)
    for colour, one in zip(_COLOURS * 3, ordered, strict=False):
        values = [value * scale for value in one.values]
        seconds = [at - begin for at in one.seconds]
        axes.plot(seconds, values, color=colour, label=one.legend or "all", linewidth=1.3)
    axes.set_title(panel["title"], loc="left", fontsize=9)
    axes.set_ylim(0, None if any(value > 0 for one in series for value in one.values) else 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{_short(value)}{_SUFFIXES.get(unit, '')}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.tick_params(labelsize=7)
    axes.legend(
        fontsize=6.5,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.14),
        ncols=3 if len(series) > 4 else 2,
        borderpad=0,
        columnspacing=1,
        handlelength=1.2,
    )


def _short(value: float) -> str:
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dashboard-") as directory:
        save(draw(watch_demo(Path(directory))), PICTURE)
