"""Progress of a long benchmark, and a timeout for each of its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Result = TypeVar("Result")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Report the progress of a phase on stderr: a bar in a terminal, else a line per tenth.

    Yields:
        A function that is called with the number of steps done since its last call.
    """
    console = Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    began, done = time.monotonic(), 0
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)

        def step(count: int) -> None:
            nonlocal done
            before, done = done, done + count
            bar.advance(task, count)
            if not console.is_terminal and done * 10 // total > before * 10 // total:
                took = time.monotonic() - began
                console.print(f"{what}: {done:,} of {total:,} after {took:.0f} s")

        yield step


async def with_timeout(seconds: float, what: str, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``; raises RuntimeError after ``seconds``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError as error:
        raise RuntimeError(f"{what} did not end within {seconds:g} s") from error
