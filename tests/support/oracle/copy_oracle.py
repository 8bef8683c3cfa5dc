"""The oracle of a stream that a query copies into another stream: each message once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.support.oracle.evidence import Entry, describe
from tests.support.oracle.findings import Findings


def compare_copy(messages: Iterable[Entry], copied: Iterable[Entry]) -> Findings:
    """Compare the messages of a stream with those of its copy.

    Their keys and values identify them: the sequences of the copy are others.
    """
    findings = Findings()
    expected = {(entry.key, entry.value): entry for entry in messages}
    copies = Counter((entry.key, entry.value) for entry in copied)
    for content, entry in expected.items():
        if not copies[content]:
            findings.add("not read", f"copy: {describe(entry)}")
        elif copies[content] > 1:
            findings.add("read twice", f"copy: {describe(entry)}: {copies[content]} times")
    for entry in copied:
        if (entry.key, entry.value) not in expected:
            findings.add("not written", f"copy: {describe(entry)}")
    return findings
