"""The examples of a page, and what it prints."""

from __future__ import annotations

import re
from pathlib import Path

from pyspark.sql import DataFrame, Row

from tests.support.paths import ROOT
from tests.support.spark.streaming_query import run_to_the_end

SERVER = "nats://127.0.0.1:4222"


def page(name: str) -> str:
    """The text of ``docs/NAME.md``."""
    return (ROOT / f"docs/{name}.md").read_text()


def blocks(name: str, language: str, **replaced: str) -> list[str]:
    """The blocks of a language, for the server ``url`` and the directory ``lake``."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", page(name), re.DOTALL)
    for place, prefix in (("url", SERVER), ("lake", "/lake")):
        if place in replaced:
            found = [one.replace(prefix, replaced[place]) for one in found]
    return found


def rows_now(frame: DataFrame, checkpoint: Path) -> list[Row]:
    """The rows that a streaming query returns for what is stored."""
    found: list[Row] = []
    writer = frame.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
    writer = writer.trigger(availableNow=True).option("checkpointLocation", str(checkpoint))
    run_to_the_end(writer.start)
    return found


def console_commands(name: str) -> list[tuple[str, str]]:
    """Each command of the page's ``console`` blocks, and what it prints there."""
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", "\n".join(blocks(name, "console")), flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))
