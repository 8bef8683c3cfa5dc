"""The proxy from the command line: ``python -m tests.support.proxy --to 4222 --drop 10%``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from collections import Counter

from tests.support.proxy.fault_proxy import After, CutAt, Delay, Outcome, Proxy, Twice, is_delivery
from tests.support.proxy.verdicts import FrameFault, Last, Nth, Published, Share, Status, each


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    said = argparse.ArgumentParser(
        prog="fault-proxy",
        description="Stand between NATS clients and a server, and inject faults into what passes.",
        epilog="WHICH is first, last, a number N (the N-th), or a share such as 10%%; of the "
        "messages that consumers deliver. Ends with Ctrl-C and says what passed.",
    )
    said.add_argument("--listen", type=_port, default=0, metavar="PORT", help="default: a free one")
    said.add_argument("--to", type=_address, required=True, metavar="[HOST:]PORT")
    for name, what in (
        ("drop", "do not pass on"),
        ("duplicate", "pass on two times"),
        ("reorder", "pass on after the next message"),
        ("cut", "cut in the middle, and reset the connection"),
    ):
        said.add_argument(
            f"--{name}", type=_which, action="append", default=[], metavar="WHICH", help=what
        )
    said.add_argument(
        "--delay",
        type=_delay,
        action="append",
        default=[],
        metavar="WHICH:SECONDS",
        help="pass on later",
    )
    said.add_argument("--rate", type=_rate, metavar="BYTES", help="a second, towards clients")
    said.add_argument(
        "--swallow",
        action="append",
        default=[],
        choices=("flow-control", "answers", "heartbeats"),
        help="flow-control messages, the clients' answers to them, or idle heartbeats",
    )
    said.add_argument("--seed", type=int, default=0, help="of the shares; default 0")
    return said


def _port(text: str) -> int:
    return _address(text)[1]


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} does not end with a port")
    return host or "127.0.0.1", int(port)


def _which(text: str) -> str:
    with contextlib.suppress(ValueError):
        _fault(text, False, 0)
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not first, last, a number from 1 on, or a share such as 10%"
    )


def _delay(text: str) -> str:
    which, _, seconds = text.rpartition(":")
    with contextlib.suppress(ValueError):
        if float(seconds) >= 0:
            return f"{_which(which)}:{seconds}"
    raise argparse.ArgumentTypeError(f"{text!r} does not end with :SECONDS")


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (rate := float(text)) > 0:
            return rate
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes")


def faults(said: argparse.Namespace) -> tuple[dict[str, FrameFault], dict[str, FrameFault]]:
    """The faults of the command line, downward and upward, by its arguments."""
    down: dict[str, FrameFault] = {}
    up: dict[str, FrameFault] = {}
    outcomes: dict[str, Outcome] = {
        "drop": False,
        "duplicate": Twice(),
        "reorder": After(1),
        "cut": CutAt(20),
    }
    for name, outcome in outcomes.items():
        for which in getattr(said, name):
            down[f"{name} {which}"] = _fault(which, outcome, said.seed)
    for one in said.delay:
        which, _, seconds = one.rpartition(":")
        down[f"delay {one}"] = _fault(which, Delay(float(seconds)), said.seed)
    for one in said.swallow:
        if one == "answers":
            up[f"swallow {one}"] = Published("$JS.FC.")
        else:
            text = "FlowControl" if one == "flow-control" else "Idle Heartbeat"
            down[f"swallow {one}"] = Status(text)
    return down, up


def _fault(which: str, outcome: Outcome, seed: int) -> FrameFault:
    if which == "last":
        return Last(outcome)
    if which.endswith("%"):
        if not 0 <= (share := float(which[:-1]) / 100) <= 1:
            raise ValueError(which)
        return Share(share, seed, outcome)
    if (number := 1 if which == "first" else int(which)) < 1:
        raise ValueError(which)
    return Nth([number], outcome)


def main(arguments: list[str] | None = None, over: threading.Event | None = None) -> int:
    """Run until Ctrl-C, or until ``over``; the process's exit status."""
    said = parser().parse_args(arguments)
    down, up = faults(said)
    host, port = said.to
    passed: Counter[str] = Counter()

    def counted(frame: bytes) -> Outcome:
        passed["deliveries" if is_delivery(frame) else "other messages"] += 1
        return True

    if over is None:
        # Also where a shell started it in the background, and so told it to ignore SIGINT.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
    proxy = Proxy(
        port,
        each(counted, *down.values()),
        each(*up.values()),
        listen=said.listen,
        host=host,
        rate=said.rate,
        keep=0,
    )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(proxy)
        except OSError as error:
            parser().error(f"cannot listen on port {said.listen}: {error.strerror or error}")
        with contextlib.suppress(KeyboardInterrupt):
            print(f"{proxy.url} -> {host}:{port}", flush=True)
            (over or threading.Event()).wait()
    lines = ["", f"connections: {proxy.connections}"]
    lines += [f"{what}: {count}" for what, count in passed.items()]
    lines += [f"{what}: {fault.done}" for what, fault in {**down, **up}.items()]
    print("\n".join(lines), flush=True)
    return 0
