"""MkDocs hooks: pictures in both colours, links that lead out of ``docs/``, roles in docstrings.

The pages link to the README, to code and to examples by relative paths, as GitHub shows them. The
site does not have these files. With ``repo_url`` (``REPOSITORY_URL``) a link leads to the file in
the repository; without it, only the text of the link is left. Docstrings name functions by roles
(``:func:``), which are not Markdown; the name is left. ``docs.pictures`` describes the pictures.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from docs.pictures import copies, drawn, has_copies, in_both_colours

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")
_CELL = re.compile(r"<td[ >].*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]+)</code>")
_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[_/])(?=\w)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def outside(markdown: str, page: str, repository: str) -> str:
    """``markdown`` of ``page``, a path below ``docs/``, with the links that leave it replaced."""

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        if not path.startswith("../"):
            return match[0]
        if not repository:
            return match[1]
        return f"[{match[1]}]({repository.rstrip('/')}/blob/main/{path.removeprefix('../')})"

    return _LINK.sub(replaced, markdown)


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """MkDocs calls this with the files of the site: add the copies of each picture."""
    from mkdocs.structure.files import File  # of the extra `docs`

    for picture in [file for file in files if has_copies(file.src_uri)]:
        for colour, text in copies(picture.content_string).items():
            path = picture.src_uri.removesuffix("svg") + f"{colour}.svg"
            files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """MkDocs calls this for each page before it renders the page."""
    path = page.file.src_uri
    return drawn(outside(markdown, path, config.repo_url or ""), path)


def on_page_content(html: str, **_: Any) -> str:
    """MkDocs calls this for each page after it rendered the page."""
    return in_both_colours(_ROLE.sub("", html))


def on_post_page(output: str, **_: Any) -> str:
    """MkDocs calls this with each page; the search has its text already."""
    return breakable(output)


def breakable(html: str) -> str:
    """``html`` whose tables break long names of options and metrics between their words."""

    def cell(match: re.Match[str]) -> str:
        return _CODE.sub(lambda code: f"<code>{_BREAK.sub('<wbr>', code[1])}</code>", match[0])

    return _CELL.sub(cell, html)
