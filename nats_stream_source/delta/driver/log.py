"""The log of a Delta table: the live data files of a version, and new commits.

delta-rs reads tables with deletion vectors, but its actions neither show nor take a vector.
Therefore this module reads the log's checkpoint (Parquet) and commits (JSON), and puts a commit as
a new object that must not exist: of two writers of one version, one succeeds. A response that is
lost on the way makes the store report the own commit as existing; the random ``txnId`` tells it
from another writer's.

An action names a data file by its path and vector. ``remove`` of a file with its old vector may
come after ``add`` of the file with the new one.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nats_stream_source.delta.driver.objects import (
    ObjectExistsError,
    ObjectInfo,
    TableObjects,
)

Action = dict[str, Any]
FileId = tuple[str, str | None]
"""The path of a data file, and what identifies its vector."""

_LOG = "_delta_log"
_CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_COMMIT = re.compile(r"_delta_log/(\d{20})\.json")
_ADD_FIELDS = ("path", "partitionValues", "size", "modificationTime", "stats", "tags")
_CHECKPOINT_COLUMNS = ["add", "remove", "txn"]
_MAPS = ("partitionValues", "tags")


class VersionExistsError(Exception):
    """Another writer has committed this version."""


class DamagedLogError(Exception):
    """A file of the log is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The actions of one version."""

    version: int
    actions: Sequence[Action]


class DeltaLog:
    """The log of a table."""

    def __init__(self, objects: TableObjects) -> None:
        self._objects = objects

    def files(self, version: int) -> Mapping[FileId, Action]:
        """The ``add`` of each live file of a version that exists.

        Raises:
            DamagedLogError: a file of the log is missing or cannot be read.
        """
        start, checkpoint = self._checkpoint(version)
        return _live_files(checkpoint, self._commits(start, version))

    def files_since(self, version: int, since: int) -> list[Action]:
        """The actions with the files of each version since a time in milliseconds.

        They are ``add`` of the live files, and ``remove`` of those that were removed since.
        """
        start, checkpoint = self._checkpoint(version)
        commits = list(self._commits(start, version))
        removed = _rows(checkpoint, "remove")
        removed += [a["remove"] for commit in commits for a in commit.actions if "remove" in a]
        late = [action for action in removed if (action.get("deletionTimestamp") or 0) >= since]
        return [*_live_files(checkpoint, commits).values(), *late]

    def transactions(self, version: int) -> Mapping[str, int]:
        """The ``version`` of each ``txn`` action of a version of the table, by its id."""
        start, checkpoint = self._checkpoint(version)
        found = {row["appId"]: row["version"] for row in _rows(checkpoint, "txn")}
        for commit in self._commits(start, version):
            named = [action["txn"] for action in commit.actions if "txn" in action]
            found |= {one["appId"]: one["version"] for one in named}
        return found

    def commits_after(self, version: int) -> list[Commit]:
        """The commits that follow a version; one request if there are none."""
        commits: list[Commit] = []
        while (commit := self.commit(version + len(commits) + 1)) is not None:
            commits.append(commit)
        return commits

    def commit(self, version: int) -> Commit | None:
        """A version's commit, or None if it does not exist.

        Raises:
            DamagedLogError: the entry is not JSON.
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
        if not actions or not all(isinstance(action, dict) for action in actions):
            raise DamagedLogError(f"{path} is damaged")
        return Commit(version, actions)

    def identities(self, versions: Iterable[int]) -> dict[int, ObjectInfo]:
        """What changes if an entry is replaced; a missing entry is left out.

        Args:
            versions: in ascending order.
        """
        of_path = {_commit_path(version): version for version in versions}
        infos = self._objects.infos(list(of_path))
        return {of_path[path]: info for path, info in infos.items() if path in of_path}

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
        try:
            self._objects.put(_commit_path(version), "\n".join(lines).encode(), create=True)
        except (ObjectExistsError, OSError) as error:
            # The response may have been lost, and the entry be this one.
            commit = self.commit(version)
            if commit is not None and _transaction(commit) == txn:
                return
            if isinstance(error, OSError):
                raise
            raise VersionExistsError(f"version {version} exists") from None

    def damaged_entry(self) -> str | None:
        """The path of an entry that is not JSON; None if all can be read."""
        for path, _ in self._objects.list(_LOG):
            if match := _COMMIT.fullmatch(path):
                try:
                    self.commit(int(match[1]))
                except DamagedLogError:
                    return path
        return None

    def _commits(self, after: int, version: int) -> Iterable[Commit]:
        for number in range(after + 1, version + 1):
            commit = self.commit(number)
            if commit is None:
                raise DamagedLogError(f"{_commit_path(number)} is missing")
            yield commit

    def _checkpoint(self, version: int) -> tuple[int, list[pa.Table]]:
        """The version of the newest checkpoint up to ``version`` and its parts; -1 if none."""
        number, parts = self._find_checkpoint(version)
        tables = []
        for path in parts:
            try:
                content = self._objects.get(path)
                tables.append(pq.read_table(pa.BufferReader(content), columns=_CHECKPOINT_COLUMNS))
            except FileNotFoundError as error:
                raise DamagedLogError(f"{path} is missing") from error
            except pa.ArrowInvalid as error:
                raise DamagedLogError(f"{path} is damaged") from error
        return number, tables

    def _find_checkpoint(self, version: int) -> tuple[int, list[str]]:
        """The newest complete checkpoint up to ``version``.

        ``_last_checkpoint`` is a hint only, which can be stale, empty or cut.
        """
        found: dict[tuple[int, int], list[str]] = {}
        for path, _ in self._objects.list(_LOG):
            if (match := _CHECKPOINT.fullmatch(path)) and int(match[1]) <= version:
                found.setdefault((int(match[1]), int(match[3] or 1)), []).append(path)
        complete = [key for key, paths in found.items() if len(paths) == key[1]]
        if not complete:
            if not self.identities([0]):
                raise DamagedLogError(f"{_commit_path(0)} and a checkpoint are missing")
            return -1, []
        newest = max(complete)
        return newest[0], sorted(found[newest])


