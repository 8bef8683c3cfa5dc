"""An S3-compatible server at the loopback interface: moto, in a process of its own; and a proxy.

moto checks the condition of a conditional PUT (``If-None-Match: *``) and stores the object in two
steps. A server with threads therefore lets two writers create the same object once in a while. This
one handles a request at a time, so the condition is atomic, as in S3; Delta's commits need that.
The proxy before it holds or loses the PUT of a commit.
"""

from __future__ import annotations

import http.client
import multiprocessing
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = "lake"


def _serve(listener: socket.socket) -> None:
    # Here, in the server's process: the import takes a second.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    host, port = listener.getsockname()
    application = DomainDispatcherApplication(create_backend_app)
    make_server(host, port, application, threaded=False, fd=listener.fileno()).serve_forever()


class ObjectStore:
    """The server's address, and what delta-rs needs to use it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"<ObjectStore {self.url}>"

    @property
    def storage_options(self) -> dict[str, str]:
        """Options of delta-rs. It creates files of the log with a conditional PUT by default."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }


@contextmanager
def object_store(deadline: float = 60) -> Iterator[ObjectStore]:
    """A server with the empty bucket ``lake``, ended at the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(listener,), daemon=True
        )
        process.start()
    # Only the server listens now: a request to one that could not start fails at once.
    try:
        _create_bucket(url, deadline)
        yield ObjectStore(url)
    finally:
        process.kill()
        process.join()


def _create_bucket(url: str, deadline: float) -> None:
    # The socket listens already: the request waits until the server handles it.
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    with urllib.request.urlopen(request, timeout=deadline) as response:
        assert response.status == 200


_COMMIT = re.compile(r"/_delta_log/0*[1-9]\d*\.json")


class StoreProxy:
    """The proxy's address, and what happens to the next commits after the first version.

    Attributes:
        pause: seconds that a commit waits before it is forwarded.
        paused: how many did.
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
