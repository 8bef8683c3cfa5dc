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
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Tried with deltalake 1.6.6: it decodes escapes a second time, and fails at the others.
_NOT_OF_DELTA_RS = re.compile(rf"{_ESCAPE.pattern}|[\[\]|^]|{_CONTROL.pattern}")


@dataclass(frozen=True)
class TableLocation:
    """Where a table is, and which engine may change it.

    Attributes:
        table: path, URI or catalog name as the user gave it.
        engine: the user's choice.
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
        name = _text(self.table)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "uri", _normalised(name) if is_path(name) else name)
        if self.engine not in get_args(Engine):
            given: str = self.engine
            renamed = "; 'driver' has replaced 'delta-rs'" if given == "delta-rs" else ""
            raise ConfigurationError(
                f"invalid argument: engine is {self.engine!r}, expected 'auto', 'driver' or "
                f"'spark'{renamed}"
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
        """Why ``engine="auto"`` does not take the driver for this location; None if it does.

        Args:
            filesystem: see :meth:`path_for_spark`.
        """
        if not self.is_path:
            return "the table is a name in the catalog"
        if not driver_installed():
            return "the package deltalake is not installed"
        scheme = scheme_of(self.name)
        if (problem := self._path_problem) is not None:
            return problem
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
        path = self.uri
        found = _NOT_OF_DELTA_RS.search(path)
        if found is None and scheme_of(path):
            found = re.search(r"[?#]", path)
        if found is None and os.sep == "/" and not scheme_of(path):
            found = re.search(r"\\", path)
        return None if found is None else reason(PATH, PATH_CHARACTERS, found[0])

    def _validate_path(self) -> None:
        """Raise ConfigurationError for a path that does not name one directory for all engines."""
        if not self.is_path:
            return
        failed = f"invalid argument: table is {self.name!r}"
        try:
            self.name.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{failed}, which is not Unicode text; rename the directory"
            ) from error
        if "`" in self.name:
            raise ConfigurationError(
                f"{failed}, a path with a backquote, which Delta Lake does not take; rename the "
                f"directory"
            )
        if "\0" in self.name:
            raise ConfigurationError(f"{failed}, expected a path without a null character")
        scheme = scheme_of(self.name)
        if scheme == "file" and not _is_local(self.name):
            raise ConfigurationError(
                f"{failed}, a URI with a host; write file:///… for a path on this machine"
            )
        escape = _ESCAPE.search(self.name)
        if scheme and escape and (scheme == "file" or self.storage_options is not None):
            raise ConfigurationError(
                f"{failed}, whose {escape[0]!r} Spark takes literally and delta-rs decodes; write "
                f"{'the path without a scheme' if scheme == 'file' else 'a URI without escapes'}"
            )
        if self.engine == "driver" and (problem := self._path_problem) is not None:
            raise ConfigurationError(
                f"{failed} with engine='driver': {problem}; rename the directory, or use "
                f"engine='spark'"
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


def _text(table: TableArgument) -> str:
    if isinstance(table, str):
        return table
    name = os.fspath(table)
    return name if is_path(name) else os.path.join(os.curdir, name)


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


def _is_local(uri: str) -> bool:
    return _parts(uri)[0].lower() in ("file:", "file://", "file://localhost")


def _collapsed(path: str) -> str:
    """A path without ``//``, ``.``, ``..`` and a slash at its end."""
    return re.sub(r"^//+", "/", posixpath.normpath(path))
