"""Spark's own servers on this machine, each a process of its own.

A standalone cluster, with a master and workers, and a Spark Connect server.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nats_stream_source.embedded import free_port
from tests.support.spark.processes import kill_group
from tests.support.wait import wait_until

DEADLINE = 120.0


@dataclass
class Process:
    """A JVM and its log. In a group of its own, so that its executors end with it."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]

    def find(self, pattern: str) -> str:
        """The first group of ``pattern`` in the log, waited for."""

        def alive() -> None:
            assert self.process.poll() is None, f"{self.name} ended: {self.log.read_text()}"

        return wait_until(
            lambda: re.search(pattern, self.log.read_text(errors="replace")),
            f"{pattern!r} in the log of {self.name}",
            DEADLINE,
            alive=alive,
        )[1]

    def kill(self) -> None:
        """End it and its executors, as by a crash of their machine."""
        kill_group(self.process)


@dataclass
class Standalone:
    """A master and its workers.

    Attributes:
        url: the master, as ``spark-submit`` takes it.
    """

    start: Callable[..., Process]
    url: str = ""
    master: Process | None = None
    workers: list[Process] = field(default_factory=list)

    def add_worker(self, cores: int = 1) -> Process:
        """Start a worker on a host of its own, and wait until the master has it.

        Spark starts a speculative attempt only on another host than that of the first one.
        """
        number = len(self.workers)
        worker = self.start(
            *(
                f"worker{number}",
                "worker.Worker",
                "--cores",
                str(cores),
                "--memory",
                "1g",
                self.url,
            ),
            host=f"127.0.0.{number + 1}",
        )
        self.workers.append(worker)
        worker.find(r"(Successfully registered) with master")
        return worker


def _launch(
    name: str, command: list[str], directory: Path, environment: Mapping[str, str]
) -> Process:
    """Start ``command`` with a log and a working directory of its own."""
    log = directory / f"{name}.log"
    work = directory / name
    work.mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={**environment, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "1g"},
            start_new_session=True,
        )
    return Process(name, log, process)


@contextlib.contextmanager
def standalone(
    spark_home: Path, directory: Path, workers: int = 2, environment: Mapping[str, str] = os.environ
) -> Iterator[Standalone]:
    """A cluster of ``workers`` one-core workers, from the Spark in ``spark_home``."""

    def start(name: str, main: str, *arguments: str, host: str = "127.0.0.1") -> Process:
        command = [
            *(str(spark_home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}"),
            *("--host", host, "--port", "0", "--webui-port", "0"),
            *(("--work-dir", str(directory / name)) if "Worker" in main else ()),
            *arguments,
        ]
        started.append(one := _launch(name, command, directory, environment))
        return one

    started: list[Process] = []
    cluster = Standalone(start)
    try:
        cluster.master = start("master", "master.Master")
        cluster.url = cluster.master.find(r"Starting Spark master at (spark://\S+)")
        for _ in range(workers):
            cluster.add_worker()
        yield cluster
    finally:
        for one in reversed(started):
            one.kill()


@contextlib.contextmanager
def connect_server(
    spark_home: Path,
    directory: Path,
    settings: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> Iterator[str]:
    """A Spark Connect server on two local cores; its address, as ``remote()`` takes it."""
    port = free_port()
    given = {
        **settings,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
    }
    command = [
        *(str(spark_home / "bin" / "spark-submit"), "--master", "local[2]"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *(part for pair in given.items() for part in ("--conf", "=".join(pair))),
        "spark-internal",
    ]
    server = _launch("connect", command, directory, environment)
    try:
        server.find(r"(Spark Connect server started)")
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.kill()
