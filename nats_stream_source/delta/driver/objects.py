"""The objects of a table's directory, on a local disk or in an object store.

delta-rs opens a table by a URI and ``storage_options``; this module opens the same directory with
the same options. It does so for two operations that delta-rs does not offer: to read the deletion
vectors, and to put an object that must not exist, which makes a commit atomic.
"""

from __future__ import annotations

import os
import posixpath
import re
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore as Store, from_url

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.location import scheme_of
from nats_stream_source.delta.refused import REFUSED, STORE, reason
from nats_stream_source.delta.tables import EngineRefusedError
from nats_stream_source.errors import ConfigurationError

# delta-rs takes all options in one mapping; obstore has one for the store, one for the HTTP client
# and one for retries. The names of the second one, without a store's prefix.
_CLIENT = re.compile(
    r"allow_(http|invalid_certificates)|(connect_)?timeout|http1_only|http2_\w+|pool_\w+|proxy_\w+"
    r"|randomize_addresses|user_agent"
)
_PREFIXES = ("aws_", "azure_", "google_")
# Options with which delta-rs commits in another way than by an object that must not exist.
_REFUSED = {one.name for one in REFUSED if one.kind == STORE}
_refuse_existing: set[object] = set()
"""The stores of this process that refuse an object that exists."""


if TYPE_CHECKING:
    from obstore import ObjectMeta


class ObjectExistsError(Exception):
    """An object that must not exist exists."""


class TableObjects:
    """The objects below a table's directory, by their paths within it.

    Args:
        root: scheme and host of an object store; empty for a local disk.
        access: what the store is used with; equal for equal options.

    All methods raise OSError if the store fails, and FileNotFoundError for a missing object.

    Attributes:
        written_bytes: of all objects that this one has put.
    """

    def __init__(self, store: Store, root: str = "", access: object = None) -> None:
        self._store = store
        self._root = root
        self._access = root, access
        self._directory = str(store.prefix) if isinstance(store, LocalStore) else None
        self.written_bytes = 0

    @classmethod
    def at(
        cls, uri: str, options: Mapping[str, str] | None, *, create: bool = False
    ) -> TableObjects:
        """The directory of a table.

        Args:
            uri: an absolute path, or the URI of an object store.
            options: delta-rs's ``storage_options``.
            create: create the directory on a local disk if it does not exist.

        Raises:
            EngineRefusedError: the store or an option is unknown, or an option asks for commits of
                delta-rs's own kind.
            FileNotFoundError: there is no such directory on the local disk.
        """
        if not scheme_of(uri):
            if not create and not os.path.isdir(uri):
                raise FileNotFoundError(uri)
            with _failures(uri):
                return cls(LocalStore(uri, mkdir=create))
        options = options or {}
        return cls(_remote(uri, options), "/".join(uri.split("/")[:3]), frozenset(options.items()))

    def get(self, path: str) -> bytes:
        """The content of an object."""
        with _failures(path):
            return bytes(obstore.get(self._store, path).bytes())

    def reader(self, path: str) -> pa.NativeFile:
        """A file to read parts of an object."""
        with _failures(path):
            if self._directory is not None:
                return pa.OSFile(os.path.join(self._directory, path))
            file = obstore.open_reader(self._store, path)
        methods = {name: getattr(file, name) for name in ("read", "seek", "tell", "close")}
        # pyarrow also requires `closed`, which obstore's file lacks.
        return pa.PythonFile(SimpleNamespace(closed=False, **methods), "r")

    def put(self, path: str, content: bytes | memoryview, *, create: bool = False) -> None:
        """Write an object.

        Args:
            create: the object must not exist. Otherwise an object of this path is replaced.

        Raises:
            ObjectExistsError: the object must not exist and exists.
            ConfigurationError: the store would replace it.
        """
        if create:
            self._require_conditional_put()
        with _failures(path):
            obstore.put(self._store, path, content, mode="create" if create else "overwrite")
        self.written_bytes += len(content)

    def identities(self, paths: Sequence[str]) -> dict[str, object]:
        """What another object under its path differs in; one request for all.

        Args:
            paths: in one directory, in ascending order; that of a missing object is left out.
        """
        found: dict[str, object] = {}
        if paths and self._directory is not None:
            for path in paths:
                with suppress(FileNotFoundError):
                    stat = os.stat(os.path.join(self._directory, path))
                    found[path] = stat.st_ino, stat.st_mtime_ns, stat.st_size
        elif paths:
            before = paths[0][:-1]  # a shorter text comes before a longer one
            found = {one["path"]: one for one in self.list(posixpath.dirname(before), before)}
        return found

    def list(self, prefix: str | None = None, after: str | None = None) -> Iterator[ObjectMeta]:
        """The objects whose paths begin with a directory, in no particular order.

        Args:
            after: leave out the objects up to this path.
        """
        with _failures(prefix or ""):
            for page in obstore.list(self._store, prefix, offset=after):
                yield from page

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; one that does not exist is ignored."""
        for path in paths:
            with suppress(FileNotFoundError), _failures(path):
                obstore.delete(self._store, path)

    def _require_conditional_put(self) -> None:
        """Verify, once for each store and process, that it refuses an object that exists."""
        if not self._root or self._access in _refuse_existing:
            return
        path = f"_nats_stream_source_probe_{uuid.uuid4()}"
        with _failures(path):
            try:
                for _ in range(2):
                    obstore.put(self._store, path, b"", mode="create")
            except AlreadyExistsError:
                _refuse_existing.add(self._access)
            finally:
                obstore.delete(self._store, path)
        if self._access not in _refuse_existing:
            raise ConfigurationError(
                f"could not commit in {self._root}: the store replaces an object that must not "
                f"exist (If-None-Match: *), expected an error; of two writers one would lose its "
                f"commit: use a store that has conditional puts"
            )


def _remote(uri: str, options: Mapping[str, str]) -> Store:
    given: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in options.items():
        lower = name.lower()
        short = next((lower.removeprefix(p) for p in _PREFIXES if lower.startswith(p)), lower)
        if lower in _REFUSED:
            raise EngineRefusedError(reason(STORE, lower, name))
        if _CLIENT.fullmatch(short):
            given["client_options"][short] = value
        elif lower == "max_retries":
            given["retry_config"][lower] = int(value)
        elif lower != "retry_timeout" and not lower.startswith("backoff_config."):
            given["config"][name] = value
    arguments: dict[str, Any] = given
    try:
        return from_url(uri, **arguments)
    except (BaseError, ValueError) as error:
        raise EngineRefusedError(first_line(error)) from error


@contextmanager
def _failures(path: str) -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise ObjectExistsError(path) from error
    except BaseError as error:
        raise OSError(f"{path}: {first_line(error)}") from error
