"""Where a table is, and which engine may change it.

**Names.** A table is given as a path or as a name. A value with a slash or a backslash is a path or
URI; any other value is a name in the catalog, and so is one with a backquote that does not begin
as a path does (``delta.`/lake/fleet` ``). A ``pathlib.Path`` is a path.

**One directory for all engines.** delta-rs and Spark read some texts differently: Spark takes
the ``lake`` of ``//lake/fleet`` as a host and ``%20`` literally, delta-rs decodes ``%20``, and each
has a working directory of its own once the program changes one. Therefore a local path is made
absolute here, once, and both engines get the result. An engine refuses what it cannot name exactly.
"""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from nats_stream_source.delta.refused import PATH, PATH_CHARACTERS, reason
from nats_stream_source.errors import ConfigurationError, MissingPackageError

Engine = Literal["auto", "driver", "spark"]
TableArgument = str | os.PathLike[str]
"""A table as functions take it: a path, a URI, or a name in the catalog."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two characters: `C:\` is no scheme
_URI = re.compile(r"([^:/]+:(?://[^/]*)?)(.*)", re.DOTALL)
_NOT_OF_DELTA_LAKE = re.compile("[`\0\ud800-\udfff]")  # the last ones are not Unicode text
# Tried with deltalake 1.6.6: it decodes escapes a second time, and fails at the others.
_NOT_OF_DELTA_RS = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]|^\x00-\x1f\x7f]")


@dataclass(frozen=True)
class TableLocation:
    """Where a table is, and which engine may change it.

    Attributes:
        table: path, URI or catalog name as the user gave it.
        storage_options: options of delta-rs for an object store; never in a repr, as they have
            secrets.
        name: ``table`` as text, for messages.
        uri: the path or URI for delta-rs: a path on a local disk is absolute.
    """

    table: TableArgument
    engine: Engine = "auto"
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    name: str = field(init=False)
    uri: str = field(init=False)

    def __post_init__(self) -> None:
        name = os.fspath(self.table)
        if not isinstance(self.table, str) and not is_path(name):
            name = os.path.join(os.curdir, name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "uri", _normalised(name) if is_path(name) else name)
        if self.engine not in get_args(Engine):
            raise ConfigurationError(
                f"invalid argument: engine is {self.engine!r}, expected 'auto', 'driver' or 'spark'"
            )
        if self.storage_options is not None and self.engine == "spark":
            raise ConfigurationError(
                "invalid arguments: storage_options with engine='spark', which reads the Hadoop "
                "settings of the session; remove storage_options, or use engine='driver'"
            )
        if not self.is_path and (self.storage_options is not None or self.engine == "driver"):
            given = "storage_options" if self.storage_options is not None else "engine='driver'"
            raise ConfigurationError(
                f"invalid arguments: {given} with table {self.name!r}, which is a name in the "
                f"catalog; pass the table's path or URI, or use engine='spark'"
            )
        if self.engine == "driver" and not driver_installed():
            raise MissingPackageError(
                "could not use engine='driver': the package deltalake is not installed; run "
                "`pip install 'nats-stream-source[delta]'`"
            )
        self._validate_path()

    @property
    def is_path(self) -> bool:
        """Whether the table is a path or URI instead of a name in the catalog."""
        return is_path(self.name)

    def path_for_spark(self, filesystem: str | None) -> str | None:
        """The path or URI for Spark; None for a name in the catalog.

        Args:
            filesystem: the URI against which Spark resolves a path without a scheme; None if it is
                not known (Spark Connect).
        """
        if not self.is_path:
            return None
        scheme = scheme_of(self.name)
        if scheme == "file":
            return f"file:{self.uri}"  # as Spark names it
        if scheme or (filesystem is not None and filesystem.startswith("file:")):
            return self.uri
        # Relative to a directory of another file system, or of the server of Spark Connect.
        return _collapsed(self.name)

    def driver_problem(self, filesystem: str | None) -> str | None:
        """Why ``engine="auto"`` does not take the driver for this location; None if it does."""
        if not self.is_path:
            return "the table is a name in the catalog"
        if not driver_installed():
            return "the package deltalake is not installed"
        if (problem := self._path_problem) is not None:
            return problem
        scheme = scheme_of(self.name)
        if self.storage_options is not None or scheme == "file":
            return None
        if scheme:
            return f"the path has the scheme '{scheme}', and storage_options are not given"
        if filesystem is None:
            return "with Spark Connect, a path without a scheme is the server's; write file:///…"
        if not filesystem.startswith("file:"):
            return f"paths without a scheme are in {filesystem}"
        return None

    @property
    def _path_problem(self) -> str | None:
        """Why delta-rs cannot name the directory; None if it can."""
        others = "?#" if scheme_of(self.uri) else "\\" if os.sep == "/" else ""
        found = [match[0] for match in _NOT_OF_DELTA_RS.finditer(self.uri)]
        found += [character for character in others if character in self.uri]
        return reason(PATH, PATH_CHARACTERS, found[0]) if found else None

    def _validate_path(self) -> None:
        """Raise ConfigurationError for a path that does not name one directory for all engines."""
        if not self.is_path:
            return
        failed = f"invalid argument: table is {self.name!r}"
        if (found := _NOT_OF_DELTA_LAKE.search(self.name)) is not None:
            raise ConfigurationError(
                f"{failed}, a path with {found[0]!r}, which Delta Lake does not take; rename the "
                f"directory"
            )
        local = ("file:", "file://", "file://localhost")
        if scheme_of(self.name) == "file" and _parts(self.name)[0].lower() not in local:
            raise ConfigurationError(
                f"{failed}, a URI with a host; write file:///… for a path on this machine"
            )
        if self.engine == "driver" and (problem := self._path_problem) is not None:
            raise ConfigurationError(
                f"{failed} with engine='driver': {problem}; rename the directory, or use "
                f"engine='spark'"
            )


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """Up to which size of the index ``engine="auto"`` takes the driver; None for no limit.

    Attributes:
        index_bytes: size of the index of keys in the driver's memory: 56 bytes for each key and the
            bytes of the key. With ``engine="driver"`` it applies if ``limits`` are given.
    """

    index_bytes: int | None = 1 << 30

    def __post_init__(self) -> None:
        value = self.index_bytes
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ConfigurationError(
                f"invalid argument: index_bytes is {value!r}, expected an integer from 1, or None"
            )


def is_path(table: str) -> bool:
    """Whether ``table`` is a path or URI instead of a name in the catalog."""
    if "`" in table:
        return table.startswith(("/", "./", "../")) or bool(scheme_of(table))
    return "/" in table or "\\" in table


def driver_installed() -> bool:
    """Whether the package of the driver's engine is installed."""
    return importlib.util.find_spec("deltalake") is not None


def scheme_of(table: str) -> str:
    """The scheme of a URI in lower case; empty for a path."""
    match = _SCHEME.match(table)
    return match[1].lower() if match else ""


def _normalised(name: str) -> str:
    """An absolute path, or a URI whose path is normal, without a slash at its end."""
    scheme = scheme_of(name)
    if scheme == "file":
        return _collapsed(_parts(name)[1] or "/")
    if not scheme:
        path = os.path.abspath(name)
        return _collapsed(path) if os.sep == "/" else path
    head, path = _parts(name)
    return head + (_collapsed(path) if path.strip("/") else "")


def _parts(uri: str) -> tuple[str, str]:
    """Scheme and host of a URI, and its path."""
    match = _URI.match(uri)
    assert match is not None  # it has a scheme
    return match[1], match[2]


def _collapsed(path: str) -> str:
    """A path without ``//``, ``.``, ``..`` and a slash at its end."""
    return re.sub(r"^//+", "/", posixpath.normpath(path))
