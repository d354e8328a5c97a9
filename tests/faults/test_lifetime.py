"""What is closed or dropped is gone at once, without the collector, whoever still holds an error, a report, a count or a callback."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from omnigraph._pool import Pool
from omnigraph.decoder import GraphedDecoder
from omnigraph.graph import CapturedGraph
from omnigraph.models import tiny
from omnigraph.prefix import DecodeGraphCache
from omnigraph.shapes import BucketPlan
from tests.faults.interrupting import Interrupt, points
from tests.faults.little import Request, Step, StepAdapter

ROOT = Path(__file__).parents[2]
PLAN = BucketPlan.grid([1, 2], [5, 8])
SHAPES = [(1, 5), (1, 3), (2, 8), (3, 5), (1, 20)]


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def graphs() -> list[CapturedGraph]:
    """All in this process that are not closed."""
    return [one for one in gc.get_objects() if type(one) is CapturedGraph and one._launcher is not None]


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(32, (shape[0], 4, shape[1]))


def parts(decoder: GraphedDecoder) -> list[weakref.ref[Any]]:
    """Everything that takes memory: the pool, its blocks, the graphs, their static tensors."""
    live = decoder._live
    assert live is not None
    found: list[Any] = [live, live.pool, *live.graphs.values(), *live.pool.arena.blocks]
    found += [tensor for graph in live.graphs.values() for tensor in (graph.inputs[0], graph.outputs)]
    return [weakref.ref(one) for one in found]


class Failing(nn.Module):
    """Fails where a code is 31, in a replay as well: the row is out of the table."""

    num_quantizers, codebook_size = 4, 31

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.requires_grad_(False).eval()

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.embed(codes.clamp(max=31)).sum(1).reshape(len(codes), 1, -1)


CALLS: dict[str, Callable[[GraphedDecoder, torch.Tensor], Any]] = {
    "a shape seen first": lambda decoder, codes: decoder.decode(codes[:1, :, :4]),
    "a shape seen before": lambda decoder, codes: decoder.decode(codes[:1, :, :5]),
    "a split": lambda decoder, codes: decoder.decode(codes[:, :, :5]),
    "chunks": lambda decoder, codes: decoder.chunked_decode(codes, 5, 0),
    "a stream": lambda decoder, codes: decoder.stream(chunk_size=5, left_context_size=0).push(codes[:1]),
}


@pytest.mark.parametrize("way", CALLS)
def test_an_error_that_is_kept_keeps_no_graph(way: str) -> None:
    """As a notebook keeps the last one, with all its frames."""
    decoder = GraphedDecoder(Failing(), PLAN, check_codes=False)
    decoder.warmup(strict=True)
    good, bad = codes(3, 10).clamp(max=30), torch.full((3, 4, 10), 31)
    decoder.decode(good[:1, :, :5])
    with no_collector():
        refs = parts(decoder)
        with pytest.raises(IndexError) as caught:
            CALLS[way](decoder, bad)
        kept = caught.value
        assert torch.equal(decoder.decode(good[:2, :, :5]), decoder.module(good[:2, :, :5]))
        decoder.close()
        assert kept.__traceback__ is not None
        assert [ref() for ref in refs] == [None] * len(refs)


def test_an_interrupted_warm_up_keeps_no_graph() -> None:
    module = tiny()
    with no_collector():
        before = len(graphs())
        for at in points(lambda: GraphedDecoder(module, PLAN).warmup(), 20):
            decoder = GraphedDecoder(module, PLAN)
            with pytest.raises(KeyboardInterrupt) as caught, Interrupt(at):
                decoder.warmup()
            held = len(graphs()) - before
            assert held == len(decoder.captured), at  # none but those in place
            decoder.close()
            assert caught.value is not None


def test_an_error_of_a_cache_that_is_kept_keeps_no_buffers() -> None:
    module = Step()
    cache, request = DecodeGraphCache(StepAdapter(module)), Request(module, 4)
    hidden, timestep = request.draw(1, 6, 4), request.draw(1)
    cache.register_prefill(request.prefix)
    cache.try_decode(request.prefix, hidden, timestep)
    with no_collector():
        for at in points(lambda: cache.try_decode(request.prefix, hidden, timestep), 30):
            cache.register_prefill(request.prefix)
            cache.try_decode(request.prefix, hidden, timestep)
            [entry] = cache._entries.live.values()
            refs = [weakref.ref(one) for one in (entry, entry.buffers.hidden, entry.graph, entry.graph.outputs)]
            del entry
            with pytest.raises(KeyboardInterrupt) as caught, Interrupt(at):
                cache.try_decode(request.prefix, hidden, timestep)
            cache.clear()
            assert [ref() for ref in refs] == [None] * 4, at
            assert caught.value is not None


def test_stats_reports_results_and_callbacks_keep_no_decoder() -> None:
    module = tiny()

    class Callback:
        def __call__(self, what: str, done: int, of: int) -> None:
            self.last = what

    with no_collector():
        decoder, callback = GraphedDecoder(module, PLAN), Callback()
        report = decoder.warmup(strict=True, progress=callback)
        audios = [decoder.decode(codes(*shape)) for shape in SHAPES]
        kept = [report, decoder.stats, decoder.stats.to_frame(), decoder.facts, audios, decoder.reconfigure(BucketPlan.grid([1], [5]))]
        kept += [decoder.chunked_decode(codes(2, 20), 5, 3), decoder.batched_chunked_decode(codes(2, 20), [20, 7], 5, 3)]
        with pytest.raises(ValueError, match="codes go from") as caught:
            decoder.decode(codes(1, 5) + 32)
        error = str(caught.value)
        del caught
        refs = [weakref.ref(decoder), weakref.ref(callback), *parts(decoder)]
        del decoder, callback
        assert [ref() for ref in refs] == [None] * len(refs)
        assert len(kept) == 8
        assert error


def test_a_decoder_in_a_cycle_goes_with_the_collector_and_its_graphs_before() -> None:
    module = tiny()
    with no_collector():
        decoder = GraphedDecoder(module, PLAN)
        module.graphed = decoder  # the module holds who holds it
        decoder.warmup(strict=True)
        refs = parts(decoder)
        decoder.close()
        assert [ref() for ref in refs] == [None] * len(refs)
        again = GraphedDecoder(module, PLAN)
        module.graphed = again
        again.warmup(strict=True)
        assert torch.equal(again.decode(codes(1, 5) * 0), module(codes(1, 5) * 0))
        refs = [weakref.ref(again), *parts(again), weakref.ref(module)]
        del decoder, again, module
        assert refs[0]() is not None
        gc.collect()
        assert [ref() for ref in refs] == [None] * len(refs)


def test_a_cache_that_is_dropped_goes_without_the_collector() -> None:
    module = Step()
    with no_collector():
        cache, requests = DecodeGraphCache(StepAdapter(module)), [Request(module, tokens) for tokens in (3, 3, 4)]
        for request in requests:
            cache.register_prefill(request.prefix)
            assert cache.try_decode(request.prefix, request.draw(1, 6, 4), request.draw(1)) is not None
        entries = [*cache._entries.live.values()]
        refs = [weakref.ref(one) for entry in entries for one in (entry, entry.pool, entry.graph, entry.buffers.hidden)]
        prefix = weakref.ref(requests[0].prefix.layers[0][0])
        del requests[0], entries, request
        assert prefix() is None  # a cache keeps no request alive
        stats = cache.stats
        del cache
        assert [ref() for ref in refs] == [None] * len(refs)
        assert stats.hits == 3


CELLS = """
import gc
from traitlets.config import Config
from IPython.core.interactiveshell import InteractiveShell
from omnigraph._pool import Pool

