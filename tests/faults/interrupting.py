"""Raise an error at the n-th point of an operation at which Python could deliver an interrupt: every one, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import omnigraph

HOME = str(Path(omnigraph.__file__).parent)


class Interrupt:
    """Within it, point number `at` raises `error`. `count` counts the points; with `at=None` nothing is raised.

    A point is where the interpreter looks for signals: a function of the library begins, or a call of the library into C has returned,
    its work done and its result lost. Points within Python code of torch's (the end of `no_grad`, which one can undo) are left out.
    """

    def __init__(self, at: int | None = None, error: Callable[[], BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.count, self.where = at, error, 0, ""

    def __enter__(self) -> Self:
        sys.setprofile(self._event)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(HOME):
            self.count += 1
            if self.at is not None and self.count == self.at + 1:
                self.where = f"{event} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise self.error()


def points(operation: Callable[[], object], most: int) -> Iterable[int]:
    """The points of an operation to interrupt it at: all of them, or `most` spread over it."""
    with Interrupt() as counted:
        operation()
    return range(0, counted.count, max(1, -(-counted.count // most)))
