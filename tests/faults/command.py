"""The proxy from the command line: ``python tests/faults/proxy.py --to 4222 --drop 10%``."""

from __future__ import annotations

import argparse
import threading
from collections import Counter

from faults.harm import Harm, Last, Nth, Published, Share, Status, each
from faults.proxy import After, CutAt, Delay, Outcome, Proxy, Twice, is_delivery


def parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    said = argparse.ArgumentParser(
        prog="proxy.py",
        description="Stand between NATS clients and a server, and do harm to what passes.",
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
        said.add_argument(f"--{name}", action="append", default=[], metavar="WHICH", help=what)
    said.add_argument(
        "--delay", action="append", default=[], metavar="WHICH:SECONDS", help="pass on later"
    )
    said.add_argument("--rate", type=float, metavar="BYTES", help="a second, towards clients")
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
    return host or "127.0.0.1", int(port)


def harms(said: argparse.Namespace) -> tuple[dict[str, Harm], dict[str, Harm]]:
    """The harms that were asked for, downward and upward, by what was asked."""
    down: dict[str, Harm] = {}
    up: dict[str, Harm] = {}
    outcomes: dict[str, Outcome] = {
        "drop": False,
        "duplicate": Twice(),
        "reorder": After(1),
        "cut": CutAt(20),
    }
    for name, outcome in outcomes.items():
        for which in getattr(said, name):
            down[f"{name} {which}"] = _harm(which, outcome, said.seed)
    for one in said.delay:
        which, _, seconds = one.rpartition(":")
        down[f"delay {one}"] = _harm(which, Delay(float(seconds)), said.seed)
    for one in said.swallow:
        if one == "answers":
            up[f"swallow {one}"] = Published("$JS.FC.")
        else:
            text = "FlowControl" if one == "flow-control" else "Idle Heartbeat"
            down[f"swallow {one}"] = Status(text)
    return down, up


def _harm(which: str, outcome: Outcome, seed: int) -> Harm:
    if which == "last":
        return Last(outcome)
    if which.endswith("%"):
        return Share(float(which[:-1]) / 100, seed, outcome)
    return Nth([1 if which == "first" else int(which)], outcome)


def main(arguments: list[str] | None = None, over: threading.Event | None = None) -> int:
    """Run until Ctrl-C, or until ``over``; the process's exit status."""
    said = parser().parse_args(arguments)
    try:
        down, up = harms(said)
    except ValueError as error:
        parser().error(f"not a WHICH: {error}")
    host, port = said.to
    passed: Counter[str] = Counter()

    def counted(frame: bytes) -> Outcome:
        passed["deliveries" if is_delivery(frame) else "other messages"] += 1
        return True

    with Proxy(
        port,
        each(counted, *down.values()),
        each(*up.values()),
        listen=said.listen,
        host=host,
        rate=said.rate,
        keep=0,
    ) as proxy:
        print(f"{proxy.url} -> {host}:{port}", flush=True)
        try:
            (over or threading.Event()).wait()
        except KeyboardInterrupt:
            print()
        lines = [f"connections: {proxy.connections}"]
    lines += [f"{what}: {count}" for what, count in passed.items()]
    lines += [f"{what}: {harm.done}" for what, harm in {**down, **up}.items()]
    print("\n".join(lines), flush=True)
    return 0
