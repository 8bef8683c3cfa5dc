"""An HTTP proxy before an object store that holds or loses the PUT of a commit."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_COMMIT = re.compile(r"/_delta_log/0*[1-9]\d*\.json")


class StoreProxy:
    """The proxy's address, and what happens to the next commits after the first version.

    Attributes:
        pause: seconds that a commit waits before it is forwarded.
        paused: how many did.
        hold: commits are not forwarded; ``held`` is set when one has arrived.
        delay: commits are forwarded once ``resume`` is set; ``held`` is set when one has arrived.
        lose: this many commits are stored, and their responses lost.
        lost: how many were.
        answers: statuses of the next conditional PUTs, which are stored if ``stores`` is set.
        answered: how many were.
        unconditional: PUTs are forwarded without their condition, as by a store that ignores it.
    """

    def __init__(self, url: str, target: str) -> None:
        self.url = url
        self.target = target.removeprefix("http://")
        self.pause = 0.0
        self.paused = 0
        self.hold = False
        self.held = threading.Event()
        self.delay = False
        self.resume = threading.Event()
        self.lose = 0
        self.lost = 0
        self.answers: list[int] = []
        self.answered = 0
        self.stores = False
        self.unconditional = False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: StoreProxy


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _forward(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        commit = self.command == "PUT" and _COMMIT.search(self.path)
        if commit and proxy.hold:
            proxy.held.set()
            self.close_connection = True
            return
        if commit and proxy.delay:
            proxy.held.set()
            proxy.resume.wait()
        if commit and proxy.pause:
            proxy.paused += 1
            time.sleep(proxy.pause)
        answer = proxy.answers.pop(0) if proxy.answers and "if-none-match" in self.headers else None
        if answer is not None and not proxy.stores:
            self._answer(answer)
            return
        connection = http.client.HTTPConnection(proxy.target)
        headers = dict(self.headers)
        if proxy.unconditional:
            headers = {name: text for name, text in headers.items() if name != "if-none-match"}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if answer is not None:
            self._answer(answer)
            return
        if commit and proxy.lose and response.status == 200:
            proxy.lose -= 1
            proxy.lost += 1
            self.close_connection = True
            return
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if response.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, status: int) -> None:
        self.server.proxy.answered += 1
        self.send_response_only(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def store_proxy(target: str) -> Iterator[StoreProxy]:
    """A proxy before the store at the URL ``target``."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.proxy = StoreProxy(f"http://127.0.0.1:{server.server_port}", target)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.proxy
        finally:
            server.shutdown()
            thread.join()
