"""The log of a Delta table: the state of its newest version, new commits, deletion vectors.

delta-rs reads tables with deletion vectors, but its actions neither show nor take a vector.
Therefore this module reads the log's checkpoint (Parquet) and commits (JSON), and puts a commit as
a new object that must not exist: of two writers of one version, one succeeds. A response that is
lost on the way makes the store report the own commit as existing; the random ``txnId`` tells it
from another writer's.

An action names a data file by its path and vector. ``remove`` of a file with its old vector may
come after ``add`` of the file with the new one.

**Deletion vectors** are the removed rows of a data file (Delta protocol, "Deletion Vector Format").
A vector is the magic number, little endian, and a 64-bit Roaring bitmap of row positions in the
portable format. A file of vectors is a version byte, then for each vector its size (4 bytes, big
endian), the vector, and the vector's CRC-32 (big endian). The log names a vector by a descriptor::

    {"storageType": "u", "pathOrInlineDv": Z85 of the file's UUID, "offset": of the size field,
     "sizeInBytes": of the vector, "cardinality": removed rows}

``storageType`` "i" has the vector itself in Z85, and "p" an absolute path: the tables of shallow
clones have those, and Spark changes these tables.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import struct
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from nats_stream_source.delta.driver.objects import ObjectExistsError, TableObjects
from nats_stream_source.delta.refused import FEATURE, reason
from nats_stream_source.delta.tables import EngineRefusedError

Action = dict[str, Any]
FileId = tuple[str, str | None]
"""The path of a data file, and what identifies its vector."""

_LOG = "_delta_log"
_CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_CHECKPOINT_V2 = re.compile(r"_delta_log/\d{20}\.checkpoint\.[0-9a-f-]{36}\.(?:json|parquet)")
_COMMIT = re.compile(r"_delta_log/(\d{20})\.json")
_REQUIRED: dict[str, tuple[str, ...]] = {
    "commitInfo": (),
    "add": ("path", "partitionValues", "size"),
    "remove": ("path",),
    "txn": ("appId", "version"),
    "metaData": ("id", "schemaString", "partitionColumns"),
    "protocol": ("minReaderVersion", "minWriterVersion"),
}
_ADD_FIELDS = ("path", "partitionValues", "size", "stats", "tags", "deletionVector")
_MAPS = {"partitionValues", "tags", "configuration", "options"}  # pairs, where Arrow reads them
_CHECKPOINT_COLUMNS = [
    *(f"add.{name}" for name in _ADD_FIELDS),
    *("remove", "txn", "metaData", "protocol"),
]


class VersionExistsError(Exception):
    """Another writer has committed this version."""


class DamagedLogError(Exception):
    """A file of the log, or a deletion vector that it names, is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The actions of one version."""

    version: int
    actions: Sequence[Action]


@dataclass(slots=True)
class LogState:
    """What the actions of the log up to a version make together.

    Attributes:
        version: the last one; -1 without any.
        files: the ``add`` of each live file.
        removed: the ``remove`` of each file that the log still names.
        transactions: the ``version`` of each ``txn``, by its id.
    """

    version: int = -1
    files: dict[FileId, Action] = field(default_factory=dict)
    removed: list[Action] = field(default_factory=list)
    transactions: dict[str, int] = field(default_factory=dict)
    metadata: Action = field(default_factory=dict)
    protocol: Action = field(default_factory=dict)

    @property
    def properties(self) -> dict[str, str]:
        """The table's properties."""
        return self.metadata.get("configuration") or {}

    def apply(self, commit: Commit) -> None:
        """Add the actions of a version."""
        self.version = commit.version
        for action in commit.actions:
            for kind, value in action.items():
                if kind == "add":
                    self.files[file_id(value)] = value
                elif kind == "remove":
                    self.files.pop(file_id(value), None)
                    self.removed.append(value)
                elif kind == "txn":
                    self.transactions[value["appId"]] = int(value["version"])
                elif kind == "metaData":
                    self.metadata = value
                elif kind == "protocol":
                    self.protocol = value


