"""An S3-compatible server at the loopback interface: moto, in a process of its own.

moto checks the condition of a conditional PUT (``If-None-Match: *``) and stores the object in two
steps. A server with threads therefore lets two writers create the same object once in a while. This
one handles a request at a time, so the condition is atomic, as in S3; Delta's commits need that.
"""

from __future__ import annotations

import multiprocessing
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

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
