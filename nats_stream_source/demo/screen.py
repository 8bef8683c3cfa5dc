"""The demo's output: a line per step, progress bars, a table at the end.

If standard output is not a terminal, a plain line every few seconds replaces the bars.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nats_stream_source.demo.compare import Comparison
from nats_stream_source.demo.job import Tally

_LINE_EVERY = 5.0


class Bars:
    """Named counters that run to ``total``; a context manager, from :meth:`Screen.bars`."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._totals = totals
        self._done = dict.fromkeys(totals, 0)
        self._last = time.monotonic()
        self._line = ""
        self._progress = Progress(
            TextColumn("  {task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks = {
            name: self._progress.add_task(name, total=total) for name, total in totals.items()
        }

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def set(self, name: str, done: int) -> None:
        """Set a counter; a lower value is ignored (a restarted query counts from 0 again)."""
        self._done[name] = max(done, self._done[name])
        self._progress.update(self._tasks[name], completed=self._done[name])
        if not self._console.is_terminal and time.monotonic() - self._last >= _LINE_EVERY:
            self._last = time.monotonic()
            line = ", ".join(
                f"{name} {self._done[name]:,} of {total:,}" for name, total in self._totals.items()
            )
            if line != self._line:
                self._line = line
                self._console.print(f"  {line}")


class Screen:
    """Standard output for the demo."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """The first line."""
        self.console.print(text, style="bold", markup=False)

    def step(self, text: str) -> None:
        """A line for a step that is done or starts now."""
        self.console.print(f"- {text}", markup=False)

    def verdicts(self, verdicts: Mapping[str, Comparison]) -> None:
        """The result of each comparison, by table name."""
        for name, verdict in verdicts.items():
            first, *others = verdict.lines()
            style = "bold green" if verdict.equal else "bold red"
            self.console.print(f"{name + ':':<8} {first}", style=style, markup=False)
            for line in others:
                self.console.print(line, markup=False)

    def bars(self, totals: Mapping[str, int]) -> Bars:
        """Progress bars, one per counter, by name and total."""
        return Bars(self.console, totals)

    def tallies(self, columns: Mapping[str, Tally]) -> None:
        """A table of the queries' figures, one column per query."""
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        table.add_column("")
        for name in columns:
            table.add_column(name, justify="right")
        rows = {
            "rows": [f"{each.rows:,}" for each in columns.values()],
            "micro-batches": [f"{each.batches:,}" for each in columns.values()],
            "rows/s in its batches": [f"{each.rate:,.0f}" for each in columns.values()],
            "revisions compacted away": [f"{each.compacted:,}" for each in columns.values()],
            "lag in rows, at most": [f"{each.largest_lag:,}" for each in columns.values()],
            "lag in rows, at the end": [f"{each.lag:,}" for each in columns.values()],
        }
        for name, cells in rows.items():
            table.add_row(name, *cells)
        self.console.print(table)
