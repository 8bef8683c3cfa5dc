"""The pages name what exists and quote real errors; navigation, anchors and diagrams of the site.

``make docs`` builds the site and fails on each warning. These tests find the same errors without
the packages of the extra ``docs``.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pyspark.sql.types import StructType

from docs.diagrams import wanted
from docs.generate import documents, error_table, public_names
from docs.pictures import DIAGRAMS, copies, in_both_colours
from docs.site_hook import breakable, on_page_content, outside
from nats_stream_source import delta, errors, jetstream
from nats_stream_source.cli import inspect as inspect_command, options as connection_options
from nats_stream_source.errors import NatsSourceError, OptionError
from nats_stream_source.options import kv_options
from nats_stream_source.spark.datasource import NatsKvDataSource
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.docs.pages import page
from tests.support.paths import ROOT

PACKAGE = ROOT / "nats_stream_source"
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "checkpoints_example/README.md",
]

each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def test_readme_names_only_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?= *(?:#|$|`|[A-Z]+=))", README, re.MULTILINE))
    assert named
    assert named <= targets


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [
        link for link in links if "://" not in link and not (path.parent / link).resolve().exists()
    ]
    assert not missing


@each_document
def test_python_examples_are_python(path: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        ast.parse(textwrap.dedent(example))  # an example in a list is indented


def test_generated_parts_are_as_generated() -> None:
    for path, text in documents().items():
        assert path.read_text() == text, f"{path.name}: run make docs"


@each_document
def test_modules_named_by_page_exist(path: Path) -> None:
    folders = "|".join(folder.name for folder in PACKAGE.iterdir() if folder.is_dir())
    named = set(re.findall(rf"[`>]((?:{folders})/[\w/]*(?:\.pyx?|/))[`\"]", path.read_text()))
    # `docs/internals/` writes paths below the package; other pages may name the same folders.
    assert [
        name for name in named if not any((top / name).exists() for top in (PACKAGE, ROOT))
    ] == []


def test_paths_of_contributing_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where a change goes")[2]
    named = set(re.findall(r"`([\w./]+(?:/|\.pyx?|\.md|\.yml|\.in))`", table.partition("\n## ")[0]))
    assert len(named) > 50
    # A name without a folder follows a path of the same folder.
    missing = [
        name
        for name in named
        if not any((top / name).exists() for top in (PACKAGE, ROOT))
        and ("/" in name or not any(PACKAGE.rglob(name)))
    ]
    assert missing == []


@each_document
def test_tests_and_benchmarks_named_by_page_exist(path: Path) -> None:
    named = set(re.findall(r"`((?:tests|benchmarks)/[\w/]*(?:\.py|/))`", path.read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_promises_have_tests() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| .* \|$", text.partition("## Promises\n")[2].partition("\n## ")[0], re.M)
    promises = [row for row in rows if not row.startswith(("| ---", "| event |"))]
    assert len(promises) > 50
    assert [row for row in promises if not re.search(r"`tests/[\w/]+(?:\.py|/)` \|$", row)] == []


# -- conformance.md ------------------------------------------------------------------------------

RULES = re.findall(r"^\| (.*) \| (.*) \|$", page("internals/conformance"), re.MULTILINE)
RULES = [rule for rule in RULES if rule[0] not in ("rule", "---")]


def test_documents_have_rules() -> None:
    parts = re.findall(r"^## (ADR-\d+) ", page("internals/conformance"), re.MULTILINE)
    assert parts == ["ADR-31", "ADR-53", "ADR-15", "ADR-8", "ADR-19"]
    assert len(RULES) > 70


@pytest.mark.parametrize(("rule", "shown_by"), RULES, ids=lambda text: text[:40])
def test_rule_names_tests(rule: str, shown_by: str) -> None:
    tests = re.findall(r"`([\w/]+\.py)`", shown_by)
    # A rule that is not kept by anything needs its reason.
    assert any(not name.startswith("unit/") for name in tests) or "*Not kept*" in rule
    assert [name for name in tests if not (ROOT / "tests" / name).exists()] == []


# -- production.md -------------------------------------------------------------------------------


def test_alerts_of_page_are_alerts_of_rules() -> None:
    (group,) = yaml.safe_load((ROOT / "examples/monitoring/rules.yml").read_text())["groups"]
    alerts = [rule["alert"] for rule in group["rules"] if "alert" in rule]
    sections = page("production").partition("\n## Alerts\n")[2]
    assert re.findall(r"^### (\w+)$", sections, re.MULTILINE) == alerts
    metrics = page("operations")
    for name in re.findall(r"\bnats_stream_source_\w+", page("production")):
        assert f"`{name}`" in metrics


def test_reasons_of_page_exist() -> None:
    for name in re.findall(r"`(\w+Error)`", page("production")):
        assert hasattr(errors, name)
    table = page("production").partition("| `reason` | what to do |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z ]+)`", table)) == {reason.value for reason in Rebuild}


# -- troubleshooting.md --------------------------------------------------------------------------

GIVEN = {"servers": "nats://127.0.0.1:4222", "bucket": "fleet"}

QUOTED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: kv_options({**GIVEN, "startingoffsets": "latest"}),
        "unknown option 'startingoffsets'",
    ),
    (lambda: kv_options({**GIVEN, "batchsize": "1"}), "unknown option 'batchsize'"),
    (lambda: kv_options({**GIVEN, "provider": "nats_kv"}), "unknown option 'provider'"),
    (lambda: kv_options({}), "could not read format 'nats_kv': no option"),
    (
        lambda: NatsKvDataSource(GIVEN).reader(StructType().add("key", "string")),
        "could not read format 'nats_kv' with the given schema",
    ),
]


@pytest.mark.parametrize(("fail", "quoted"), QUOTED, ids=[quoted for _, quoted in QUOTED])
def test_quoted_errors_of_options(fail: Callable[[], Any], quoted: str) -> None:
    (cell,) = re.findall(
        rf"^\| `OptionError: ({re.escape(quoted)}[^`]*)`", page("troubleshooting"), re.MULTILINE
    )
    with pytest.raises(OptionError) as caught:
        fail()
    assert str(caught.value).startswith(cell.rstrip("… "))


def _errors(*modules: ModuleType) -> dict[str, type[NatsSourceError]]:
    """The classes of errors that these modules define, by name."""
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, NatsSourceError)
        and kind.__module__ == module.__name__
    }


def test_error_classes_of_page_exist() -> None:
    named = set(re.findall(r"\b([A-Z]\w+Error)(?=:|`)", page("troubleshooting")))
    others = {"AssertionError", "BrokenPipeError", "DeltaProtocolError", "ModuleNotFoundError"}
    others |= {"UnsupportedClassVersionError"}
    assert len(named - others) > 5
    assert named - others - _errors(errors, inspect_command, connection_options).keys() == set()


def test_error_classes_are_on_page() -> None:
    raised = _errors(errors, inspect_command, connection_options).keys() - {"NatsSourceError"}
    assert len(raised) > 60
    cells = re.findall(r"^\| (`.*?)(?<!\\) \| ", page("troubleshooting"), re.MULTILINE)
    found = set(re.findall(r"\b[A-Z]\w+Error\b", " ".join(cells)))
    assert sorted(raised - found) == []


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
