"""Calls from other threads, other processes and in the middle of somebody else's work."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omnigraph.decoder import GraphedDecoder
from omnigraph.graph import capture
from omnigraph.models import tiny
from omnigraph.shapes import BucketPlan
from omnigraph.stats import Fallback

ROOT = Path(__file__).parents[2]
PLAN = BucketPlan.grid([1, 2], [5, 8])
SHAPES = [(1, 5), (1, 3), (2, 8), (3, 5), (1, 20)]


def elsewhere(work: Callable[[], object]) -> None:
    """Run it in a thread of its own, which has modes of its own."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": default_dtype,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_thread_has_modes_of_its_own(mode: str) -> None:
    """Captured here in the mode and called elsewhere without it, and the other way round: each call is eager's there."""
    module = tiny(trim=3)
    inputs = [torch.randint(32, (batch, 4, frames)) for batch, frames in SHAPES]

    def check() -> None:
        for x in inputs:
            audio, expected = decoder.decode(x), module(x).detach()
            assert audio.dtype == expected.dtype
            torch.testing.assert_close(audio, expected)

    def within() -> None:
        with MODES[mode]():
            check()

    for inside, outside in ((within, check), (check, within)):
        decoder = GraphedDecoder(module, PLAN)
        with decoder:
            if inside is within:
                with MODES[mode]():
                    decoder.warmup(strict=True)
                    elsewhere(outside)  # while this thread is in the mode
                    check()
            else:
                elsewhere(lambda decoder=decoder: decoder.warmup(strict=True))
                outside()
            elsewhere(inside)
            elsewhere(outside)
            assert set(decoder.stats.fallbacks) <= {Fallback.NO_BUCKET, Fallback.ENVIRONMENT_CHANGED}
            assert decoder.stats.hits > 0


class Finalized:
    """Computes when it is collected: in a cycle, so at whatever moment the collector comes."""

    counter = torch.zeros(())

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        self.counter.add_(1)


def test_the_collector_does_not_come_during_a_capture() -> None:
    """What a finalizer computes would be recorded, and done again by each replay; on a GPU a graph could die in the middle."""

    def fn(x: Tensor) -> Tensor:
        for _ in range(200):
            Finalized()
        return x.sin()

    before, x = gc.get_threshold(), torch.randn(5)
    gc.collect()
    gc.set_threshold(5, 1, 1)
    try:
        graph = capture(fn, x)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    count = float(Finalized.counter)
    assert count > 0
    for _ in range(3):
        assert torch.equal(graph.replay(x), x.sin())
    assert float(Finalized.counter) == count


FORKED = """
import os, sys, torch
from omnigraph.decoder import GraphedDecoder
from omnigraph.models import tiny
from omnigraph.shapes import BucketPlan

module = tiny(trim=3)
inputs = [torch.randint(32, (batch, 4, frames)) for batch, frames in [(1, 5), (1, 3), (2, 8), (3, 5), (1, 20)]]
decoder = GraphedDecoder(module, BucketPlan.grid([1, 2], [5, 8]))
decoder.warmup(strict=True)
expected = [decoder.decode(x) for x in inputs]

def right():
    return all(torch.equal(decoder.decode(x), audio) for x, audio in zip(inputs, expected))

pid = os.fork()
if not pid:
    good = right() and decoder.stats.hits == 8
    decoder.reconfigure(BucketPlan.grid([1], [5, 9]))
    good = good and torch.equal(decoder.decode(inputs[0]), expected[0])
    with torch.no_grad():
        module.context.weight.mul_(0.5)
    good = good and torch.equal(decoder.decode(inputs[0]), module(inputs[0]))
    decoder.close()
    os._exit(0 if good else 1)
good = right()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and good and right() and decoder.stats.hits == 12
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
def test_a_forked_process_has_graphs_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
