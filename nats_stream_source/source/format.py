"""What both formats are to Spark: a source with options, columns, a streaming and a batch side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NoReturn

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from nats_stream_source.errors import OptionError
from nats_stream_source.options import KvOptions, Mode, StreamOptions
from nats_stream_source.source.batch import batch_reader
from nats_stream_source.source.streaming import StreamReader, stream_reader


class NatsFormat(DataSource):
    """A format of this package.

    The options are those of ``nats_stream_source.options``; they are checked when the source is
    loaded, before anything connects.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        # Not checked here: Spark makes one for a sink too, whose options are others as well.
        super().__init__(dict(options))

    @abstractmethod
    def parsed(self, mode: Mode | None = None) -> KvOptions | StreamOptions:
        """The options, checked for ``mode``; OptionError and others when they are wrong."""

    def streamReader(self, schema: StructType) -> StreamReader:
        """The streaming side."""
        return stream_reader(self.parsed(Mode.STREAMING))

    def reader(self, schema: StructType) -> DataSourceReader:
        """The batch side."""
        return batch_reader(self.parsed(Mode.BATCH))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Writing is not part of this version."""
        self._only_reads("df.write")

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Writing is not part of this version."""
        self._only_reads("df.writeStream")

    def _only_reads(self, asked: str) -> NoReturn:
        raise OptionError(
            f"format {self.name()!r} is read, with spark.read and spark.readStream; {asked} is "
            f"not supported"
        )
