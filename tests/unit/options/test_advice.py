"""What a new user writes by habit: the error names what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.errors import OptionError
from nats_stream_source.options import (
    COMMON,
    CONNECTION,
    KV,
    STREAM,
    KvOptions,
    StreamOptions,
    kv_options,
    stream_options,
)
from nats_stream_source.options.advice import KV_ADVICE, STREAM_ADVICE

Parser = Callable[[dict[str, str]], KvOptions | StreamOptions]

BASES: dict[Parser, dict[str, str]] = {
    kv_options: {"servers": "h", "bucket": "fleet"},
    stream_options: {"servers": "h", "stream": "ORDERS"},
}

WRITTEN: list[tuple[Parser, dict[str, str], str]] = [
    (kv_options, {"startSequence": "-1"}, "smaller than 1; write 1 or higher .*updatesOnly=true"),
    (stream_options, {"startSequence": "-1"}, "smaller than 1; write 1 .*deliverPolicy=new"),
    (kv_options, {"bucket": "a,b"}, "'a,b' is a list, expected one name; write the name of one"),
    (stream_options, {"stream": "A,B"}, "'A,B' is a list, expected one name; write the name of"),
    (kv_options, {"startingoffsets": "latest"}, "'startingoffsets': write updatesOnly=true for l"),
    (stream_options, {"startingoffsets": "latest"}, ".*deliverPolicy=new for latest"),
    (stream_options, {"bucket": "fleet"}, r"'bucket': write format\('nats_kv'\) to read a bucket"),
    (kv_options, {"stream": "S"}, r"'stream': write 'bucket', or format\('nats_stream'\)"),
    (kv_options, {"kafka.bootstrap.servers": "h"}, "write 'servers'"),
    (stream_options, {"keyCodec": "base64"}, r"'keyCodec': the subjects and messages of a stream "),
    (stream_options, {"includerawkey": "true"}, r"not encoded; write format\('nats_kv'\) to read"),
    (kv_options, {"maxOffsetsPerTrigger": "5"}, "write 'maxRowsPerTrigger'"),
    (kv_options, {"provider": "nats_kv"}, "CREATE TEMPORARY VIEW name USING nats_kv OPTIONS"),
    (stream_options, {"provider": "x"}, "VIEW name USING nats_stream OPTIONS .* stream '...'"),
]


@pytest.mark.parametrize(("parser", "given", "text"), WRITTEN)
def test_error_names_value_to_write(parser: Parser, given: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        parser(BASES[parser] | given)


@pytest.mark.parametrize("parser", BASES)
def test_missing_options_error_names_view(parser: Parser) -> None:
    """Spark reads a table of CREATE TABLE without its options."""
    with pytest.raises(OptionError, match=r"no option is set, .*CREATE TEMPORARY VIEW name USING"):
        parser({})


def test_advice_is_for_unknown_names_and_names_options() -> None:
    own = {option.name.lower() for option in CONNECTION + COMMON}
    kv = own | {option.name.lower() for option in KV}
    stream = own | {option.name.lower() for option in STREAM}
    assert not kv & KV_ADVICE.keys()
    assert not stream & STREAM_ADVICE.keys()
    # Each format has advice for every option of the other.
    assert stream - kv <= KV_ADVICE.keys()
    assert kv - stream <= STREAM_ADVICE.keys()
