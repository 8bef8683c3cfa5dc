"""A thread that writes until it is stopped, and whose failure fails the test."""

from __future__ import annotations

import threading


class WriterThread(threading.Thread):
    """Calls :meth:`write_until_stopped`; :meth:`stop` raises its error."""

    def __init__(self, deadline: float) -> None:
        super().__init__(daemon=True)
        self._deadline = deadline
        self.over = threading.Event()
        self.error: BaseException | None = None

    def write_until_stopped(self) -> None:
        """Write until ``over`` is set."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.write_until_stopped()
        except BaseException as error:  # raised by `stop`
            self.error = error

    def stop(self) -> None:
        self.over.set()
        self.join(self._deadline)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
