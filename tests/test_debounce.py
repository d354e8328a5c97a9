"""Controls that are dragged: the last value wins, nothing piles up, errors are told, and closing ends it."""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextvars import ContextVar
from threading import Event, Thread
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigraph._debounce import Latest, Overtaken

LONG = 10.0  # seconds that no test takes unless it fails


class Recorder:
    """Work that notes what it is given, and can be held up."""

    def __init__(self) -> None:
        self.began: list[Any] = []
        self.ended: list[Any] = []
        self.errors: list[BaseException] = []
        self.started, self.go_on = Event(), Event()
        self.go_on.set()
        self.latest: Latest[Any] = Latest(self.work, self.errors.append)

    def work(self, value: Any, overtaken: Any) -> None:
        self.began.append(value)
        self.started.set()
        assert self.go_on.wait(LONG)
        if isinstance(value, BaseException):
            raise value
        self.ended.append((value, overtaken()))

    def hold(self, value: Any) -> None:
        """Submit `value` and return when it is being worked on."""
        self.go_on.clear()
        assert self.latest.submit(value)
        assert self.started.wait(LONG)


def test_of_what_waits_only_the_last_is_done() -> None:
    record = Recorder()
    record.hold("first")
    for value in range(50):
        assert record.latest.submit(value)
    record.go_on.set()
    assert record.latest.idle(LONG)
    assert record.ended == [("first", True), (49, False)]


@settings(max_examples=30, deadline=None)
@given(pauses=st.lists(st.sampled_from([0.0, 0.0, 0.0005, 0.002]), min_size=1, max_size=30))
def test_the_last_value_wins_whatever_the_pace(pauses: list[float]) -> None:
    done: list[int] = []

    def work(value: int, _: Any) -> None:
        time.sleep(0.001)
        done.append(value)

    latest = Latest(work, pytest.fail)
    for value, pause in enumerate(pauses):
        latest.submit(value)
        time.sleep(pause)
    assert latest.idle(LONG)
    assert done[-1] == len(pauses) - 1
    assert done == sorted(set(done))


def test_one_at_a_time_from_many_threads() -> None:
    running, most, done = [0], [0], []

    def work(value: int, _: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.0005)
        running[0] -= 1
        done.append(value)

    latest = Latest(work, pytest.fail)
    threads = [Thread(target=lambda n=n: [latest.submit(100 * n + i) for i in range(100)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latest.submit(-1)
    assert latest.idle(LONG)
    assert (most[0], done[-1]) == (1, -1)


def test_long_work_learns_that_it_is_overtaken_and_stops() -> None:
    steps, started, record = [0], Event(), Recorder()

    def work(value: str, overtaken: Any) -> None:
        for _ in range(10_000 if value == "long" else 1):
            steps[0] += 1
            started.set()
            if overtaken():
                raise Overtaken
            time.sleep(0.001)

    latest = Latest(work, record.errors.append)
    latest.submit("long")
    assert started.wait(LONG)
    latest.submit("short")
    assert latest.idle(LONG)
    assert steps[0] < 5_000
    assert record.errors == []


@pytest.mark.parametrize("error", [ValueError("impossible"), SystemExit(1), KeyboardInterrupt()])
def test_an_error_is_told_and_the_next_value_served(error: BaseException) -> None:
    record = Recorder()
    record.latest.submit(error)
    assert record.latest.idle(LONG)
    record.latest.submit("next")
    assert record.latest.idle(LONG)
    assert record.errors == [error]
    assert record.ended == [("next", False)]


def test_a_handler_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    done = []

    def work(value: int, _: Any) -> None:
        done.append(1 // value)

    def handler(error: BaseException) -> None:
        raise RuntimeError("no panel any more")

    latest = Latest(work, handler)
    with caplog.at_level(logging.ERROR, "omnigraph"):
        latest.submit(0)
        assert latest.idle(LONG)
    latest.submit(1)
    assert latest.idle(LONG)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text and "no panel any more" in caplog.text


def test_closing_drops_what_waits_and_tells_what_runs() -> None:
    record = Recorder()
    record.hold("running")
    record.latest.submit("waiting")
    assert record.latest.close(timeout=0.01) is False  # it still runs
    assert record.latest.submit("late") is False
    record.go_on.set()
    assert record.latest.close(LONG)
    assert record.latest.close()  # again is fine
    assert record.ended == [("running", True)]


def test_work_may_submit_and_close() -> None:
    done = []

    def work(value: int, _: Any) -> None:
        done.append(value)
        if value < 3:
            latest.submit(value + 1)
        else:
            assert latest.idle(0) is False
            assert latest.close() is False  # no waiting for itself

    latest = Latest(work, pytest.fail)
    latest.submit(0)
    assert latest.idle(LONG)
    assert done == [0, 1, 2, 3]
    assert latest.submit(9) is False


def test_no_thread_and_no_value_is_kept_while_idle() -> None:
    class Value:
        pass

    before, record = set(threading.enumerate()), Recorder()
    value = Value()
    gone = ref(value)
    record.latest.submit(value)
    assert record.latest.idle(LONG)
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
    assert set(threading.enumerate()) <= before
    record.began.clear()
    record.ended.clear()
    del value
    gc.collect()
    assert gone() is None


def test_it_runs_in_the_context_of_who_submitted_and_in_torchs_default_mode() -> None:
    message: ContextVar[str] = ContextVar("message", default="none")
    seen = []
    latest = Latest(
        lambda value, _: seen.append((value, message.get(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())), pytest.fail
    )
    with torch.inference_mode():
        for value in ("one", "two"):
            message.set(value)
            latest.submit(value)
            assert latest.idle(LONG)
    assert seen == [("one", "one", True, False), ("two", "two", True, False)]
