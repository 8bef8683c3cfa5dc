"""Command line of the soak."""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys

from tests.soak.run import TOPOLOGIES, Settings, clean, run, summary


def main(arguments: list[str] | None = None) -> int:
    """Run a soak; returns the exit status, 1 if it found an anomaly."""
    parser = argparse.ArgumentParser(
        prog="soak", description="Write and read under random faults, then compare."
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, help="seed of the run to repeat; default: random")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="cluster")
    parser.add_argument("--rate", type=float, default=300, help="writes per second; default 300")
    parser.add_argument(
        "--plain", action="store_true", help="run without Spark, with more restarts"
    )
    options = parser.parse_args(arguments)
    # SIGTERM raises SystemExit, so that all started processes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # asyncio logs a warning for each write to a connection that was reset.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    settings = Settings(
        seed=random.randrange(10**6) if options.seed is None else options.seed,
        minutes=options.minutes,
        topology=options.topology,
        rate=options.rate,
        spark=not options.plain,
    )
    try:
        outcome = run(settings, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("interrupted; all started processes were stopped")
        return 130
    result = summary(outcome)
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if not result["anomalies"]:
        clean(outcome)
        return 0
    print(f"anomalies found; files in {outcome.directory}")
    (outcome.directory / "result.json").write_text(text)
    return 1


if __name__ == "__main__":
    sys.exit(main())
