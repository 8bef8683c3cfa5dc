"""Text for users is plain technical English: phrases that CONTRIBUTING.md bans do not occur.

Checked are the pages (README, CHANGELOG, CONTRIBUTING, docs), the strings of the package (option
descriptions, error messages, log texts, help texts), and names and docstrings of tests and their
helpers. Docstrings of the package, comments and inline code are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "nats_stream_source"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
_CODE = re.compile(r"`[^`\n]+`")

BANNED = [
    # A negated noun instead of a negated verb: "is not a", "lacks".
    r"(?:is|are|was|were) no(?! longer| more than| fewer| later| larger| less)\b",
    r"(?-i:(?:is|are|was|were|has|have|had) none)\b",
    # Nouns without a name.
    r"nobody|somebody|whoever",
    r"who (?:asks|answers|leads|reads|writes|waits|listens)",
    r"what there (?:is|are|was|were)",
    # Persons.
    r"believe[sd]?|believing",
    r"(?:knows|forgets?|forgotten|thinks)",
    r"(?:server|leader|replica|mirror|stream|bucket|query|source|planner|reader|Spark) "
    r"(?:says|said|tells|told|wants|asks)",
    # Words with a standard term.
    r"anew|made again|make again",
    r"set back",
    r"(?:stands?|stood|standing) still",
    r"(?:goes|go|went|gone) away",
    r"ask(?:s|ed|ing)? again|asked for again",
    r"for good",
    r"(?:can|cannot|may) be had",
    r"(?:comes?|came) again",
    r"all (?:goes|go|went) on",
    r"(?:goes|go|went) by",
    r"lets? go",
    r"hangs? up",
    r"stays? away",
    # Idioms.
    r"bad weather|in trouble|troubles?|(?:comes?|came) to grief",
    r"lied to|told (?:of|to)|tells? of|(?:is|are|was|were) told|(?:says?|said) nothing",
    r"sound ones?|gets? to see|has (?:a|no) say",
]
# Names of tests that do not start with their subject, or have an article or a person's verb.
_REFUSED_NAME = re.compile(
    r"^test_(?:it|no|one|made|nothing|each|every|is|are|not|twice|again"
    r"|what|whatever|which|who|whoever|while|when|where|whether|if|and|or|but|because"
    r"|after|at|before|between|beyond|by|during|for|from|in|into|near|of|on|out|over|since"
    r"|through|to|under|until|with|within|without)(?:_|$)"
    r"|_(?:an?|the|asks?|asked|says?|said|tells?|told)(?:_|$)"
)
_BANNED = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in BANNED), re.IGNORECASE)


def findings(path: Path, texts: Iterator[tuple[int, str]]) -> list[str]:
    """``file:line: 'phrase' in …`` for each banned phrase of a file's texts."""
    return [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, match.start())}: "
        f"{match[0]!r} in …{text[max(match.start() - 30, 0) : match.end() + 20]!r}"
        for line, text in texts
        for match in _BANNED.finditer(text)
    ]


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Each paragraph of a page with its first line, so that phrases over two lines are found."""
    lines: list[str] = []
    for number, line in enumerate([*path.read_text().splitlines(), ""], start=1):
        text = _CODE.sub("`…`", line)  # names, and what CONTRIBUTING.md bans
        if text.strip() and not text.startswith("|"):
            lines.append(text)
            continue
        yield number - len(lines), "\n".join(lines)
        lines = []
        yield number, text


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Each string of a module that is a text (two words at least), docstrings excluded."""
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text.replace("\n", " ")


def test_banned_phrases_are_found() -> None:
    assert _BANNED.findall("the answer is no JSON; the stream was set back") == [
        "is no",
        "set back",
    ]
    assert not _BANNED.search("the consumer is\nno longer there; unknown; the note is noted")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(path: Path) -> None:
    found = findings(path, paragraphs(path))
    assert not found, "\n".join(found)


def test_strings_of_package() -> None:
    found = [
        finding
        for path in sorted(PACKAGE.rglob("*.py"))
        for finding in findings(path, messages(path))
    ]
    assert not found, f"{len(found)} banned phrases\n" + "\n".join(found)


def names_and_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings of a test module, and the names of its tests as words."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = _CODE.sub("`…`", (ast.get_docstring(node) or "").replace("``", "`"))
            yield getattr(node, "lineno", 1), text
            if getattr(node, "name", "").startswith("test_"):
                yield node.lineno, node.name.replace("_", " ")


def test_refused_names_are_found() -> None:
    for name in ("test_a_stream", "test_made_again", "test_while_stopped", "test_caller_is_told"):
        assert _REFUSED_NAME.search(name)
    for name in ("test_stream_recreated_while_query_runs", "test_as_of_time", "test_notices"):
        assert not _REFUSED_NAME.search(name)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_and_docstrings_of_tests(path: Path) -> None:
    found = findings(path, names_and_docstrings(path))
    names = re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    assert not found, "\n".join(found)
    assert [name for name in names if _REFUSED_NAME.search(name)] == []
