"""Writes or reads a bucket with natsio's codecs; run by a Python of 3.13 or newer that has natsio.

``natsio_kvcodec.py URL BUCKET KEY_CODECS VALUE_CODECS put|delete|list``, with the entries of the
program in ``tests/support/orbit``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys

import natsio
from natsio.kvcodec import (
    Base64KeyCodec,
    Base64ValueCodec,
    ChainKeyCodec,
    ChainValueCodec,
    PathKeyCodec,
)


async def main() -> None:
    url, bucket, key_codecs, value_codecs, action = sys.argv[1:]
    keys = {"base64": Base64KeyCodec, "path": PathKeyCodec}
    key_codec = (
        ChainKeyCodec(*(keys[one]() for one in key_codecs.split(","))) if key_codecs else None
    )
    values = [Base64ValueCodec() for one in value_codecs.split(",") if one]
    value_codec = ChainValueCodec(*values) if values else None
    client = await natsio.connect(url)
    try:
        kv = await client.jetstream().key_value(
            bucket, key_codec=key_codec, value_codec=value_codec
        )
        if action == "list":
            for key in await kv.keys():
                value = base64.b64encode((await kv.get(key)).value).decode()
                print(json.dumps({"key": key, "value": value}))
            return
        for line in sys.stdin:
            entry = json.loads(line)
            if action == "delete":
                await kv.delete(entry["key"])
            else:
                await kv.put(entry["key"], base64.b64decode(entry["value"]))
    finally:
        await client.close()


asyncio.run(main())
