"""Each wrong thing that one can give gets an error before any work, and it says what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from omnigraph.compare import verify
from omnigraph.decoder import GraphedDecoder
from omnigraph.models import TinyDecoder, tiny
from omnigraph.shapes import BucketPlan, Shape

PLAN = BucketPlan.grid([1, 4], [5, 8])
EXPECTED = r"expected codes \[batch, 4, frames\], int64, on cpu"


def codes(*size: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


@pytest.fixture(scope="module")
def decoder() -> Iterator[GraphedDecoder]:
    with GraphedDecoder(tiny(), PLAN) as decoder:
        decoder.warmup()
        yield decoder


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "two dimensions": (codes(4, 5), ValueError, r"; got the shape \(4, 5\)"),
    "four dimensions": (codes(1, 1, 4, 5), ValueError, r"; got the shape \(1, 1, 4, 5\)"),
    "no dimension": (codes(), ValueError, r"; got the shape \(\)"),
    "three quantizers": (codes(1, 3, 5), ValueError, r"; got the shape \(1, 3, 5\)"),
    "one quantizer": (codes(1, 1, 5), ValueError, r"; got the shape \(1, 1, 5\)"),  # would broadcast into a static buffer
    "frames before quantizers": (codes(1, 5, 4), ValueError, r"; got the shape \(1, 5, 4\)"),
    "floats": (codes(1, 4, 5, dtype=torch.float32), TypeError, r"; got torch.float32: convert with .long\(\)"),
    "int32": (codes(1, 4, 5, dtype=torch.int32), TypeError, r"; got torch.int32: convert with .long\(\)"),
    "bool": (codes(1, 4, 5, dtype=torch.bool), TypeError, r"; got torch.bool: convert with .long\(\)"),
    "another device": (codes(1, 4, 5, device="meta"), ValueError, r"; got codes on meta: move them with .to\('cpu'\)"),
    "no frames": (codes(1, 4, 0), ValueError, r", at least one row and one frame; got the shape \(1, 4, 0\)"),
    "no rows": (codes(0, 4, 5), ValueError, r", at least one row and one frame; got the shape \(0, 4, 5\)"),
    "a list": ([[[0] * 5] * 4], TypeError, r"; got list"),
    "an array": (np.zeros((1, 4, 5), np.int64), TypeError, r"; got ndarray"),
    "None": (None, TypeError, r"; got NoneType"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("warm", [True, False])
def test_wrong_codes(decoder: GraphedDecoder, name: str, warm: bool) -> None:
    given, error, message = WRONG[name]
    used = decoder if warm else GraphedDecoder(tiny(), PLAN)
    with pytest.raises(error, match=EXPECTED + message):
        used.decode(given)
    assert used.stats.calls == 0


@pytest.mark.parametrize(("low", "high"), [(0, 32), (-1, 31), (-(2**40), 2**40)])
def test_codes_out_of_the_codebook(decoder: GraphedDecoder, low: int, high: int) -> None:
    given = codes(1, 4, 5)
    given[0, 2, 3], given[0, 0, 1] = high, low
    for used in (decoder, GraphedDecoder(tiny(), PLAN), GraphedDecoder(tiny(), PLAN, check_codes=True)):
        with pytest.raises(ValueError, match=f"codes go from 0 to 31; got {low} to {high}"):
            used.decode(given)
        assert used.stats.calls == 0


def test_codes_at_the_edges_of_the_codebook_are_right(decoder: GraphedDecoder) -> None:
    given = codes(1, 4, 5)
    given[0, :, 2] = 31
    assert torch.equal(decoder.decode(given), decoder.module(given))
    decoder.stats.reset()


def test_an_unchecked_code_reads_a_neighbour_as_eager_does() -> None:
    module = tiny()
    given = codes(1, 4, 5)
    given[0, 0, 0] = 32  # the first row of the next quantizer
    with GraphedDecoder(module, PLAN, check_codes=False) as decoder:
        decoder.warmup()
        assert torch.equal(decoder.decode(given), module(given))


def test_a_broken_call_breaks_nothing(decoder: GraphedDecoder) -> None:
    given = torch.randint(32, (1, 4, 5))
    expected = decoder.module(given)
    for wrong, error, _ in WRONG.values():
        with pytest.raises(error):
            decoder.decode(wrong)
        assert torch.equal(decoder.decode(given), expected)
    decoder.stats.reset()


def test_nobody_says_how_many_quantizers_or_codes() -> None:
    class Silent(nn.Module):
        def forward(self, codes: Tensor) -> Tensor:
            return codes.sum(1, keepdim=True).float()

    with pytest.raises(ValueError, match=r"neither Silent nor its config has num_quantizers: pass num_quantizers="):
        GraphedDecoder(Silent(), PLAN, codebook_size=32)
    with pytest.raises(ValueError, match=r"neither Silent nor its config has codebook_size: pass codebook_size="):
        GraphedDecoder(Silent(), PLAN, num_quantizers=4)
    for wrong in (0, -1, 2.0, True, "4"):
        with pytest.raises(ValueError, match="num_quantizers must be a positive integer, got"):
            GraphedDecoder(Silent(), PLAN, num_quantizers=wrong, codebook_size=32)
    decoder = GraphedDecoder(Silent(), PLAN, num_quantizers=4, codebook_size=32)
    assert (decoder.num_quantizers, decoder.codebook_size) == (4, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "always"}, "padding is 'auto', 'exact' or 'allow', not 'always'"),
        ({"padding": True}, "padding is 'auto', 'exact' or 'allow', not True"),
        ({"backend": "gpu"}, "backend is 'auto', 'cuda', 'cpu' or 'eager', not 'gpu'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphedDecoder(tiny(), PLAN, **options)


@pytest.mark.parametrize("plan", [None, [(1, 5)], {"plain": [(1, 5)]}, (1, 5)])
def test_what_is_no_plan(plan: Any) -> None:
    with pytest.raises(TypeError, match="plan must be a BucketPlan, got"):
        GraphedDecoder(tiny(), plan)
    with GraphedDecoder(tiny(), PLAN) as decoder:
        decoder.warmup()
        with pytest.raises(TypeError, match="plan must be a BucketPlan, got"):
            decoder.reconfigure(plan)
        assert (decoder.plan, decoder.captured) == (PLAN, PLAN.buckets)


def test_a_backend_that_the_device_lacks() -> None:
    decoder = GraphedDecoder(tiny(), PLAN, backend="cuda")
    with pytest.raises(ValueError, match=r"backend='cuda' does not run on cpu: pass backend='auto', or move the module"):
        decoder.warmup()
    with pytest.raises(ValueError, match="graphs run on cuda or cpu, not on meta; backend='eager' decodes there without graphs"):
        GraphedDecoder(tiny().to("meta"), PLAN).warmup()


class Wrong(TinyDecoder):
    """Breaks the form of its output for calls of some shape."""

    how = ""
    at: tuple[int, int] = (0, 0)

    def forward(self, codes: Tensor) -> Tensor:
        audio = super().forward(codes)
        if (codes.shape[0], codes.shape[2]) != self.at:
            return audio
        made: dict[str, Any] = {
            "rows": audio[:1],
            "short": audio[..., :-1],
            "long": torch.cat([audio, audio[..., :1]], -1),
            "flat": audio[:, 0],
            "tuple": (audio,),
            "none": None,
        }
        return made[self.how]


HOWS = {
    "rows": "the decoder returned batch size 1 for codes of batch size 4",
    "short": r"the decoder returned 63 samples for 8 frames; 8 \* 8 - 0 = 64 were expected",
    "long": r"the decoder returned 65 samples for 8 frames; 8 \* 8 - 0 = 64 were expected",
    "flat": r"must return audio \[batch, channels, samples\] for codes of 4x8; it returned a \(4, 64\) tensor",
    "tuple": r"must return audio \[batch, channels, samples\] for codes of 4x8; it returned tuple",
    "none": r"must return audio \[batch, channels, samples\] for codes of 4x8; it returned NoneType",
}


@pytest.mark.parametrize("how", HOWS)
def test_a_decoder_that_breaks_its_word(how: str) -> None:
    module = Wrong(tiny().config).eval().requires_grad_(False)
    module.how, module.at = how, (4, 8)
    with GraphedDecoder(module, PLAN) as decoder:
        [row] = decoder.warmup().failed  # found at the warm-up
        assert (row.bucket.shape, row.captured) == ((4, 8), None)
        assert "ValueError: the decoder" in row.error
        given = torch.zeros(4, 4, 8, dtype=torch.int64)
        assert decoder.served(Shape(4, 8)).kind == "split"
        assert decoder.decode(given).shape == (4, 1, 64)  # by other buckets, it is right
        decoder.enabled = False
        with pytest.raises(ValueError, match=HOWS[how]):
            decoder.decode(given)


def test_a_decoder_that_returns_another_batch_size_always() -> None:
    class OneRow(TinyDecoder):
        def forward(self, codes: Tensor) -> Tensor:
            return super().forward(codes)[:1]

    decoder = GraphedDecoder(OneRow(tiny().config).eval(), PLAN)
    with pytest.raises(ValueError, match=r"\[3, channels, samples\].*this one returned"):
        decoder.warmup()
    with pytest.raises(ValueError, match="the decoder returned batch size 1 for codes of batch size 4"):
        decoder.decode(codes(4, 4, 5))


def test_verify_of_nothing(decoder: GraphedDecoder) -> None:
    with pytest.raises(ValueError, match="verify needs at least one"):
        verify(decoder, [])
    with pytest.raises(ValueError, match="at least one row and one frame"):
        verify(decoder, [(1, 0)])


def test_a_module_on_the_cpu_and_codes_that_are_not_are_told_apart_after_a_move() -> None:
    module = tiny()
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup()
        module.to("meta")
        audio = decoder.decode(codes(1, 4, 5, device="meta"))  # eager, where the module is now
        assert audio.device.type == "meta"
        assert [str(reason) for reason in decoder.stats.fallbacks] == ["module_changed"]
