"""Work that follows a control: one value at a time, the latest wins, and what was overtaken is dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import Context, copy_context
from threading import Condition, Thread, current_thread
from typing import Generic, TypeVar

T = TypeVar("T")
logger = logging.getLogger("omnigraph")


class Overtaken(Exception):
    """Raised by work that has been told to stop: nothing went wrong."""


class Latest(Generic[T]):
    """Does `work` for the latest value submitted, on a thread of its own, never two at once.

    A value that waits is replaced by a later one. Work that runs is not interrupted: it may ask whether it is overtaken, and then
    return or raise `Overtaken`. There is a thread only while there is work. It has torch's default grad mode, and the context
    variables of who submitted the value, so that a Jupyter kernel knows which message it is about.

    Args:
        work: called with the value and a function that says whether a later value waits, or all is closed.
        on_error: called with what `work` raises, on the same thread; the next value is served all the same.
    """

    def __init__(self, work: Callable[[T, Callable[[], bool]], object], on_error: Callable[[BaseException], object]) -> None:
        self._work, self._on_error = work, on_error
        self._changed = Condition()
        self._next: tuple[T, Context] | None = None
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, value: T) -> bool:
        """Have `value` worked on, instead of any that waits; from any thread. False: closed, nothing will be done."""
        with self._changed:
            if self._closed:
                return False
            self._next = value, copy_context()
            if self._thread is None:
                thread = Thread(target=self._run, name="omnigraph-latest", daemon=True)
                thread.start()  # it waits for the lock
                self._thread = thread
            return True

    def idle(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until nothing runs or waits; whether that is so. Never so within the work itself."""
        if current_thread() is self._thread:
            return False
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Take no more values, drop the one that waits, and wait, at most `timeout` seconds, for the work that runs; as `idle`."""
        with self._changed:
            self._closed, self._next = True, None
        return self.idle(timeout)

    def _overtaken(self) -> bool:
        return self._closed or self._next is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._next is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                (value, context), self._next = self._next, None
            context.run(self._once, value)

    def _once(self, value: T) -> None:
        try:
            self._work(value, self._overtaken)
        except Overtaken:
            pass
        except BaseException as error:  # SystemExit too: a thread that it ends would serve no later value
            try:
                self._on_error(error)
            except BaseException:
                logger.exception("an error could not be shown: %r", error)