class DeltaLog:
    """The log of a table.

    Attributes:
        entry_bytes: of the entries that were read or put since the last checkpoint.
    """

    def __init__(self, objects: TableObjects) -> None:
        self._objects = objects
        self.entry_bytes = 0

    def newest(self) -> LogState | None:
        """The newest version; None if there is no log.

        ``_last_checkpoint`` is not read: it is a hint only, which can be stale, empty or cut.

        Raises:
            DamagedLogError: a file of the log is missing or cannot be read.
            EngineRefusedError: the log begins with a checkpoint of another kind.
        """
        entries, checkpoints = [-1], dict[tuple[int, int], list[str]]()
        others = False
        for one in self._objects.list(_LOG):
            path = one["path"]
            if match := _COMMIT.fullmatch(path):
                entries.append(int(match[1]))
            elif match := _CHECKPOINT.fullmatch(path):
                checkpoints.setdefault((int(match[1]), int(match[3] or 1)), []).append(path)
            others |= _CHECKPOINT_V2.fullmatch(path) is not None
        complete = [key for key, paths in checkpoints.items() if len(paths) == key[1]]
        state = LogState()
        if complete:
            version, parts = max(complete)
            for path in sorted(checkpoints[version, parts]):
                state.apply(Commit(version, list(self._checkpoint(path))))
        for commit in self.commits_after(state.version):
            state.apply(commit)
        if state.version < max(entries):
            if others:
                raise EngineRefusedError(reason(FEATURE, "*", "v2Checkpoint"))
            raise DamagedLogError(f"{_commit_path(state.version + 1)} is missing")
        if state.version < 0:
            return None
        for kind, action in (("protocol", state.protocol), ("metaData", state.metadata)):
            if not action:
                raise DamagedLogError(f"{_LOG} has no action {kind!r}")
        return state

    def checkpoint_due(self) -> bool:
        """Whether the entries since the last checkpoint have half as many bytes as it has.

        A checkpoint has the files that were removed within the retention. At thirty commits a
        second it has 13 MB after half an hour, and one every hundred commits would be most of what
        is written. Without the hint ``_last_checkpoint``, one is due.
        """
        try:
            hint = json.loads(self._objects.get(f"{_LOG}/_last_checkpoint"))
            return 2 * self.entry_bytes >= int(hint["sizeInBytes"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return True

    def commits_after(self, version: int) -> list[Commit]:
        """The commits that follow a version; one request if there are none."""
        commits: list[Commit] = []
        while (commit := self.commit(version + len(commits) + 1)) is not None:
            commits.append(commit)
        return commits

    def commit(self, version: int) -> Commit | None:
        """A version's commit, or None if it does not exist.

        Raises:
            DamagedLogError: the entry is not JSON, or lacks what an action must have.
        """
        path = _commit_path(version)
        try:
            content = self._objects.get(path)
        except FileNotFoundError:
            return None
        try:
            actions = [json.loads(line) for line in content.splitlines() if line.strip()]
        except ValueError:
            actions = []
        if not actions or not all(map(_is_action, actions)):
            raise DamagedLogError(f"{path} is damaged")
        self.entry_bytes += len(content)
        return Commit(version, actions)

    def identities(self, versions: Iterable[int]) -> dict[int, object]:
        """What changes if an entry is replaced; a missing entry is left out.

        Args:
            versions: in ascending order.
        """
        of_path = {_commit_path(version): version for version in versions}
        found = self._objects.identities(list(of_path))
        return {of_path[path]: one for path, one in found.items() if path in of_path}

    def put(self, version: int, operation: str, actions: Iterable[Action]) -> None:
        """Commit a version.

        Raises:
            VersionExistsError: the version exists.
        """
        txn = str(uuid.uuid4())
        info = {
            "commitInfo": {
                "timestamp": now_ms(),
                "operation": operation,
                "operationParameters": {},
                "isBlindAppend": False,
                "engineInfo": "nats-stream-source",
                "txnId": txn,
            }
        }
        lines = (json.dumps(action, separators=(",", ":")) for action in (info, *actions))
        content = "\n".join(lines).encode()
        try:
            self._objects.put(_commit_path(version), content, create=True)
            self.entry_bytes += len(content)
        except (ObjectExistsError, OSError) as error:
            # The response may have been lost, and the entry be this one.
            commit = self.commit(version)
            infos = (action.get("commitInfo", {}) for action in (commit.actions if commit else ()))
            if any(info.get("txnId") == txn for info in infos):
                return
            if isinstance(error, OSError):
                raise
            raise VersionExistsError(f"version {version} exists") from None

    def _checkpoint(self, path: str) -> Iterator[Action]:
        try:
            file = pq.ParquetFile(pa.BufferReader(self._objects.get(path)))
            table = file.read(columns=_CHECKPOINT_COLUMNS)
        except FileNotFoundError as error:
            raise DamagedLogError(f"{path} is missing") from error
        except pa.ArrowInvalid as error:
            raise DamagedLogError(f"{path} is damaged") from error
        for kind in table.column_names:  # a checkpoint can lack a column without a value
            for row in table[kind].drop_null().to_pylist():
                yield {kind: _given(row)}


def file_id(action: Action) -> FileId:
    """What identifies a data file with its vector in the log."""
    vector = action.get("deletionVector")
    if vector is None:
        return action["path"], None
    identity = f"{vector['storageType']}{vector['pathOrInlineDv']}"
    return action["path"], f"{identity}@{vector['offset']}" if "offset" in vector else identity


def removal(add: Action, *, data_change: bool) -> Action:
    """The action that removes a live file with its vector."""
    kept = ("path", "partitionValues", "size", "tags", "deletionVector")
    removed = {name: add[name] for name in kept if name in add}
    removed |= {
        "deletionTimestamp": now_ms(),
        "dataChange": data_change,
        "extendedFileMetadata": True,
    }
    return {"remove": removed}


def with_vector(add: Action, descriptor: Action, rows: int, *, data_change: bool) -> Action:
    """The ``add`` of a data file with another vector.

    Its statistics then describe more rows than are live, and must say so.
    """
    kept = ("path", "partitionValues", "size", "tags")
    return {
        **{name: add[name] for name in kept if name in add},
        "modificationTime": now_ms(),
        "dataChange": data_change,
        "stats": _not_tight(add.get("stats") or "{}", rows),
        "deletionVector": descriptor,
    }


@lru_cache(maxsize=1024)  # a file keeps its statistics, commit for commit
def _not_tight(statistics: str, rows: int) -> str:
    values = json.loads(statistics) | {"numRecords": rows, "tightBounds": False}
    return json.dumps(values, separators=(",", ":"))


def _is_action(line: Any) -> bool:
    """Whether a line of an entry is an action; one of an unknown kind may have any value."""
    return (isinstance(line, dict) and bool(line)) and all(
        isinstance(line[kind], dict) and all(line[kind].get(name) is not None for name in required)
        for kind, required in _REQUIRED.items()
        if kind in line
    )


def _given(row: Action) -> Action:
    """The fields of an action that have a value, as an entry of the log has them."""
    return {
        name: dict(value) if name in _MAPS else _given(value) if type(value) is dict else value
        for name, value in row.items()
        if value is not None
    }


def now_ms() -> int:
    """The time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _commit_path(version: int) -> str:
    return f"{_LOG}/{version:020d}.json"


_MAGIC = struct.pack("<I", 1681511377)
_VERSION = b"\x01"
_UUID_LENGTH = 20  # characters of 16 bytes in Z85

_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_Z85, _FROM_Z85 = bytes.maketrans(_B85, _Z85), bytes.maketrans(_Z85, _B85)


class VectorError(DamagedLogError):
    """A deletion vector is damaged, or of a kind that this module does not read."""


class VectorFile:
    """Builds the file with the vectors of one commit; ``name`` is its path within the table."""

    def __init__(self) -> None:
        own = uuid.uuid4()
        self.name = _file_name("", own)
        self._encoded_id = _encode(own.bytes)
        self._parts = bytearray(_VERSION)

    def add(self, rows: BitMap64) -> dict[str, Any]:
        """Append the vector of these rows; its descriptor."""
        vector = _MAGIC + rows.serialize()
        offset = len(self._parts)
        self._parts += struct.pack(">I", len(vector)) + vector
        self._parts += struct.pack(">I", zlib.crc32(vector))
        return {
            "storageType": "u",
            "pathOrInlineDv": self._encoded_id,
            "offset": offset,
            "sizeInBytes": len(vector),
            "cardinality": len(rows),
        }

    def content(self) -> bytes:
        """The file's bytes; empty if it does not have a vector."""
        return bytes(self._parts) if len(self._parts) > len(_VERSION) else b""


def vector_path(descriptor: Action) -> str | None:
    """The path within the table of the file with a vector; None if the descriptor contains it.

    Raises:
        EngineRefusedError: the file can lie outside of the table.
    """
    kind, text = descriptor["storageType"], descriptor["pathOrInlineDv"]
    if kind == "i":
        return None
    if kind != "u":
        raise EngineRefusedError(f"a deletion vector is outside of the table ({text})")
    prefix, name = text[:-_UUID_LENGTH], text[-_UUID_LENGTH:]
    return _file_name(prefix, uuid.UUID(bytes=_decode(name)))


def vector_file_name(descriptor: Action) -> str | None:
    """The name of the file with a vector, in whatever directory; None if there is none."""
    if descriptor["storageType"] == "p":
        return posixpath.basename(str(descriptor["pathOrInlineDv"]))
    path = vector_path(descriptor)
    return None if path is None else posixpath.basename(path)


def vector_rows(descriptor: Action, content: bytes, rows: int) -> BitMap64:
    """The removed rows.

    Args:
        content: of the file that :func:`vector_path` names; ignored for an inline vector.
        rows: the number of rows of the data file.

    Raises:
        VectorError: the vector is damaged, or names a row that the file does not have.
    """
    size = descriptor["sizeInBytes"]
    if descriptor["storageType"] == "i":
        vector = _decode(descriptor["pathOrInlineDv"])[:size]
        intact = len(vector) == size
    else:
        start = descriptor["offset"] + 4
        vector, check = content[start : start + size], content[start + size : start + size + 4]
        intact = (
            content[start - 4 : start] == struct.pack(">I", size)
            and len(vector) == size
            and check == struct.pack(">I", zlib.crc32(vector))
        )
    if not intact or vector[:4] != _MAGIC:
        raise VectorError("the deletion vector is damaged (its size, magic number or CRC-32)")
    try:
        removed = BitMap64.deserialize(vector[4:])
    except ValueError as error:
        raise VectorError(f"the deletion vector is damaged ({error})") from error
    if len(removed) != descriptor["cardinality"]:
        raise VectorError(
            f"the deletion vector is damaged: it has {len(removed)} rows, expected "
            f"{descriptor['cardinality']}"
        )
    if removed and removed.max() >= rows:
        raise VectorError(
            f"the deletion vector names row {removed.max()}, and the data file has {rows} rows"
        )
    return removed


def is_vector_path(path: str) -> bool:
    """Whether an object's path is one that :func:`vector_path` returns."""
    name = path.rpartition("/")[2]
    return name.startswith("deletion_vector_") and name.endswith(".bin")


def _file_name(prefix: str, name: uuid.UUID) -> str:
    return f"{prefix}/deletion_vector_{name}.bin" if prefix else f"deletion_vector_{name}.bin"


def _encode(data: bytes) -> str:
    return base64.b85encode(data).translate(_TO_Z85).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b85decode(text.encode().translate(_FROM_Z85))
    except ValueError as error:
        raise VectorError(f"{text!r} is not Z85") from error
