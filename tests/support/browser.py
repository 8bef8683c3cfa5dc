"""A headless Chromium, controlled by its DevTools protocol, and a server of files for it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import pytest

from tests.support.wait import DEADLINE, wait_until_async

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian's package 'chromium')"
)
_OPTIONS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "disable-quic",
    "no-first-run",
    "disable-sync",
    "disable-background-networking",
    "disable-component-update",
    "remote-debugging-port=0",
    "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # a request to another host fails
)


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write no line for a request."""


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory by HTTP; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=directory)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Browser:
    """One tab.

    Attributes:
        errors: of scripts and of loads, since the last :meth:`open`.
        requests: the URLs that were requested since the last :meth:`open`.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}
        self._loaded = asyncio.Event()
        self._last = 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def __aenter__(self) -> Browser:
        assert CHROMIUM is not None
        options = [f"--{option}" for option in (*_OPTIONS, f"user-data-dir={self._profile}")]
        self._process = await asyncio.create_subprocess_exec(
            CHROMIUM, *options, "about:blank", stdout=DEVNULL, stderr=DEVNULL
        )
        endpoint = self._profile / "DevToolsActivePort"
        await wait_until_async(
            lambda: endpoint.exists() and len(endpoint.read_text().split()) == 2, "Chromium"
        )
        port, path = endpoint.read_text().split()
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0)
        self._receiver = asyncio.create_task(self._receive())
        target = await self.command("Target.createTarget", url="about:blank")
        attached = await self.command(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._session = {}
        await self.command("Browser.close")
        await self._process.wait()
        self._receiver.cancel()
        await self._socket.close()
        await self._http.close()

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        call = self._calls[self._last] = asyncio.get_running_loop().create_future()
        message = {"id": self._last, "method": method, "params": parameters, **self._session}
        await self._socket.send_json(message)
        return await asyncio.wait_for(call, DEADLINE)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is awaited."""
        done = await self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def open(self, url: str) -> None:
        """Open a page and wait until it is loaded, with its visible pictures."""
        self.errors, self.requests = [], []
        self._loaded.clear()
        await self.command("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), DEADLINE)

    async def look(self, *, width: int, dark: bool = False) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def _receive(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                call = self._calls.pop(data["id"])
                if "error" in data:
                    call.set_exception(RuntimeError(str(data["error"])))
                else:
                    call.set_result(data["result"])
            else:
                self._note(data["method"], data["params"])

    def _note(self, event: str, data: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Network.requestWillBeSent":
            self.requests.append(data["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(data["exceptionDetails"]))
        elif event == "Log.entryAdded" and data["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{data['entry']['text']} {data['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and data["type"] in ("error", "warning", "assert"):
            self.errors.append(str(data["args"]))
