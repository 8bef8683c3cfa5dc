"""Writes the parts of the documents that come from the code: ``make docs``.

A part stands between ``<!-- name -->`` and ``<!-- /name -->``: the tables of options in
``options.md``, the table of modules in ``internals/architecture.md``, and below ``reference/`` the
columns (from the README), the errors and the public names. A test compares them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from nats_stream_source import delta, errors, jetstream
from nats_stream_source.options import CONNECTION, KV, STREAM, markdown_table
from nats_stream_source.options.writing import KV_WRITE, STREAM_WRITE

DOCS = Path(__file__).parent
ARCHITECTURE = DOCS / "internals/architecture.md"
PACKAGE = DOCS.parent / "nats_stream_source"
FOLDERS = tuple(
    folder.relative_to(PACKAGE).as_posix()
    for folder in sorted(PACKAGE.rglob("*"))
    if (folder / "__init__.py").exists()
)


def first_sentence(module: Path) -> str:
    """The first paragraph of a module's docstring, as a cell of a table."""
    doc = ast.get_docstring(ast.parse(module.read_text())) or ""
    return doc.partition("\n\n")[0].replace("\n", " ").replace("``", "`").rstrip(".")


def modules() -> str:
    """The table of modules, folder by folder."""
    lines: list[str] = []
    for folder in FOLDERS:
        lines += [f"| `{folder}/` | what it is for |", "| --- | --- |"]
        lines += [
            f"| `{folder}/{file.name}` | {first_sentence(file)} |"
            for file in sorted((PACKAGE / folder).glob("[a-z]*.py"))
        ]
        lines.append("")
    return "\n".join(lines)


def columns() -> str:
    """The tables of columns: the README's section, with headings of their own."""
    readme = (DOCS.parent / "README.md").read_text()
    section = readme.partition("## Rows\n\n")[2].partition("\n## ")[0]
    return re.sub(r"^Of (`nats_\w+`):$", r"## \1", section, flags=re.MULTILINE)


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


def public_names() -> str:
    """The directives of mkdocstrings for each public name, module by module."""
    lines: list[str] = []
    for title, module, names in (
        ("Formats and progress", "nats_stream_source", ("register", "watch_progress")),
        ("Delta", "nats_stream_source.delta", delta.__all__),
        ("JetStream for asyncio", "nats_stream_source.jetstream", jetstream.__all__),
        ("A server for tests", "nats_stream_source.embedded", ("NatsServer",)),
    ):
        lines += [f"## {title}", "", f"Module `{module}`.", ""]
        for name in names:
            # `delta.merge` is a function and a module; the static analysis finds the module first.
            same = PACKAGE.parent / f"{module}.{name}".replace(".", "/")
            path = f"{name}.{name}" if same.with_suffix(".py").exists() else name
            lines += [f"::: {module}.{path}", ""]
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
    for name, table in (
        ("connection", CONNECTION),
        ("nats_kv", KV),
        ("nats_stream", STREAM),
        ("writing nats_kv", KV_WRITE),
        ("writing nats_stream", STREAM_WRITE),
    ):
        options = replace_section(options, f"options: {name}", markdown_table(table))
    architecture = ARCHITECTURE.read_text()
    reference = {
        DOCS / "reference" / f"{page}.md": replace_section(
            (DOCS / "reference" / f"{page}.md").read_text(), page, part
        )
        for page, part in (
            ("columns", columns()),
            ("errors", error_table()),
            ("python", public_names()),
        )
    }
    return {
        **reference,
        DOCS / "options.md": options,
        ARCHITECTURE: replace_section(architecture, "modules", modules()),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text)
