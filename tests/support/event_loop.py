"""Event loops that close all their connections: for a coroutine, or for a server in a thread.

:class:`Relay` is such a server, which stands between a client and another server.

A socket that the garbage collector closes causes a ResourceWarning in the test that runs then. So a
loop here tracks all its connections, also those without another reference, and closes them when it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Server = TypeVar("Server", bound="ThreadServer")

_DEADLINE = 60.0  # seconds; only a failing test takes that long
_AGAIN = 0.1


class Loop(asyncio.SelectorEventLoop):
    """An event loop that tracks its connections; :meth:`end` closes them."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: dict[asyncio.WriteTransport, Any] = {}

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        made = await super().create_connection(*args, **options)
        self.track(made[0])
        return made

    def track(self, connection: asyncio.WriteTransport) -> None:
        self._remove_closed()
        self._sockets[connection] = connection.get_extra_info("socket")

    def _remove_closed(self) -> None:
        # A closing transport may still have data to send: its socket decides.
        self._sockets = {one: at for one, at in self._sockets.items() if at.fileno() >= 0}

    def abort(self) -> None:
        for connection in self._sockets:
            connection.abort()

    async def closed(self) -> None:
        """Abort all connections, and wait until their sockets are closed."""
        self.abort()
        self._remove_closed()
        while self._sockets:
            await asyncio.sleep(0)  # an aborted socket is closed in the next turn
            self._remove_closed()

    async def ended(self, ours: Callable[[], Iterable[asyncio.Task[Any]]]) -> None:
        """Abort all connections, cancel ``ours``, and wait until no other task runs."""
        deadline = self.time() + _DEADLINE
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            assert self.time() < deadline, f"these do not end: {tasks}"
            self.abort()  # before a task drops what it has not closed
            for task in ours():
                task.cancel()
            # And again: new ones may have come, and `wait_for` swallows a cancellation that comes
            # together with what it waits for.
            await asyncio.wait(tasks, timeout=_AGAIN)

    async def end(self) -> None:
        """Cancel all tasks, and close all connections."""
        await self.ended(lambda: asyncio.all_tasks() - {asyncio.current_task()})
        await self.closed()
        await self.shutdown_asyncgens()
        await self.shutdown_default_executor()


class LoopOfTest(Loop):
    """The event loop of an async test: :meth:`close` fails if the test left a connection open.

    pytest-asyncio has cancelled the test's tasks then.
    """

    def close(self) -> None:
        """Close all connections, then the loop; AssertionError if a connection was left open."""
        if self.is_closed():
            return
        left_open = [str(one) for one in self._sockets if not one.is_closing()]
        try:
            self.run_until_complete(self.end())
        finally:
            super().close()
        assert not left_open, f"the test left connections open: {left_open}"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a :class:`Loop`, as ``asyncio.run`` does."""
    loop = Loop()
    with contextlib.closing(loop):
        try:
            return loop.run_until_complete(work)
        finally:
            loop.run_until_complete(loop.end())


@contextlib.asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after ``seconds``, and raise TimeoutError."""
    task, expired = asyncio.current_task(), False
    assert task is not None

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if not expired:
            raise
        raise TimeoutError(f"the block took longer than {seconds} s") from None
    finally:
        timer.cancel()


@contextlib.contextmanager
def cancelled_after(seconds: float) -> Iterator[None]:
    """Cancel all tasks of the running loop after ``seconds``: for a fixture around a test."""

    def expire() -> None:
        for task in asyncio.all_tasks():
            task.cancel(f"the test took longer than {seconds} s")

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    finally:
        timer.cancel()


async def until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Run all concurrently until one ends or fails, then cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ThreadServer:
    """A TCP server in a thread and loop of its own; a context manager.

    A subclass defines :meth:`_serve` for one connection. When it ends, also by cancellation, every
    connection that it accepted or opened is closed.

    Attributes:
        host, port: where it listens; a free port when 0, from the moment it is entered.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.port = host, port
        self._listens: Future[tuple[Loop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._serving: set[asyncio.Task[None]] = set()

    def __enter__(self: Server) -> Server:
        self._thread.start()
        self._listens.result(_DEADLINE)
        return self

    def __exit__(self, *raised: object) -> None:
        loop, over = self._listens.result()
        loop.call_soon_threadsafe(over.set)
        self._thread.join(_DEADLINE)
        assert not self._thread.is_alive()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    def _in_loop(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the server's thread, and wait until that is done."""
        loop, _ = self._listens.result()
        done: Future[None] = Future()

        def act() -> None:
            try:
                action()
                done.set_result(None)
            except BaseException as error:  # raised in the caller's thread
                done.set_exception(error)

        loop.call_soon_threadsafe(act)
        done.result(_DEADLINE)

    def _abort(self) -> None:
        """Reset all connections."""
        self._in_loop(lambda: self._listens.result()[0].abort())

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            run(self._listen())
        except BaseException as error:
            if self._listens.done():
                raise
            self._listens.set_exception(error)

    async def _listen(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, Loop)
        server = await asyncio.start_server(self._accepted, self.host, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._listens.set_result((loop, over))
        try:
            await over.wait()
        finally:
            # Not closed yet: asyncio would lose the connections that it has just accepted, which
            # have neither a task nor a tracked transport. Without a cancellation they get both.
            for listening in server.sockets:
                loop.remove_reader(listening.fileno())
            await loop.ended(lambda: self._serving)
            await loop.closed()
            server.close()
            await server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: its task would track the connection only after it has started.
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        loop.track(writer.transport)
        task = loop.create_task(self._whole(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side closed the connection, or the test ended
        finally:
            writer.transport.abort()


class Relay(ThreadServer):
    """Passes connections on to ``target`` at ``host``; held, it lets nothing pass.

    A subclass defines :meth:`_pass_up` and :meth:`_pass_down`, which wait for ``_open``.

    Attributes:
        connections: how many clients have connected, ``served`` how many of them are connected now.
    """

    def __init__(self, target: int, host: str = "127.0.0.1", listen: int = 0) -> None:
        super().__init__(port=listen)
        self._target = (host, target)
        self.connections = self.served = 0
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Keep all connections and what they carry, in order: what a slow network does."""
        self._in_loop(self._open.clear)

    def release(self) -> None:
        self._in_loop(self._open.set)

    async def _serve(self, down: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.connections += 1
        up, to_server = await asyncio.open_connection(*self._target)
        self.served += 1
        try:
            await until_one_ends(self._pass_up(down, to_server), self._pass_down(up, to_client))
        finally:
            self.served -= 1
            to_server.transport.abort()

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def _pass_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError
