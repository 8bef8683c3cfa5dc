"""Names that are not options of a format, and what to write instead.

A new user brings the names of Spark's Kafka source, of the other format, or of Spark SQL. The
parser appends the advice of this module to its error, in place of the option with the nearest name.
There is one table for reading and one for writing each format.
"""

from __future__ import annotations


def create_view(format_name: str, stream_option: str) -> str:
    """The statement that takes the place of CREATE TABLE, whose options Spark drops."""
    return (
        f"CREATE TEMPORARY VIEW name USING {format_name} OPTIONS (servers '...', "
        f"{stream_option} '...')"
    )


def _from_spark(format_name: str, stream_option: str, filter_option: str) -> dict[str, str]:
    """Names that come with an API of Spark, or of its Kafka source."""
    table = (
        "Spark sets it for CREATE TABLE and does not pass a table's options to a Python source; "
        f"write {create_view(format_name, stream_option)}"
    )
    return {
        "provider": table,
        "path": f"write load() without a path, and set the option {stream_option!r}",
        "kafka.bootstrap.servers": "write 'servers'",
        "subscribe": f"write {stream_option!r}, or '{stream_option}s' for a list",
        "subscribePattern": f"write '{stream_option}Pattern'",
        "topic": f"write {stream_option!r}",
        "url": "write 'servers'",
        "startingOffsetsByTimestamp": "write 'startTime'",
        "startingOffsetsByTimestampStrategy": "write 'startTimeStrategy'",
        "maxOffsetsPerTrigger": "write 'maxRowsPerTrigger'",
        "minOffsetsPerTrigger": "write 'minRowsPerTrigger'",
        **dict.fromkeys(("batchSize", "maxBatchSize"), "write 'maxRowsPerTrigger'"),
        "filterPushdown": "Spark reuses one filtered plan for all uses of a DataFrame, so it was "
        f"removed; set {filter_option!r} or a start, and filter the rows with where(...)",
    }


KV_ADVICE = {
    **_from_spark("nats_kv", "bucket", "keys"),
    "startingOffsets": "write updatesOnly=true for latest, includeHistory=true for "
    "earliest, or 'startSequence' for a revision; without these the query starts with the last "
    "entry of each key",
    "startingTimestamp": "write 'startTime'",
    "endingOffsets": "write 'asOfSequence' to read the bucket as it was at a revision",
    "endingTimestamp": "write 'asOfTime' to read the bucket as it was at a time",
    "stream": "write 'bucket', or format('nats_stream') to read a stream",
    "streams": "write 'buckets', or format('nats_stream') to read streams",
    "streamPattern": "write 'bucketPattern', or format('nats_stream') to read streams",
    "subject": "write 'keys' to select keys, or format('nats_stream') to read a subject",
    "filterSubjects": "write 'keys', without the prefix $KV.<bucket>",
    "deliverPolicy": "write 'updatesOnly', 'includeHistory', 'startSequence' or 'startTime'",
    "endSequence": "write 'asOfSequence' to read the bucket as it was at a revision",
    "endTime": "write 'asOfTime' to read the bucket as it was at a time",
    "headersOnly": "write 'metaOnly'",
    "minLastSequence": "write 'minLastRevision'",
}

_CODEC = (
    "the subjects and messages of a stream are not encoded; write format('nats_kv') to read a "
    "bucket with codecs"
)

STREAM_ADVICE = {
    **_from_spark("nats_stream", "stream", "filterSubjects"),
    "startingOffsets": "write deliverPolicy=all for earliest, deliverPolicy=new for "
    "latest, or 'startSequence' for a sequence",
    "startingTimestamp": "write 'startTime'",
    "endingOffsets": "write 'endSequence'",
    "endingTimestamp": "write 'endTime'",
    "bucket": "write format('nats_kv') to read a bucket, or stream=KV_<bucket> to read its "
    "messages",
    "buckets": "write format('nats_kv') to read buckets",
    "bucketPattern": "write format('nats_kv') to read buckets",
    "keys": "write 'filterSubjects', or format('nats_kv') to read a bucket",
    "includeHistory": "write deliverPolicy=all",
    "updatesOnly": "write deliverPolicy=new",
    "ignoreDeletes": "a stream does not have markers; write format('nats_kv') to read a bucket",
    **dict.fromkeys(("keyCodec", "valueCodec", "onUndecodable", "includeRawKey"), _CODEC),
    "metaOnly": "write 'headersOnly'",
    "minLastRevision": "write 'minLastSequence'",
    "asOfSequence": "write 'endSequence', or format('nats_kv') to read a bucket",
    "asOfTime": "write 'endTime', or format('nats_kv') to read a bucket",
}

_READ_ONLY = "it is an option of reading; remove it"
_WRITE_COMMON = {
    "kafka.bootstrap.servers": "write 'servers'",
    "url": "write 'servers'",
    "checkpointLocation": "it is an option of df.writeStream; remove it",
    "path": "write save() without a path",
    "includeHeaders": "the column 'headers' is written if the DataFrame has it",
    "includeOrigin": _READ_ONLY,
    "maxRowsPerTrigger": _READ_ONLY,
    "maxBytesPerTrigger": _READ_ONLY,
    "minPartitions": "write df.repartition(...) for more tasks",
    "batchSize": "write 'maxInFlight'",
    "failOnDataLoss": _READ_ONLY,
}

KV_WRITE_ADVICE = {
    **_WRITE_COMMON,
    "topic": "write 'bucket'",
    "stream": "write 'bucket', or format('nats_stream') to write to a stream",
    "subject": "write the column 'key', or format('nats_stream') to write to a subject",
    "keys": "filter the DataFrame: df.where(...)",
    "fastIngest": "remove it: each row of a bucket has a PubAck of its own",
    "ignoreDeletes": "filter the DataFrame: df.where(\"operation = 'PUT'\")",
    "metaOnly": _READ_ONLY,
    "onUndecodable": _READ_ONLY,
    "includeRawKey": "a column 'raw_key' of the DataFrame is ignored; remove it",
}

STREAM_WRITE_ADVICE = {
    **_WRITE_COMMON,
    "topic": "write 'stream', and 'subject' or the column 'subject'",
    "bucket": "write format('nats_kv') to write to a bucket",
    "filterSubjects": "filter the DataFrame: df.where(...)",
    "history": "a stream does not have a history per key; write format('nats_kv')",
    "onConflict": "a stream does not have revisions per key; write format('nats_kv')",
    **dict.fromkeys(
        ("keyCodec", "valueCodec"),
        "subjects and messages of a stream are not encoded; write format('nats_kv') to write "
        "to a bucket with codecs",
    ),
}
