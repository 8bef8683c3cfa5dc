"""A stream of another account, imported as in ADR-19, under the faults of one account.

With ADR-19's own configuration, responses to flow control do not cross the import, and of several
responses to a request only the first one does. The reader uses other ways from the start
(docs/internals/measurements.md, Servers 15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    Adr19Server,
    adr19_server,
)
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import FrameFault, Last, Sequences, When
from tests.support.recorded_stream import KINDS, RecordedStream, crash

COUNT = 1500


@pytest.fixture(scope="module")
def accounts() -> Iterator[Adr19Server]:
    with adr19_server() as accounts:
        yield accounts


FAULTS: dict[str, Callable[[Adr19Server], FrameFault]] = {
    "messages lost": lambda accounts: Sequences([1, 700, 701]),
    "last lost": lambda accounts: Last(),
    "server killed": lambda accounts: When(700, lambda: crash(accounts.server)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_import_interrupted_while_split_is_read(
    accounts: Adr19Server, kind: str, fault: str
) -> None:
    recorded = RecordedStream(kind, accounts.exporter).create()
    recorded.write(COUNT, size=1000)
    done = FAULTS[fault](accounts)
    importer = {"user": "i", "password": "i"}
    prefixes = {"apiPrefix": ADR19_API_PREFIX, "inboxPrefix": ADR19_INBOX_PREFIX}
    proxied = Proxy(accounts.server.port, done, keep=0)
    with proxied as proxy, recorded.query(proxy.url, **importer, **prefixes) as query:
        query.until(COUNT)
    assert done.done
    recorded.check(query.rows)
    assert recorded.consumers() == []
