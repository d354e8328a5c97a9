"""Threads that use one decoder, or one cache of decode graphs, all at once, while its graphs come and go. Each result is compared."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from omnigraph.decoder import GraphedDecoder
from omnigraph.prefix import DecodeGraphCache
from omnigraph.shapes import BucketPlan
from tests.faults.little import Request, Step, StepAdapter, Whole

LARGE = [(4, 20)]  # beside it, what others hold is little
PLANS = [
    BucketPlan.grid([1, 2, 4], [3, 6, 8], extra=LARGE),
    BucketPlan.grid([2, 4], [3, 6, 8], extra=[(1, 3), *LARGE]),  # most of it is kept, the rest closed
    BucketPlan.grid([1, 2, 4], [3, 6, 8, 10], extra=LARGE),  # all of it is kept
    BucketPlan.grid([1], [6]),  # most of it is given up: a fresh pool
    BucketPlan.grid([2], [5, 9], extra=[(1, 6)]),
]
SWITCH = 2e-5  # seconds a thread runs before another may: Python's own 5 ms hold many whole calls
Where = Callable[[], AbstractContextManager[Any]]  # what each thread works within: a stream of its own


def race(work: Callable[[int], None], meanwhile: Callable[[int], object], threads: int, where: Where = nullcontext) -> None:
    """Run `work(seed)` in each thread, and `meanwhile(n)` here for n = 0, 1, ... until all are done. The first error is raised."""
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            with where():
                work(seed)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        for thread in running:
            thread.start()
        n = 0
        while any(thread.is_alive() for thread in running) and not errors:
            meanwhile(n)
            n += 1
        for thread in running:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def race_on_a_decoder(
    module: Whole, *, threads: int, calls: int, where: Where = nullcontext, pause: float = 0.0, check_codes: bool | None = None
) -> Counter[str]:
    """`threads` by `calls` decodes: whole, by chunks, batched and streamed. Returns how often each way was taken, and the outcomes."""
    device = next(module.parameters()).device
    drawn = torch.Generator().manual_seed(5)
    codes = [torch.randint(16, (4, 4, 24), generator=drawn).to(device) for _ in range(6)]
    full = [module(c) for c in codes]  # causal, and rows independent: every cut of it is a part of this
    up, trim = module.config.upsample, module.config.trim
    found: Counter[str] = Counter()
    done, event = threading.Lock(), threading.Event()

    def same(audio: Tensor, which: int, row: int, batch: int, frames: int) -> None:
        expected = full[which][row : row + batch, :, : max(frames * up - trim, 0)]
        assert (audio.shape, audio.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(audio, expected), (batch, frames)

    with GraphedDecoder(module, PLANS[0], check_codes=check_codes) as decoder:
        decoder.warmup(strict=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

        def one(rng: random.Random) -> str:
            which, row = rng.randrange(len(codes)), rng.randrange(4)
            batch, frames, kind = rng.randint(1, 4 - row), rng.randint(1, 10), rng.random()
            rows = codes[which][row : row + batch]
            if kind < 0.8:
                given = rows[..., :frames]
                same(decoder.decode(given.contiguous() if kind < 0.4 else given), which, row, batch, frames)
                return "decode"
            if kind < 0.9:
                frames = rng.randint(1, 24)
                same(decoder.chunked_decode(rows[..., :frames], 5, 3), which, row, batch, frames)
                return "chunked"
            if kind < 0.97:
                lengths = [rng.randint(0, 24) for _ in range(batch)]
                for n, (audio, length) in enumerate(zip(decoder.batched_chunked_decode(rows, lengths, 5, 3), lengths, strict=True)):
                    same(audio[None], which, row + n, 1, length)
                return "batched"
            session, frames = decoder.stream(chunk_size=5, left_context_size=3), rng.randint(2, 16)
            parts = [session.push(part) for part in codes[which][row : row + 1, :, :frames].split(rng.randint(1, 7), -1)]
            same(torch.cat([*parts, session.flush()], -1), which, row, 1, frames)
            return "stream"

        def work(seed: int) -> None:
            rng, ways = random.Random(seed), Counter[str]()
            for _ in range(calls):
                ways[one(rng)] += 1
            with done:
                found.update(ways)

        plans = cycle(PLANS[1:] + PLANS[:1])

        def meanwhile(n: int) -> None:
            if n % 11 == 10:
                assert decoder.recapture().failed == ()
            else:
                plan = next(plans)
                assert decoder.reconfigure(plan).failed == ()
                assert set(decoder.captured) == set(plan.buckets)
            assert decoder.stats.calls >= decoder.stats.hits
            found["plans"] += 1
            event.wait(pause)

        race(work, meanwhile, threads, where)
        assert sum(found[way] for way in ("decode", "chunked", "batched", "stream")) == threads * calls
        stats = decoder.stats
        assert stats.calls == stats.hits + sum(stats.fallbacks.values())
        assert found["decode"] <= stats.calls
        found.update(stats.kinds)
    return found


def race_on_a_cache(module: Step, *, threads: int, calls: int, where: Where = nullcontext, pause: float = 0.0) -> Counter[str]:
    """`threads` by `calls` steps of requests that come and go, on more keys than a cache keeps. Returns hits and reasons."""
    device = next(module.parameters()).device
    cache = DecodeGraphCache(StepAdapter(module), max_entries=3)
    event = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        requests: list[Request] = []
        for n in range(calls):
            if not requests or rng.random() < 0.04:
                requests = [*requests[-1:], Request(module, rng.choice([3, 3, 3, 4, 4, 5, 6]), device, seed=1000 * seed + n)]
                cache.register_prefill(requests[-1].prefix)
            request = rng.choice(requests)
            if rng.random() < 0.02:
                request.prefix.layers[0][0].neg_()  # its owner may write to it: no step reads the copy of before
            hidden, timestep = request.draw(1, 6, 4).to(device), torch.full((1,), rng.random(), device=device)
            latents = cache.try_decode(request.prefix, hidden, timestep)
            if latents is None and rng.random() < 0.2:
                cache.register_prefill(request.prefix)  # evicted: as a new prefill would
            assert latents is None or torch.equal(latents, request.eager(hidden, timestep)), f"call {n} of thread {seed}"

    def meanwhile(n: int) -> None:
        if n % 8 == 7:
            cache.clear()
        cache.to_frame()
        assert len(cache.keys) <= 3
        event.wait(pause)

    race(work, meanwhile, threads, where)
    assert cache.stats.calls == threads * calls
    return Counter({"hits": cache.stats.hits, "copies": cache.copies, **cache.stats.fallbacks})
