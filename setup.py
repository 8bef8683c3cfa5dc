"""The metadata that pyproject.toml cannot state: the README with absolute links, and the URLs.

A package index shows the README without the files that its relative links lead to. The environment
variable ``REPOSITORY_URL`` (``https://github.com/OWNER/NAME``) makes these links absolute, at the
tag of the version, and adds the project's URLs. Without it a link is reduced to its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parent
_RELATIVE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def with_absolute_links(text: str, files: str | None) -> str:
    """``text`` with each relative link below ``files``, or reduced to its text without it."""
    if not files:
        return _RELATIVE.sub(r"\1", text)
    return _RELATIVE.sub(rf"[\1]({files}/\2)", text)


def version() -> str:
    """The package's version, without importing the package and its dependencies."""
    module = (ROOT / "nats_stream_source/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', module, re.MULTILINE)
    if found is None:
        raise ValueError("could not read the version: nats_stream_source does not define it")
    return found[1]


def main() -> None:
    """Pass the metadata to setuptools."""
    from setuptools import setup  # here: the tests import this module, environments lack setuptools

    repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
    files = f"{repository}/blob/v{version()}" if repository else None
    urls = {
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{files}/CHANGELOG.md",
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=with_absolute_links(readme, files),
        long_description_content_type="text/markdown",
        project_urls=urls if repository else {},
    )


if __name__ == "__main__":
    main()
