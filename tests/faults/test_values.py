"""Codes out of range: refused on a CPU wherever they are given, by the first of them and its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omnigraph.decoder import GraphedDecoder
from omnigraph.models import tiny
from omnigraph.shapes import BucketPlan

PLAN = BucketPlan.grid([1, 2], [5, 8])
CALLS: dict[str, Callable[[GraphedDecoder, torch.Tensor], Any]] = {
    "decode": lambda decoder, codes: decoder.decode(codes),
    "chunked": lambda decoder, codes: decoder.chunked_decode(codes, 5, 3),
    "batched": lambda decoder, codes: decoder.batched_chunked_decode(codes, [codes.shape[-1]] * len(codes), 25, 3),
    "stream": lambda decoder, codes: decoder.stream(chunk_size=5, left_context_size=3).push(codes[1:]),
}


@pytest.fixture(params=[None, True])
def decoder(request: pytest.FixtureRequest) -> GraphedDecoder:
    decoder = GraphedDecoder(tiny(), PLAN, check_codes=request.param)
    decoder.warmup(strict=True)
    decoder.decode(torch.zeros(2, 4, 8, dtype=torch.int64))  # the shape is known then
    return decoder


@pytest.mark.parametrize("wrong", [32, -1, 127, 2**40, -(2**63)])
@pytest.mark.parametrize("way", CALLS)
def test_the_first_code_out_of_range_is_named(decoder: GraphedDecoder, way: str, wrong: int) -> None:
    codes = torch.randint(32, (2, 4, 8))
    expected = decoder.module(codes)
    calls, hits = decoder.stats.calls, decoder.stats.hits
    bad = codes.clone()
    bad[1, 2, 4], bad[1, 3, 1] = wrong, 32
    row = 0 if way == "stream" else 1
    low, high = int(bad.min()), int(bad.max())
    with pytest.raises(
        ValueError, match=f"codes go from 0 to 31; got (.*), the first {wrong} in row {row}, quantizer 2, frame 4$"
    ) as caught:
        CALLS[way](decoder, bad)
    assert way != "decode" or f"got {low} to {high}" in str(caught.value)
    assert (decoder.stats.calls, decoder.stats.hits) == (calls, hits)
    assert torch.equal(decoder.decode(codes), expected)


def test_with_the_check_off_a_neighbours_row_is_read_as_eager_reads_it() -> None:
    module = tiny()
    codes = torch.randint(32, (1, 4, 5))
    codes[0, 1, 2] = 40  # row 8 of quantizer 2
    with GraphedDecoder(module, PLAN, check_codes=False) as decoder:
        decoder.warmup(strict=True)
        assert torch.equal(decoder.decode(codes), module(codes))
        codes[0, 1, 2], codes[0, 2, 2] = 8, 8
        assert torch.equal(decoder.decode(codes), module(codes))


def test_codes_beyond_the_lengths_may_be_anything(decoder: GraphedDecoder) -> None:
    codes = torch.randint(32, (2, 4, 8))
    given = codes.clone()
    given[0, :, 5:] = 2**40
    [first, second] = decoder.batched_chunked_decode(given, [5, 8], 25, 3)
    torch.testing.assert_close(first, decoder.module(codes[:1, :, :5])[0])
    torch.testing.assert_close(second, decoder.module(codes[1:])[0])


def test_a_bucket_that_no_machine_holds_is_that_buckets_error() -> None:
    module = tiny()
    with GraphedDecoder(module, BucketPlan(((1, 10**30), (10**13, 8), (1, 8)))) as decoder:
        report = decoder.warmup()
        assert [(row.bucket.shape, bool(row.error)) for row in report.failed] == [((1, 10**30), True), ((10**13, 8), True)]
        assert decoder.captured == BucketPlan(((1, 8),)).buckets
        codes = torch.randint(32, (1, 4, 8))
        assert torch.equal(decoder.decode(codes), module(codes))
