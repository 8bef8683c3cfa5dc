"""Frames as the plain parser of ``parser`` gives them: for comparing both."""

from __future__ import annotations

from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.table import FrameKind
from tests.unit.wire.reference.parser import Frame


def seen(frames: Frames) -> list[Frame]:
    return [
        Frame(
            raw=frames.bytes_of(i),
            kind=FrameKind(int(frames.kind[i])).name,
            sid=int(frames.sid[i]),
            subject=frames.subject(i),
            reply=frames.reply(i),
            header=frames.header(i),
            payload=frames.payload(i),
        )
        for i in range(len(frames))
    ]