config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
shell.run_cell("import torch, omnigraph as og\\nmodule = og.models.tiny()\\ncodes = torch.randint(32, (1, 4, 5))").raise_error()
shell.run_cell("og.capture(torch.sin, torch.zeros(1))").raise_error()  # the first makes torch import, which leaves frames behind
gc.collect()
gc.disable()
known = sum(type(one) is Pool for one in gc.get_objects())

def pools():
    return sum(type(one) is Pool for one in gc.get_objects()) - known

counts = []
for n in range(10):
    shell.run_cell('''
decoder = og.GraphedDecoder(module, og.BucketPlan.grid([1, 2], [5, 8]))
report = decoder.warmup()
audio = decoder.decode(codes)
assert torch.equal(audio, module(codes))
report''', store_history=True).raise_error()
    shell.run_cell("decoder.stats", store_history=True).raise_error()
    counts.append(pools())
print(*counts)
counts = []
for n in range(10):
    shell.run_cell('''
with og.GraphedDecoder(module, og.BucketPlan.grid([1, 2], [5, 8])) as decoder:
    decoder.warmup()
    decoder.decode(codes + 32)''', store_history=True)
    counts.append(pools())
print(*counts)
"""


def test_a_cell_that_is_run_ten_times_holds_one_decoder() -> None:
    """In IPython itself, which keeps what a cell shows and the last error; the collector never comes."""
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.replace(" ", "").isdigit()]
    assert lines == [" ".join(["1"] * 10), " ".join(["0"] * 10)], done.stdout


def test_this_file_sees_pools() -> None:
    with no_collector():
        pool = Pool("cpu")
        assert any(one is pool for one in gc.get_objects())
