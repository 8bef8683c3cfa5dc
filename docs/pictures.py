"""The pictures of the site in light and dark colours.

A page of the repository shows one SVG, whose style has ``@media (prefers-color-scheme: dark)``. The
site has a switch for its colours, which such a rule does not follow, so the site has two copies of
each picture: one without the rule, and one in which it always applies. ``docs.diagrams`` draws
Mermaid's diagrams in both colours.
"""

from __future__ import annotations

import hashlib
import posixpath
import re

DIAGRAMS = "drawn"  # folder of the drawn diagrams, below docs/
_DARK = "@media (prefers-color-scheme: dark) {"
_IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]+)\.svg"\s*/?>')
_FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^\s*accTitle: (.*)$", re.MULTILINE)


def has_copies(path: str) -> bool:
    """Whether the site makes copies of a file; drawn diagrams are copies."""
    return path.endswith(".svg") and not path.endswith((".light.svg", ".dark.svg"))


def copies(picture: str) -> dict[str, str]:
    """The copies of an SVG by the suffix of their names."""
    before, found, rest = picture.partition(_DARK)
    if not found:
        return {"light": picture, "dark": picture}
    depth, end = 1, -1
    while depth:
        end += 1
        depth += {"{": 1, "}": -1}.get(rest[end], 0)
    rules, after = rest[:end], rest[end + 1 :]
    return {"light": before + after, "dark": before + rules + after}


def diagrams(markdown: str) -> list[str]:
    """The Mermaid diagrams of a page."""
    return _FENCE.findall(markdown)


def diagram_name(diagram: str) -> str:
    """The name of a diagram's pictures, without suffix: the digest of its text."""
    return hashlib.sha256(diagram.encode()).hexdigest()[:16]


def drawn(markdown: str, page: str) -> str:
    """``markdown`` of ``page``, a path below ``docs/``, with pictures in place of diagrams."""

    def image(match: re.Match[str]) -> str:
        path = posixpath.relpath(f"{DIAGRAMS}/{diagram_name(match[1])}", posixpath.dirname(page))
        title = _TITLE.search(match[1])
        return f'<p><img alt="{title[1] if title else "Diagram"}" src="{path}.svg"></p>'

    return _FENCE.sub(image, markdown)


def in_both_colours(html: str) -> str:
    """``html`` with both copies of each picture; the theme hides one of them."""

    def images(match: re.Match[str]) -> str:
        both = "".join(
            f'<img alt="{match[1]}" src="{match[2]}.{colour}.svg#only-{colour}">'
            for colour in ("light", "dark")
        )
        return f'<span class="picture">{both}</span>'

    return _IMAGE.sub(images, html)
