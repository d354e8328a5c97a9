"""A short run over every path of a decoder, for compute-sanitizer.

    compute-sanitizer --tool memcheck --leak-check full python tests/gpu/memcheck.py

Exits with 1 where a result is not eager's. The caching allocator stays on, since no graph can be captured without it: what it hands
out is rounded up, so an access beyond a tensor is seen where it leaves the block.
"""

from __future__ import annotations

import torch

from omnigraph.decoder import GraphedDecoder
from omnigraph.models import tiny
from omnigraph.shapes import BucketPlan

SHAPES = [(1, 8), (2, 8), (1, 7), (1, 5), (3, 8), (2, 3), (1, 1), (1, 40)]


def main() -> int:
    """Decode on every path and compare; returns the number of results that are not eager's."""
    torch.manual_seed(0)
    module = tiny(trim=3, device="cuda", dtype=torch.float64)
    calls = wrong = 0

    def check(audio: torch.Tensor, codes: torch.Tensor) -> None:
        nonlocal calls, wrong
        calls += 1
        expected = module(codes)
        wrong += audio.shape != expected.shape or not torch.allclose(audio, expected, rtol=0, atol=1e-12)

    with GraphedDecoder(module, BucketPlan.grid([1, 2], [5, 8])) as decoder:
        decoder.warmup(strict=True)
        for plan in (decoder.plan, BucketPlan.grid([1, 2], [5, 8, 9]), BucketPlan.grid([1], [6])):
            decoder.reconfigure(plan)
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    for batch, frames in SHAPES:
                        codes = torch.randint(32, (batch, 4, frames)).cuda()
                        check(decoder.decode(codes), codes)
                    codes = torch.randint(32, (2, 4, 30)).cuda()
                    check(decoder.chunked_decode(codes, 5, 3), codes)
                    session = decoder.stream(chunk_size=5, left_context_size=3)
                    parts = [session.push(part) for part in codes[:1].split(7, -1)]
                    check(torch.cat([*parts, session.flush()], -1), codes[:1])
                torch.cuda.synchronize()
        print(decoder.stats)
    torch.cuda.synchronize()
    print(f"{calls} calls, {wrong} not eager's")
    return wrong


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
