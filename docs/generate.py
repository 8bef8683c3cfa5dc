"""Writes the parts of the documents that come from the code: ``make docs``.

A part stands between ``<!-- name -->`` and ``<!-- /name -->``: the tables of options in
``options.md``, the tables of columns and metrics, and below ``reference/`` the errors and the
public names; ``docs.front_page`` has the parts of ``index.md`` and ``performance.md``, and the
latency in ``overview.svg``. A test compares them.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.support.report import table
from docs.front_page import (
    README,
    figure_table,
    program,
    readme_lines,
    with_latency,
)
from nats_stream_source import delta, errors, jetstream
from nats_stream_source.delta.refused import REFUSED
from nats_stream_source.metrics.table import METRICS
from nats_stream_source.options import COMMON, CONNECTION, KV, STREAM, Option
from nats_stream_source.options.reading import LOOKUP
from nats_stream_source.options.writing import KV_WRITE, STREAM_WRITE
from nats_stream_source.rows.columns import COLUMNS

DOCS = Path(__file__).parent
COLUMNS_PAGE = DOCS / "reference/columns.md"
WRITING = DOCS / "writing.md"
OPERATIONS = DOCS / "operations.md"
OVERVIEW = DOCS / "overview.svg"
PERFORMANCE = DOCS / "internals/performance.md"
PACKAGE = DOCS.parent / "nats_stream_source"


_COLUMN = ("column", "type", "meaning")


def options_table(options: tuple[Option, ...]) -> str:
    """The table of options."""
    rows = (
        [
            f"`{one.name}`",
            one.kind.name,
            f"{one.help} {one.only.name.capitalize()} only." if one.only else one.help,
        ]
        for one in options
    )
    return table(["option", "type", "meaning"], rows) + "\n"


def metrics_table() -> str:
    """The table of metrics."""
    rows = (
        [f"`{one.full_name}`", one.kind, ", ".join(f"`{name}`" for name in one.labels), one.help]
        for one in METRICS.values()
    )
    return table(["metric", "kind", "labels besides `query`", "meaning"], rows) + "\n"


def read_table(name: str) -> str:
    """The table of the columns that a read of a format returns."""
    columns = (column for column in COLUMNS[name] if column.type is not None)
    rows = ([f"`{one.name}`", one.type or "", one.meaning] for one in columns)
    return table(_COLUMN, rows) + "\n"


def written_table(name: str) -> str:
    """The table of the columns that a sink writes, and those that it ignores."""
    rows = [
        [f"`{one.name}`", sink.type, ("required; " if sink.required else "") + sink.meaning]
        for one in COLUMNS[name]
        if (sink := one.written) is not None
    ]
    ignored = ", ".join(f"`{one.name}`" for one in COLUMNS[name] if one.written is None)
    return table(_COLUMN, [*rows, [ignored, "any", "ignored"]]) + "\n"


def error_table() -> str:
    """The table of error classes, each below its base class."""
    lines = ["| error | code | err_code | meaning |", "| --- | --- | --- | --- |"]

    def add(error: type[Exception], depth: int) -> None:
        meaning = " ".join((error.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
        numbers = [getattr(error, name) or "" for name in ("code", "err_code")]
        # A class without a number of its own inherits it, and then raises with it.
        cells = ("&nbsp;" * 4 * depth + f"`{error.__name__}`", *numbers, meaning)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        for child in error.__subclasses__():
            if child.__module__ == errors.__name__ and child.__bases__[0] is error:
                add(child, depth + 1)

    add(errors.NatsSourceError, 0)
    return "\n".join(lines) + "\n"


def refusal_table() -> str:
    """The rows of :data:`nats_stream_source.delta.refused.REFUSED` as Markdown."""
    names: dict[tuple[str, str, str, str], list[str]] = {}
    for row in REFUSED:
        by = "each engine" if row.by == "both" else f"the {row.by}".replace("the spark", "Spark")
        reason = row.reason.format("…").replace("'…'", "…")
        name = "any other" if row.name == "*" else row.name.replace("|", "\\|")
        action = row.action.replace("engine='spark'", '`engine="spark"`')
        names.setdefault((row.kind, by, reason, action), []).append(f"`{name}`")
    rows = ([kind, ", ".join(found), *rest] for (kind, *rest), found in names.items())
    return table(["in a", "", "refused by", "reason", "what to do"], rows) + "\n"


def public_names() -> str:
    """The directives of mkdocstrings for each public name, module by module."""
    lines: list[str] = []
    for title, module, names in (
        (
            "Formats and progress",
            "nats_stream_source",
            ("configure", "lookup", "read_bucket", "register", "watch_progress"),
        ),
        ("Delta", "nats_stream_source.delta", delta.__all__),
        ("JetStream for asyncio", "nats_stream_source.jetstream", jetstream.__all__),
        ("A server for tests", "nats_stream_source.embedded", ("NatsServer",)),
    ):
        lines += [f"## {title}", "", f"Module `{module}`.", ""]
        for name in names:
            # `delta` imports its names when they are used; the static analysis needs their modules.
            modules = delta.MODULES.items() if module == delta.__name__ else ()
            found = (f"nats_stream_source.{one}" for one, its in modules if name in its.split())
            lines += [f"::: {next(found, module)}.{name}", ""]
    return "\n".join(lines)


def replace_section(text: str, name: str, part: str) -> str:
    """``text`` with the part ``name`` replaced; ValueError when it has none."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
    new, count = re.subn(pattern, lambda m: f"{m[1]}{part}{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the part {name!r} stands there {count} times")
    return new


def documents() -> dict[Path, str]:
    """The documents as they should be."""
    options = (DOCS / "options.md").read_text()
    written = tuple(option for option in KV_WRITE if option in STREAM_WRITE)
    for name, whole, elsewhere in (
        ("connection", CONNECTION, ()),
        ("nats_kv", KV, COMMON),
        ("nats_stream", STREAM, COMMON),
        ("reading", COMMON, ()),
        ("lookup", LOOKUP, KV),
        ("writing nats_kv", KV_WRITE, (*written, *KV)),
        ("writing nats_stream", STREAM_WRITE, written),
        ("writing", written, ()),
    ):
        own = tuple(option for option in whole if option not in elsewhere)
        options = replace_section(options, f"options: {name}", options_table(own))
    reading, writing = COLUMNS_PAGE.read_text(), WRITING.read_text()
    for name in COLUMNS:
        reading = replace_section(reading, f"columns: {name}", read_table(name))
        writing = replace_section(writing, f"written columns: {name}", written_table(name))
    reference = {
        DOCS / "reference" / f"{page}.md": replace_section(
            (DOCS / "reference" / f"{page}.md").read_text(), page, part
        )
        for page, part in (
            ("errors", error_table()),
            ("python", public_names()),
            ("refusals", refusal_table()),
        )
    }
    index = (DOCS / "index.md").read_text()
    for name, part in (("program", program()), ("figures", figure_table(all_rows=False))):
        index = replace_section(index, name, part)
    return {
        **reference,
        README: replace_section(README.read_text(), "figures", readme_lines()),
        DOCS / "index.md": index,
        PERFORMANCE: replace_section(
            PERFORMANCE.read_text(), "figures", figure_table(all_rows=True)
        ),
        COLUMNS_PAGE: reading,
        WRITING: writing,
        DOCS / "options.md": options,
        OPERATIONS: replace_section(OPERATIONS.read_text(), "metrics", metrics_table()),
        OVERVIEW: with_latency(OVERVIEW.read_text()),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text)
