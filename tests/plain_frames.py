"""Frames as the plain parser of ``reference_parser.py`` gives them: for comparing both."""

from __future__ import annotations

from reference_parser import Frame

from nats_stream_source.wire.frames import Frames, Kind


def seen(frames: Frames) -> list[Frame]:
    return [
        Frame(
            raw=frames.bytes_of(i),
            kind=Kind(int(frames.kind[i])).name,
            sid=int(frames.sid[i]),
            subject=frames.subject(i),
            reply=frames.reply(i),
            header=frames.header(i),
            payload=frames.payload(i),
        )
        for i in range(len(frames))
    ]
