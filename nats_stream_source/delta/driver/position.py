"""The position of a follower in the log of its table: ``txn`` actions in the commit of the rows.

Rows and position are one commit, so a follower that ends at any point continues exactly there. A
position has three actions of int64, whose ids begin with the stream's name and a digest of the
query (keys, codecs, history)::

    nats-stream-source/KV_fleet/6f0d2c1b9e57/sequence   the last stream sequence that was seen
    nats-stream-source/KV_fleet/6f0d2c1b9e57/created    creation time of the stream, in ns
    nats-stream-source/KV_fleet/6f0d2c1b9e57/time       time of the message there; 0 without one

They lack ``lastUpdated``, without which Delta Lake keeps them until
``delta.setTransactionRetentionDuration`` says otherwise: a table with that property is refused.

**When a position is void.** RESTORE takes rows back and keeps ``txn`` (measured with deltalake
1.6.6). Therefore a position counts only if the log still has its commit and each one since, and
none of these is a RESTORE. Without a position, the follower reads the initial values.

**Two followers.** The table has the entries up to the stored position. So a follower that is behind
it commits neither rows nor position: a row of its could be one that the other has removed since. A
follower that reads the initial values begins again when another one has committed a position.
"""

from __future__ import annotations

from collections.abc import Sequence

from nats_stream_source.delta.driver.log import Action
from nats_stream_source.delta.driver.snapshot import Snapshot
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from nats_stream_source.rows.offsets import Position

_RETENTION = "delta.setTransactionRetentionDuration"
_PARTS = ("sequence", "created", "time")


class PositionVoidError(Exception):
    """The table is not the one that the position describes; the text says why."""


def order(position: Position) -> tuple[int, int]:
    """The greater one of two positions is the newer one."""
    return nanoseconds(position.created), position.stream_seq


class PositionLog:
    """Reads the position of one query from the log of its table, and adds it to commits.

    Args:
        query: digest of what the query reads.

    Attributes:
        stored: the position in the log; None without a valid one.
        known: whether the log has a position, valid or void.
        next: the position that the next commit of rows takes; None if it takes none.
        required: whether the next change makes a commit if only the position changes.
        reads_initial_values: whether the follower still reads them, and commits no position.
    """

    def __init__(self, stream: str, query: str) -> None:
        self._stream = f"nats-stream-source/{stream}/"
        self._ids = [f"{self._stream}{query}/{part}" for part in _PARTS]
        self._version: int | None = None  # the log is known up to this version
        self._table_id = ""
        self.known = False
        self.stored: Position | None = None
        self.next: Position | None = None
        self.required = False
        self.reads_initial_values = False

    def read(self, table: Snapshot) -> None:
        """Set ``stored`` from a table that was just opened."""
        self._version, self._table_id, self.stored = table.version, table.table_id, None
        self.known = self._ids[0] in table.transactions
        if not self.known:
            if any(one.startswith(self._stream) for one in table.transactions):
                raise ConfigurationError(
                    f"could not follow into table {table.name!r}: it has the position of a "
                    f"follower with other keys, codecs, history or metaOnly; use these, or name a "
                    f"new table"
                )
            return
        for version in range(table.version, -1, -1):
            commit = table.log.commit(version)
            if commit is None or _restores(commit.actions):
                return
            if (found := self._position(commit.actions)) is not None:
                self.stored = found
                return

    def actions(self, table: Snapshot, *, changed: bool) -> list[Action] | None:
        """The actions of the position in the next commit of a table; none if it has no position.

        None if another follower has committed the entries already: there is nothing to commit.

        Args:
            table: after its refresh.

        Raises:
            PositionVoidError: another writer has restored a version of the table or created it
                again, or the log lacks a commit since the last one that was read.
        """
        if _RETENTION in table.properties:
            raise ConfigurationError(
                f"could not follow into table {table.name!r}: with its property {_RETENTION}, "
                f"Delta Lake drops the follower's position; unset the property, or follow with "
                f"Spark"
            )
        if self._version is None:
            self._version, self._table_id = table.version, table.table_id
        if table.table_id != self._table_id:
            raise PositionVoidError(f"table {table.name!r} was deleted and created again")
        for version in range(self._version + 1, table.version + 1):
            commit = table.log.commit(version)
            if commit is None or _restores(commit.actions):
                cause = "the log lacks" if commit is None else "RESTORE made"
                raise PositionVoidError(f"{cause} version {version} of table {table.name!r}")
            found = self._position(commit.actions)
            if found is not None and (self.stored is None or order(found) > order(self.stored)):
                self.stored = found
            self._version = version
        if self.next is None:
            if self.stored is not None and self.reads_initial_values:
                read = self.stored.stream_seq
                raise PositionVoidError(f"another follower has read further, up to {read}")
            return []
        if self.stored is not None and order(self.stored) >= order(self.next):
            return None
        if not (changed or self.required):
            return []
        time = nanoseconds(self.next.time) if self.next.time else 0
        values = (self.next.stream_seq, nanoseconds(self.next.created), time)
        return [
            {"txn": {"appId": one, "version": value}}
            for one, value in zip(self._ids, values, strict=True)
        ]

    def committed(self, version: int) -> None:
        """A commit has the actions of :meth:`actions`."""
        self._version, self.stored = version, self.next

    def _position(self, actions: Sequence[Action]) -> Position | None:
        found = {
            action["txn"]["appId"]: int(action["txn"]["version"])
            for action in actions
            if "txn" in action
        }
        if not all(one in found for one in self._ids):
            return None
        sequence, created, time = (found[one] for one in self._ids)
        return Position(
            created=rfc3339(created),
            epoch=0,
            origin=0,
            stream_seq=sequence,
            time=rfc3339(time) if time else None,
            consumer_seq=0,
            initial_through=sequence,
        )


def _restores(actions: Sequence[Action]) -> bool:
    return any(action.get("commitInfo", {}).get("operation") == "RESTORE" for action in actions)
