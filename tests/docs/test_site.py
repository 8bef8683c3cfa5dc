"""The documentation site: its navigation, anchors, links out of ``docs/`` and diagrams.

``make docs`` builds the site and fails on each warning. These tests find the same errors without
the packages of the extra ``docs``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.diagrams import wanted
from docs.generate import error_table, public_names
from docs.pictures import DIAGRAMS, copies, in_both_colours
from docs.site_hook import breakable, on_page_content, outside
from nats_stream_source import delta, errors, jetstream
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
REPOSITORY = "https://example.org/owner/name"


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that its tags name."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: suffix)


def pages(nav: Any) -> Iterator[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from pages(entry)
    else:
        for entry in nav:
            yield from pages(entry)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(words.replace(" ", "-"))
    return found


def test_navigation_names_every_page_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    named = list(pages(config["nav"]))
    existing = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert sorted(named) == sorted(existing), "mkdocs.yml: change `nav`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_anchors_of_links_exist(page: Path) -> None:
    missing = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        target = (page.parent / link).resolve() if link else page
        if "://" not in link and target.suffix == ".md" and anchor not in anchors(target):
            missing.append(f"{link}#{anchor}")
    assert missing == []


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("index.md", "[a](../README.md#x)", "README.md#x"),
        ("internals/a.md", "[a](../../tests/b.py)", "tests/b.py"),
        ("internals/a.md", "[a](../delta.md#x)", None),
        ("index.md", "[a](https://x.y/../z)", None),
        ("index.md", "![a](../a.svg)", None),
    ],
)
def test_links_out_of_site(page: str, link: str, target: str | None) -> None:
    assert outside(link, page, REPOSITORY) == (
        f"[a]({REPOSITORY}/blob/main/{target})" if target else link
    )
    assert outside(link, page, "") == ("a" if target else link)


def test_roles_of_docstrings_are_not_shown_and_names_in_tables_break() -> None:
    assert on_page_content("see :func:<code>f</code> at 12:30") == "see <code>f</code> at 12:30"
    row = "<td><code>includeHistory</code></td><td>see <code>index_keys</code> of aB</td>"
    assert breakable(f"{row}<p><code>a_b</code></p>") == (
        "<td><code>include<wbr>History</code></td><td>see <code>index_<wbr>keys</code> of aB</td>"
        "<p><code>a_b</code></p>"
    )


def test_errors_are_in_reference_with_numbers() -> None:
    table = error_table()
    classes = [
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.NatsSourceError)
    ]
    rows = re.findall(r"^\| (?:&nbsp;)*`(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(error.__name__ for error in classes)
    assert "`MinLastSequenceError` | 412 | 10180 |" in table


def test_public_functions_that_share_name_with_module_are_shown() -> None:
    assert "::: nats_stream_source.delta.spark.merge.merge\n" in public_names()
    assert "::: nats_stream_source.jetstream.KeyValue\n" in public_names()


def test_diagrams_have_pictures_in_both_colours() -> None:
    names = {f"{name}.{colour}.svg" for name in wanted() for colour in ("light", "dark")}
    drawn = {path.name for path in (DOCS / DIAGRAMS).iterdir()}
    assert drawn == names, "run `python -m docs.diagrams`"


def test_copies_of_picture_have_colours_of_one_page() -> None:
    style = ".a { fill: red } @media (prefers-color-scheme: dark) { .a { fill: blue } } .b { x: 1 }"
    assert copies(f"<style>{style}</style>") == {
        "light": "<style>.a { fill: red }  .b { x: 1 }</style>",
        "dark": "<style>.a { fill: red }  .a { fill: blue }  .b { x: 1 }</style>",
    }
    assert in_both_colours('<img alt="b" src="../a.svg" />') == (
        '<span class="picture"><img alt="b" src="../a.light.svg#only-light">'
        '<img alt="b" src="../a.dark.svg#only-dark"></span>'
    )


def test_diagrams_name_modules_that_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    kinds = {block.split()[0] for block in blocks}
    assert kinds == {"flowchart", "sequenceDiagram", "stateDiagram-v2"}
    named = {name for block in blocks for name in re.findall(r"[\w/]+\.py", block)}
    assert len(named) > 5
    assert [name for name in named if not (ROOT / "nats_stream_source" / name).exists()] == []


def documented() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions and methods that the Python reference shows."""
    for module in (jetstream, delta):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield name, value
            elif inspect.isclass(value):
                for method, function in inspect.getmembers(value, callable):
                    if inspect.isroutine(function) and not method.startswith("_"):
                        yield f"{name}.{method}", function


def test_documented_arguments_are_parameters() -> None:
    """The strict build of the site fails on `seq, start_time: …`, which is not a parameter."""
    unknown = []
    for name, function in documented():
        section = re.search(
            r"^Args:\n((?: .*\n|\n)*)", inspect.getdoc(function) or "", re.MULTILINE
        )
        for argument in re.findall(r"^ {4}(\S[^:]*):", section[1] if section else "", re.MULTILINE):
            if argument.lstrip("*") not in inspect.signature(function).parameters:
                unknown.append(f"{name}: {argument}")
    assert unknown == []
