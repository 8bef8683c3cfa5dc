"""One run: start all parties, do what the schedule says, let all come to rest, compare."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from soak import collect, processes
from soak.ledger import Acknowledged
from soak.oracle import judge
from soak.outcome import Outcome, Settings
from soak.remains import left_behind
from soak.schedule import POWER_LOSS, Fault, schedule
from soak.servers import STREAMS, Servers
from soak.stall import Stall
from soak.supervisor import Driver
from soak.worst import Worst

_STOP = 180.0  # seconds for the generator to end
_POWER = 900.0  # seconds after its time in which a power loss is waited for
_SAMPLE_EVERY = 5.0

SYNC_ALWAYS = 'jetstream { sync_interval: "always" }\n'


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Run a soak; everything that was started is ended, also on failure and Ctrl-C.

    Args:
        say: for a line of what happens.

    Returns:
        The outcome. Its directory still exists: see :func:`clean`.
    """
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        return _run(settings, directory, say)
    except Exception:
        say(f"the run failed; everything is kept in {directory}")
        raise
    except BaseException:  # Ctrl-C, or told to end: nobody looks at what there is
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _run(settings: Settings, directory: Path, say: Callable[[str], None]) -> Outcome:
    started = time.monotonic()
    outcome = Outcome(settings, directory)
    seconds = settings.minutes * 60
    planned = [
        fault
        for fault in schedule(settings.seed, seconds, settings.topology, spark=settings.spark)
        if not settings.only or fault.lane in settings.only
    ]
    outcome.planned = planned
    say(f"seed {settings.seed}, {len(planned)} faults; all that there is lies in {directory}")
    for fault in planned:
        say(f"  {fault}")
    clustered = settings.topology == "cluster"
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(
            Servers(3 if clustered else 1, directory, "" if clustered else SYNC_ALWAYS)
        )
        module = "soak.driver" if settings.spark else "soak.plain"
        driver = Driver(directory, ",".join(servers.proxied), module)
        stack.callback(driver.kill)
        ledger = directory / "ledger.tsv"
        request = directory / "generator.json"
        request.write_text(
            json.dumps(
                {
                    "servers": servers.addresses,
                    "ledger": str(ledger),
                    "seed": settings.seed,
                    "rate": settings.rate,
                }
            )
        )
        driver.start()
        generator = processes.start("soak.generator", request, directory / "generator.log")
        stack.callback(processes.kill, generator)
        driver.wait_lively()
        _trouble(outcome, servers, driver, generator, seconds, say)
        say("the faults are over; the writer stops, the servers recover")
        _heal(servers)
        generator.send_signal(signal.SIGTERM)
        if (status := generator.wait(_STOP)) != 0:
            outcome.troubles.append(f"the generator ended with status {status}")
        servers.wait_healthy()
        driver.stop()
        say("the queries read to the end")
        driver.finish()
        say("all is read; waiting until nothing is left on the servers")
        outcome.troubles += driver.troubles
        outcome.stalled += driver.unfinished
        outcome.left = left_behind(servers)
        say("comparing")
        _compare(outcome, servers, driver)
        say(f"took {time.monotonic() - started:.0f} s in all")
    return outcome


def clean(outcome: Outcome) -> None:
    """Remove the run's directory."""
    shutil.rmtree(outcome.directory, ignore_errors=True)


def _trouble(
    outcome: Outcome,
    servers: Servers,
    driver: Driver,
    generator: subprocess.Popen[bytes],
    seconds: float,
    say: Callable[[str], None],
) -> None:
    over = threading.Event()
    began = time.monotonic()
    planned = outcome.planned
    stall, acknowledged = Stall(STREAMS), Acknowledged(outcome.directory / "ledger.tsv")
    worst = Worst(servers, driver, generator, outcome.settings.seed, over, began)

    def lane(faults: list[Fault]) -> None:
        for fault in faults:
            if over.wait(max(0.0, began + fault.at - time.monotonic())):
                return
            try:
                done = worst.do(fault)
            except Exception as error:  # a lane that ends unseen would look like a calm run
                outcome.troubles.append(f"{fault}: {error!r}")
                continue
            outcome.done.append(done)
            mark = "" if done.happened else "  NOT DONE"
            took = time.monotonic() - began - done.at
            say(f"{done.at:6.1f} s  {fault.kind} ({took:.1f} s): {done.said}{mark}")

    lanes = [
        threading.Thread(target=lane, args=([f for f in planned if f.lane == name],), daemon=True)
        for name in sorted({fault.lane for fault in planned})
    ]
    for thread in lanes:
        thread.start()
    try:
        sample = began
        while _goes_on(outcome, began + seconds, lanes):
            over.wait(0.5)
            driver.look()
            if generator.poll() is not None:
                raise RuntimeError(f"the generator ended: {outcome.directory}/generator.log")
            if (now := time.monotonic()) < sample:
                continue
            sample = now + _SAMPLE_EVERY
            said, ready = driver.events(), driver.alive() and not servers.down
            acked = acknowledged.look()
            stall.look(now, said.batches, acked, ready=ready, stopped=said.lost)
            if (memory := driver.memory()) is not None:
                outcome.memory.append((driver.serial, now - began, memory))
    finally:
        over.set()
        for thread in lanes:
            thread.join(180)
        outcome.stalled += stall.found
        outcome.loss = worst.loss


def _goes_on(outcome: Outcome, until: float, lanes: list[threading.Thread]) -> bool:
    """Whether it is time for trouble; a power loss, which the run is about, is not cut short."""
    if (late := time.monotonic() - until) < 0:
        return True
    due = sum(one.kind == POWER_LOSS for one in outcome.planned)
    done = sum(one.fault.kind == POWER_LOSS for one in outcome.done)
    return late < _POWER and done < due and any(lane.is_alive() for lane in lanes)


def _heal(servers: Servers) -> None:
    servers.harm(None)
    for name in list(servers.down):
        with contextlib.suppress(RuntimeError):  # it runs
            servers.start(name)
        servers.down.discard(name)


def _compare(outcome: Outcome, servers: Servers, driver: Driver) -> None:
    outcome.events = driver.events()
    outcome.rebuilds = collect.rebuilds(driver.logs)
    evidence = collect.gather(servers.url, outcome.directory, outcome.events, outcome.loss)
    outcome.evidence = evidence
    outcome.findings = judge(evidence)
    for place, writes in evidence.writes.items():
        outcome.acked[place] = sum(write.seq is not None for write in writes)
        outcome.unsure[place] = len(writes) - outcome.acked[place]
    for place, attempts in evidence.attempts.items():
        outcome.rows[place] = len(evidence.rows(place))
        outcome.replayed_batches += sum(len(tries) > 1 for tries in attempts.values())
    rows = evidence.table if evidence.reconciled is None else evidence.reconciled
    outcome.rows["current"] = len(rows)
