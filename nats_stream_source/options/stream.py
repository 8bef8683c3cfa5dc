"""The options of ``nats_stream``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.settings import ConnectionSettings
from nats_stream_source.jetstream.subjects import check_stream, check_subject_filters
from nats_stream_source.options import kinds
from nats_stream_source.options.beginning import Beginning, DeliverPolicy
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.reading import READING, Reading, check_alone, check_mode
from nats_stream_source.options.table import Mode, Option, parse

STREAM: tuple[Option, ...] = (
    Option("stream", "text", kinds.text, None, "the stream's name; this or `subject` is required"),
    Option(
        "subject",
        "subject filter",
        kinds.text,
        None,
        "read this subject (`*` for one token, `>` for the rest) of the stream that has it, which "
        "is looked up",
    ),
    Option(
        "filterSubjects",
        "list of subject filters",
        kinds.names,
        (),
        "subjects of `stream` to read; all when not given",
    ),
    Option(
        "deliverPolicy",
        "deliver policy",
        kinds.policy,
        None,
        "where to begin: `all`, `new`, `last`, `last_per_subject`, `by_start_sequence` or "
        "`by_start_time`; without it, `all`, or what `startSequence` or `startTime` says",
    ),
    Option(
        "startSequence",
        "integer",
        kinds.integer,
        None,
        "begin with this sequence; one that the stream has not reached yet is waited for",
    ),
    Option(
        "startTime",
        "time",
        kinds.moment,
        None,
        "begin with the first message of this time or later (RFC 3339, with a zone)",
    ),
    Option(
        "endSequence", "integer", kinds.integer, None, "end with this sequence", only=Mode.BATCH
    ),
    Option(
        "endTime",
        "time",
        kinds.moment,
        None,
        "end before the first message of this time or later, so that ranges of time adjoin",
        only=Mode.BATCH,
    ),
    Option("headersOnly", "boolean", kinds.boolean, False, "leave payloads out: `data` is null"),
    Option(
        "minLastSequence",
        "integer",
        kinds.integer,
        None,
        "begin once the stream has this sequence (ADR-53), for example that of one's own last "
        "publish; fails when it has not within `requestTimeout`",
    ),
    *READING,
)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of ``nats_stream``, parsed and checked against each other.

    Attributes:
        stream: its name; None when it is looked up by ``filter_subjects``, which is one then.
        end_time: nanoseconds since 1970.
    """

    connection: ConnectionSettings
    stream: str | None
    filter_subjects: tuple[str, ...]
    beginning: Beginning
    end_sequence: int | None
    end_time: int | None
    headers_only: bool
    min_last_sequence: int | None
    reading: Reading


def stream_options(given: Mapping[str, str], mode: Mode | None = None) -> StreamOptions:
    """Parse and check the options of ``nats_stream``.

    Args:
        mode: how they are read; None where that is not known yet.

    Raises:
        OptionError: unknown, missing, of the wrong type, or contradicting another.
        InvalidNameError: not a stream's name, or not a subject filter.
        ConfigurationError: two filters overlap.
    """
    values = parse(given, CONNECTION + STREAM)
    if values["stream"] is None and values["subject"] is None:
        raise OptionError(
            "option 'stream' is missing: the name of the JetStream stream, or 'subject': one that "
            "it has"
        )
    check_mode(values, STREAM, mode)
    check_alone(values, "stream", "subject", why="the stream is named, or looked up by its subject")
    check_alone(values, "subject", "filterSubjects", why="'subject' is the filter itself")
    check_alone(values, "startSequence", "startTime", why="they name two beginnings")
    check_alone(values, "endSequence", "endTime", why="they name two ends")
    subjects = (values["subject"],) if values["subject"] else values["filterSubjects"]
    filters = tuple(sorted(check_subject_filters(subjects)))
    return StreamOptions(
        connection=connection_settings(values),
        stream=None if values["stream"] is None else check_stream(values["stream"]),
        filter_subjects=() if values["stream"] and filters == (">",) else filters,
        beginning=_beginning(values, mode),
        end_sequence=values["endSequence"],
        end_time=values["endTime"],
        headers_only=values["headersOnly"],
        min_last_sequence=values["minLastSequence"],
        reading=Reading.of(values),
    )


def _beginning(values: Mapping[str, Any], mode: Mode | None) -> Beginning:
    policy: DeliverPolicy | None = values["deliverPolicy"]
    chosen = Beginning.at(values["startSequence"], values["startTime"])
    needs = {
        DeliverPolicy.BY_START_SEQUENCE: "startSequence",
        DeliverPolicy.BY_START_TIME: "startTime",
    }
    if chosen is None:
        if policy in needs:
            raise OptionError(
                f"option {needs[policy]!r} is missing: deliverPolicy={policy.value} needs it"
            )
        if policy is DeliverPolicy.NEW and mode is Mode.BATCH:
            raise OptionError(
                "deliverPolicy=new is for spark.readStream: to spark.read, which ends with what "
                "there is now, it would leave nothing"
            )
        ends = [name for name in ("endSequence", "endTime") if values[name] is not None]
        if ends and policy in (DeliverPolicy.LAST, DeliverPolicy.LAST_PER_SUBJECT):
            raise OptionError(
                f"option {ends[0]!r} and deliverPolicy={policy.value} contradict each other: what "
                f"is last is known as of now only"
            )
        return Beginning(policy or DeliverPolicy.ALL)
    if policy not in (None, chosen.policy):
        raise OptionError(
            f"options 'deliverPolicy' and {needs[chosen.policy]!r} contradict each other: "
            f"{policy.value} has another beginning"
        )
    first, last = chosen.sequence, values["endSequence"]
    if first is not None and last is not None and last < first:
        raise OptionError(f"option 'endSequence': {last} lies before startSequence={first}")
    since, until = chosen.time, values["endTime"]
    if since is not None and until is not None and until <= since:
        raise OptionError("option 'endTime' does not lie after 'startTime'")
    return chosen
