"""The objects of a table's directory, on a local disk or in an object store.

delta-rs opens a table by a URI and ``storage_options``; this module opens the same directory with
the same options. It does so for two operations that delta-rs does not offer: to read the deletion
vectors, and to put an object that must not exist, which makes a commit atomic.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url
from obstore.store import ObjectStore as Store

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.location import scheme_of

# delta-rs takes all options in one mapping; obstore has one for the store, one for the HTTP client
# and one for retries. The names of the latter two, without a store's prefix.
_CLIENT = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "http1_only",
        "http2_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_max_frame_size",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "randomize_addresses",
        "timeout",
        "user_agent",
    }
)
_PREFIXES = ("aws_", "azure_", "google_")
# How delta-rs itself commits where a store cannot put an object that must not exist.
_OTHER_COMMITS = ("aws_s3_allow_unsafe_rename", "aws_s3_locking_provider", "allow_unsafe_rename")


class ObjectExistsError(Exception):
    """An object that must not exist exists."""


class ObjectInfo(NamedTuple):
    """What the store reports of an object; another object under its path differs in it."""

    size: int
    e_tag: str | None
    last_modified: datetime


class TableObjects:
    """The objects below a table's directory, by their paths within it.

    All methods raise OSError if the store fails, and FileNotFoundError for a missing object.

    Attributes:
        written_bytes: of all objects that this one has put.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.written_bytes = 0

    @classmethod
    def at(
        cls, uri: str, options: Mapping[str, str] | None, *, create: bool = False
    ) -> TableObjects:
        """The directory of a table.

        Args:
            uri: an absolute path, or a URI.
            options: delta-rs's ``storage_options``.
            create: create the directory on a local disk if it does not exist.

        Raises:
            UnsupportedStoreError: see :func:`unsupported_store`.
        """
        path = _local_path(uri)
        if path is not None:
            return cls(LocalStore(path, mkdir=create))
        return cls(_remote(uri, options or {}))

    def get(self, path: str) -> bytes:
        """The content of an object."""
        with _failures(path):
            return bytes(obstore.get(self._store, path).bytes())

    def reader(self, path: str) -> pa.NativeFile:
        """A file to read parts of an object."""
        with _failures(path):
            if isinstance(self._store, LocalStore):
                return pa.OSFile(os.path.join(str(self._store.prefix), path))
            return pa.PythonFile(_Reader(obstore.open_reader(self._store, path)), "r")

    def put(self, path: str, content: bytes | memoryview, *, create: bool = False) -> None:
        """Write an object.

        Args:
            create: the object must not exist. Otherwise an object of this path is replaced.

        Raises:
            ObjectExistsError: the object must not exist and exists.
        """
        with _failures(path):
            obstore.put(self._store, path, content, mode="create" if create else "overwrite")
        self.written_bytes += len(content)

    def info(self, path: str) -> ObjectInfo:
        """What the store reports of an object."""
        with _failures(path):
            meta = obstore.head(self._store, path)
        return ObjectInfo(meta["size"], meta["e_tag"], meta["last_modified"])

    def list(self, prefix: str | None = None) -> Iterator[tuple[str, ObjectInfo]]:
        """The objects whose paths begin with a directory, in no particular order."""
        with _failures(prefix or ""):
            for page in obstore.list(self._store, prefix):
                for meta in page:
                    yield (
                        meta["path"],
                        ObjectInfo(meta["size"], meta["e_tag"], meta["last_modified"]),
                    )

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; one that does not exist is ignored."""
        for path in paths:
            with _failures(path):
                try:
                    obstore.delete(self._store, path)
                except FileNotFoundError:
                    continue


class UnsupportedStoreError(Exception):
    """This module cannot commit in a store."""


def unsupported_store(uri: str, options: Mapping[str, str] | None) -> str | None:
    """Why this module cannot commit in a store; None if it can.

    The store or an option is unknown, or an option asks for commits of delta-rs's own kind.
    """
    try:
        if _local_path(uri) is None:
            _remote(uri, options or {})
    except UnsupportedStoreError as error:
        return str(error)
    return None


def _local_path(uri: str) -> str | None:
    scheme = scheme_of(uri)
    if scheme == "file":
        return unquote(urlsplit(uri).path)
    return None if scheme else uri


def _remote(uri: str, options: Mapping[str, str]) -> Store:
    config, client, retry = _split(options)
    given = {"config": config, "client_options": client, "retry_config": retry}
    arguments: dict[str, Any] = {name: value for name, value in given.items() if value}
    try:
        return from_url(uri, **arguments)
    except (BaseError, ValueError) as error:
        raise UnsupportedStoreError(first_line(error)) from error


def _split(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """The options of the store, of its HTTP client and of retries."""
    config: dict[str, str] = {}
    client: dict[str, str] = {}
    retry: dict[str, Any] = {}
    for name, value in options.items():
        lower = name.lower()
        short = next((lower.removeprefix(p) for p in _PREFIXES if lower.startswith(p)), lower)
        if lower in _OTHER_COMMITS:
            raise UnsupportedStoreError(f"storage option {name} is given")
        if short in _CLIENT:
            client[short] = value
        elif lower == "max_retries":
            retry["max_retries"] = int(value)
        elif lower != "retry_timeout" and not lower.startswith("backoff_config."):
            config[name] = value
    return config, client, retry


class _Reader(io.RawIOBase):
    """obstore's file with the methods that pyarrow calls."""

    def __init__(self, file: obstore.ReadableFile) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._file.read(None if size is None or size < 0 else size))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def _failures(path: str) -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise ObjectExistsError(path) from error
    except BaseError as error:
        raise OSError(f"{path}: {first_line(error)}") from error
