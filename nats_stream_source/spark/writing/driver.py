"""What ``df.write`` does on the driver before its job starts."""

from __future__ import annotations

from nats_stream_source.options.writing import KvWriteOptions, StreamWriteOptions
from nats_stream_source.spark.reading.event_loop import Runner
from nats_stream_source.spark.writing.target import open_bucket, open_stream


def prepare_target(options: KvWriteOptions | StreamWriteOptions) -> None:
    """Connect; create the bucket or stream if it is missing and ``ifMissing=create``.

    Raises:
        the errors of ``target``, and those of connecting.
    """
    runner = Runner(options.connection)

    async def open_target() -> None:
        jetstream = await runner.connection.jetstream()
        if isinstance(options, KvWriteOptions):
            await open_bucket(jetstream, options)
        else:
            await open_stream(jetstream, options)

    try:
        runner.plan(open_target)
    finally:
        runner.close()