def apply(files: dict[FileId, Action], actions: Iterable[Action]) -> None:
    """Apply a commit's actions to the live files."""
    for action in actions:
        if "remove" in action:
            files.pop(file_id(action["remove"]), None)
        elif "add" in action:
            files[file_id(action["add"])] = action["add"]


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


def stored_rows(add: Action) -> int | None:
    """The number of a file's rows by its statistics, removed ones included."""
    records = json.loads(add.get("stats") or "{}").get("numRecords")
    return None if records is None else int(records)


def now_ms() -> int:
    """The time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _transaction(commit: Commit) -> str | None:
    infos = (action["commitInfo"] for action in commit.actions if "commitInfo" in action)
    return next((info.get("txnId") for info in infos), None)


def _live_files(
    checkpoint: Iterable[pa.Table], commits: Iterable[Commit]
) -> Mapping[FileId, Action]:
    files = {}
    for add in _rows(checkpoint, "add"):
        action = {name: add[name] for name in _ADD_FIELDS if add.get(name) is not None}
        # A map of Parquet is a list of pairs, and the log's entries have JSON objects.
        action |= {name: dict(action[name]) for name in _MAPS if name in action}
        if (vector := add.get("deletionVector")) is not None:
            action["deletionVector"] = {k: v for k, v in vector.items() if v is not None}
        files[file_id(action)] = action
    for commit in commits:
        apply(files, commit.actions)
    return files


def _rows(checkpoint: Iterable[pa.Table], action: str) -> list[Action]:
    return [
        row
        for table in checkpoint
        if action in table.column_names  # a checkpoint can lack a column without a value
        for row in table[action].drop_null().to_pylist()
    ]


def _commit_path(version: int) -> str:
    return f"{_LOG}/{version:020d}.json"
