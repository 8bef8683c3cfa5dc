"""Writes the parts of the documents that come from the code: ``make docs``.

A part stands between ``<!-- name -->`` and ``<!-- /name -->``: the tables of options in
``options.md``, the table of modules in ``internals/architecture.md``. A test compares them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from nats_stream_source.options import CONNECTION, KV, STREAM, markdown_table

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
    for name, table in (("connection", CONNECTION), ("nats_kv", KV), ("nats_stream", STREAM)):
        options = replace_section(options, f"options: {name}", markdown_table(table))
    architecture = ARCHITECTURE.read_text()
    return {
        DOCS / "options.md": options,
        ARCHITECTURE: replace_section(architecture, "modules", modules()),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text)
