"""The documentation site in a real browser: complete without another host, readable on a phone."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from docs.diagrams import wanted
from tests.support.browser import Browser, needs_chromium, served
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.wait import wait_until_async

# `make docs` runs these tests with the site that it has built, in the directory SITE.
pytestmark = [pytest.mark.faults, needs_chromium]

_PHONE = 390
_PICTURES = """[...document.querySelectorAll("article img")]
    .filter(image => image.checkVisibility())"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = Path(os.environ.get("SITE") or tmp_path_factory.mktemp("site"))
    if "SITE" not in os.environ:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
        ran(*command, NO_MKDOCS_2_WARNING="1")
    return built.resolve()


@pytest.fixture(scope="module")
def site(built: Path) -> Iterator[str]:
    with served(built) as url:
        yield url


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with Browser(tmp_path / "profile") as browser:
        yield browser


def pages() -> list[str]:
    docs = ROOT / "docs"
    return [
        page.relative_to(docs).with_suffix(".html").as_posix()
        for page in sorted(docs.rglob("*.md"))
    ]


async def test_pages_are_complete_without_another_host_and_fit_phone(
    site: str, browser: Browser
) -> None:
    await browser.look(width=_PHONE)
    found: dict[str, object] = {}
    diagrams = 0
    for page in pages():
        await browser.open(f"{site}/{page}")
        missing = await browser.evaluate(
            f"{_PICTURES}.filter(i => !i.naturalWidth).map(i => i.src)"
        )
        diagrams += await browser.evaluate(
            f"{_PICTURES}.filter(i => i.src.includes('drawn/')).length"
        )
        width = await browser.evaluate("document.documentElement.scrollWidth")
        outside = [url for url in browser.requests if not url.startswith((site, "data:"))]
        problems = [browser.errors, missing, outside, [] if width <= _PHONE else [f"{width} px"]]
        if any(problems):
            found[page] = problems
    assert found == {}
    assert diagrams == len(wanted())


async def test_pictures_follow_colours_of_page(site: str, browser: Browser) -> None:
    shown_colours = f"{_PICTURES}.map(image => image.src.split('#')[1])"
    shown = {}
    for dark in (False, True):
        await browser.look(width=1200, dark=dark)
        await browser.open(f"{site}/index.html")
        shown[dark] = await browser.evaluate(shown_colours)
    assert set(shown[False]) == {"only-light"}
    assert set(shown[True]) == {"only-dark"}
    # The switch has three states: those of the system, light, dark.
    await browser.evaluate("document.querySelector('label[for=__palette_1]').click()")
    assert set(await browser.evaluate(shown_colours)) == {"only-light"}


@pytest.mark.parametrize("scheme", ["http", "file"])
async def test_search_returns_pages(site: str, built: Path, browser: Browser, scheme: str) -> None:
    top = site if scheme == "http" else built.as_uri()
    await browser.look(width=1200)
    await browser.open(f"{top}/index.html?q=failOnDataLoss")
    first = "document.querySelector('.md-search-result__link')?.href ?? ''"
    await wait_until_async(lambda: browser.evaluate(first), "a result")
    assert (await browser.evaluate(first)).startswith(top)
    assert browser.errors == []
