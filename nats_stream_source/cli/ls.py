"""``ls``: lists the buckets of the account, or the keys of a bucket.

The columns are those of ``nats kv ls``, with the history, the TTL and the replicas of each bucket.
The number of values counts every stored revision and marker.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from nats_stream_source.cli.connection import connection
from nats_stream_source.cli.flags import add_connection, add_options, given
from nats_stream_source.cli.output import (
    format_cell,
    format_duration,
    format_integer,
    format_size,
    format_table,
    print_json,
    rfc3339,
    terminal_columns,
    text_width,
)
from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream import KeyValue
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.codec import Codecs, kv_codec
from nats_stream_source.jetstream.kv.entry import Entry
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.stream_list import StreamList
from nats_stream_source.jetstream.subjects import bucket_of, validate_bucket
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.options import CONNECTION, KV, connection_settings, parse

_DESCRIPTION_WIDTH = 60  # characters
_WHOLE = sys.maxsize
_CODEC_FLAGS = tuple(option for option in KV if option.name == "keyCodec")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``ls``."""
    parser.usage = "%(prog)s [BUCKET [FILTER ...]] [-n | -v | --json] [options]"
    parser.add_argument("bucket", nargs="?", metavar="BUCKET", help="list the keys of this bucket")
    parser.add_argument(
        "filters",
        nargs="*",
        metavar="FILTER",
        help="only keys that match; * matches one token and > the rest",
    )
    codecs = parser.add_argument_group("codecs of the keys")
    add_options(codecs, _CODEC_FLAGS)
    codecs.add_argument(
        "--on-undecodable",
        choices=("fail", "skip"),
        default="fail",
        help="fail, or leave out keys that --key-codec cannot decode; default: fail",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("-n", "--names", action="store_true", help="the names of the buckets only")
    form.add_argument(
        "-v", "--verbose", action="store_true", help="revision and time of each key too"
    )
    form.add_argument("--json", action="store_true", help="one JSON object per bucket or key")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the list; returns 0, also if it is empty."""
    if arguments.verbose and arguments.bucket is None:
        raise OptionError("--verbose is for the keys of a bucket; name a bucket")
    if arguments.bucket is not None:
        validate_bucket(arguments.bucket)
        kv_codec(**_codecs(arguments)).raw_filters(arguments.filters)
        asyncio.run(_list_keys(arguments))
    else:
        asyncio.run(_list_buckets(arguments))
    return 0


def _codecs(arguments: argparse.Namespace) -> Codecs:
    parse(given(arguments, _CODEC_FLAGS), _CODEC_FLAGS)
    return {"key_codec": arguments.keyCodec, "on_undecodable": arguments.on_undecodable}


@contextlib.asynccontextmanager
async def _connected(arguments: argparse.Namespace) -> AsyncIterator[JetStream]:
    settings = connection_settings(parse(connection(arguments), CONNECTION))
    async with await Connection.open(settings, retry=False) as opened:
        yield JetStream(opened)


# -- buckets ------------------------------------------------------------------------------------


async def _list_buckets(arguments: argparse.Namespace) -> None:
    async with _connected(arguments) as jetstream:
        streams = (await StreamList().request(jetstream)).values()
    buckets = sorted(
        (info for info in streams if bucket_of(info.name) != info.name),
        key=lambda info: info.name,
    )
    if arguments.json:
        for info in buckets:
            print_json(_bucket_json(info))
    elif arguments.names:
        for info in buckets:
            print(format_cell(bucket_of(info.name), _WHOLE))
    elif buckets:
        print(_bucket_table(buckets))
    else:
        print("no buckets", file=sys.stderr)


def _bucket_table(buckets: list[StreamInfo]) -> str:
    names = ["bucket", "values", "size", "history", "ttl", "replicas", "last update"]
    rows = [
        [
            format_cell(bucket_of(info.name), _WHOLE),
            format_integer(info.messages),
            format_size(info.nbytes),
            format_integer(_history(info)),
            format_duration(_ttl(info)),
            format_integer(info.config.get("num_replicas", 1)),
            _last_update(info),
        ]
        for info in buckets
    ]
    right = ("values", "size", "history", "ttl", "replicas")
    if any(info.config.get("description") for info in buckets):
        width = _DESCRIPTION_WIDTH
        if (columns := terminal_columns()) is not None:
            used = max(map(text_width, format_table(names, rows, right).splitlines()))
            width = min(width, max(len("description"), columns - used - 2))
        names.append("description")
        for info, row in zip(buckets, rows, strict=True):
            row.append(format_cell(info.config.get("description") or None, width))
    return format_table(names, rows, right)


def _last_update(info: StreamInfo) -> str:
    if info.last_time is None:
        return "-"
    if info.now is None:
        return info.last_time
    age = max(0, nanoseconds(info.now) - nanoseconds(info.last_time)) / 1e9
    return f"{format_duration(age)} ago"


def _history(info: StreamInfo) -> int:
    return int(info.config.get("max_msgs_per_subject", -1))


def _ttl(info: StreamInfo) -> float | None:
    """Seconds that the bucket keeps a value; None without a limit."""
    return info.config.get("max_age", 0) / 1e9 or None


def _bucket_json(info: StreamInfo) -> dict[str, Any]:
    return {
        "bucket": bucket_of(info.name),
        "description": info.config.get("description"),
        "values": info.messages,
        "bytes": info.nbytes,
        "history": _history(info),
        "ttl_seconds": _ttl(info),
        "replicas": info.config.get("num_replicas", 1),
        "storage": info.config.get("storage"),
        "created": info.created,
        "last_update": info.last_time,
        "last_revision": info.last_seq,
    }


# -- keys ---------------------------------------------------------------------------------------


async def _list_keys(arguments: argparse.Namespace) -> None:
    async with _connected(arguments) as jetstream:
        bucket = await KeyValue.open(jetstream, arguments.bucket, **_codecs(arguments))
        filters = arguments.filters
        entries: list[Entry] = []
        keys: list[str] = []
        if arguments.verbose or arguments.json:
            watch = bucket.watch(*filters, ignore_deletes=True, meta_only=True)
            async with watch:
                entries = sorted(await watch.initial(), key=lambda entry: entry.key)
        else:
            keys = sorted(await bucket.keys(*filters))
    if arguments.json:
        for entry in entries:
            print_json(
                {"key": entry.key, "revision": entry.revision, "created": rfc3339(entry.created)}
            )
    elif entries:
        rows = [
            [format_cell(entry.key, _WHOLE), str(entry.revision), rfc3339(entry.created)]
            for entry in entries
        ]
        print(format_table(["key", "revision", "created"], rows, right=("revision",)))
    elif keys:
        for key in keys:
            print(format_cell(key, _WHOLE))
    else:
        print("no keys", file=sys.stderr)
