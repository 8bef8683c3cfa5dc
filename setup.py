"""What pyproject.toml cannot state: the README with absolute links, the URLs, the compiled modules.

A package index shows the README without the files that its relative links lead to. The environment
variable ``REPOSITORY_URL`` (``https://github.com/OWNER/NAME``) makes these links absolute, at the
tag of the version, and adds the project's URLs. Without it a link is reduced to its text, and
a picture is left out.

The compiled modules are optional: without a C compiler the installation succeeds without them.
``NATS_STREAM_SOURCE_PURE=1`` does not compile them, and the wheel is one for every platform.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
COMPILED = (
    "nats_stream_source.wire.framing.compiled_scan",
    "nats_stream_source.wire.compiled_slices",
)
LIMITED_API = 0x030B0000
"""Lowest Python of the stable ABI that the compiled modules use: 3.11 added memory views to it."""
_RELATIVE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)")


def with_absolute_links(text: str, files: str | None) -> str:
    """``text`` with each relative link below ``files``, or reduced to its text without it."""
    if not files:
        return _RELATIVE.sub(r"\1", _PICTURE.sub("", text))
    text = _PICTURE.sub(rf"![\1]({files}/\2?raw=true)", text)
    return _RELATIVE.sub(rf"[\1]({files}/\2)", text)


def version() -> str:
    """The package's version, without importing the package and its dependencies."""
    module = (ROOT / "nats_stream_source/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', module, re.MULTILINE)
    if found is None:
        raise ValueError("could not read the version: nats_stream_source does not define it")
    return found[1]


def has_limited_api() -> bool:
    """Whether this Python builds against the stable ABI, for all later versions."""
    return (
        sys.implementation.name == "cpython"
        and sys.hexversion >= LIMITED_API
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
    )


def compiled_modules() -> dict[str, Any]:
    """Return the arguments of ``setup`` that compile the modules; none without Cython."""
    from setuptools import Extension

    if os.environ.get("NATS_STREAM_SOURCE_PURE", "0") not in ("", "0") or not find_spec("Cython"):
        return {}
    limited = has_limited_api()
    extensions = [
        Extension(
            name,
            [name.replace(".", "/") + ".pyx"],
            optional=True,
            py_limited_api=limited,
            define_macros=[("Py_LIMITED_API", hex(LIMITED_API))] if limited else [],
        )
        for name in COMPILED
    ]
    options: dict[str, dict[str, Any]] = {"build_ext": {"cython_c_in_temp": True}}
    if limited:
        options["bdist_wheel"] = {"py_limited_api": "cp311"}
    return {"ext_modules": extensions, "options": options}


def main() -> None:
    """Pass the metadata and the extension to setuptools."""
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
        **compiled_modules(),
    )


if __name__ == "__main__":
    main()
