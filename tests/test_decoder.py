"""`GraphedDecoder`: every path gives what the module gives, and whatever cannot be promised goes eager under its name."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import shutil
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import omnigraph._owner as owner_module
from omnigraph import _warmup
from omnigraph._recorder import recording
from omnigraph.compare import Reference, compare
from omnigraph.decoder import GraphedDecoder
from omnigraph.graph import capture
from omnigraph.models import TinyDecoder, code2wav, tiny
from omnigraph.shapes import Bucket, BucketPlan, Shape
from omnigraph.stats import Fallback, Outcome

PLAN = BucketPlan.grid([1, 4], [2, 5, 8])


def codes_for(module: nn.Module, batch: int, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 31 * batch + frames)
    return torch.randint(module.config.codebook_size, (batch, module.config.num_quantizers, frames), generator=generator)


@torch.no_grad()
def eager(module: nn.Module, codes: Tensor) -> Tensor:
    return module(codes)


@contextmanager
def warm(module: nn.Module, plan: BucketPlan = PLAN, **options: Any) -> Iterator[GraphedDecoder]:
    with GraphedDecoder(module, plan, **options) as decoder:
        decoder.warmup()
        yield decoder


def last(decoder: GraphedDecoder) -> Outcome:
    """How the only call since the last look was served."""
    [((_, outcome), count)] = decoder.stats.counts().items()
    assert count == 1
    decoder.stats.reset()
    return outcome


def check(decoder: GraphedDecoder, codes: Tensor, reference: Reference | None = None) -> Outcome:
    """Decode, compare with eager by the design's rule, and say how the call was served."""
    audio, expected = decoder.decode(codes), eager(decoder.module, codes)
    outcome = last(decoder)
    shape = Shape(codes.shape[0], codes.shape[-1])
    row = compare(audio, expected, (reference or Reference(decoder.module))(codes), shape, outcome)
    assert row.ok, row.problem
    assert not audio.requires_grad
    return outcome


# Calls, and how the plan above serves them: the kind, and the buckets.
WAYS = {
    (1, 5): ("exact", ["1x5"]),
    (4, 8): ("exact", ["4x8"]),
    (1, 3): ("padded", ["1x5"]),
    (1, 6): ("padded", ["1x8"]),
    (3, 5): ("split", ["1x5"] * 3),
    (2, 8): ("split", ["1x8"] * 2),
    (5, 8): ("split", ["4x8", "1x8"]),
    (6, 7): ("split", ["4x8", "1x8", "1x8"]),
    (8, 1): ("split", ["4x2", "4x2"]),
    (1, 9): ("fallback", []),
}


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return code2wav("small")


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.parametrize("trim", [0, 1, 7, 20])
def test_every_path_gives_what_the_module_gives(trim: int, call: tuple[int, int]) -> None:
    module = tiny(upsample=8, trim=trim)
    with warm(module) as decoder:
        if call[1] * 8 <= trim:
            return  # no samples at all: the next test
        outcome = check(decoder, codes_for(module, *call))
    kind, buckets = WAYS[call]
    assert (outcome.kind, [str(b) for b in outcome.buckets]) == (kind, buckets)
    assert outcome.reason == (Fallback.NO_BUCKET if kind == "fallback" else None)
    done = sum(b.shape.batch * b.shape.frames for b in outcome.buckets)
    assert outcome.padding == (done - call[0] * call[1] if buckets else 0)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_calls_too_short_for_a_sample_give_none(frames: int) -> None:
    module = tiny(upsample=8, trim=20)
    with warm(module) as decoder:
        audio = decoder.decode(codes_for(module, 1, frames))
        assert audio.shape == eager(module, codes_for(module, 1, frames)).shape == (1, 1, max(frames * 8 - 20, 0))


@pytest.mark.parametrize("call", [(3, 5), (3, 4), (2, 8), (4, 1), (7, 7)])
def test_rows_are_padded_where_the_plan_has_large_batches_alone(call: tuple[int, int]) -> None:
    module = tiny(trim=3)
    with warm(module, BucketPlan.grid([4], [5, 8])) as decoder:
        waste = decoder.served(Shape(*call)).reason
        outcome = check(decoder, codes_for(module, *call))
    assert waste == outcome.reason
    assert outcome.kind == {(4, 1): "fallback", (7, 7): "split"}.get(call, "padded")


@pytest.mark.parametrize(
    "knobs", [{"dtype": torch.bfloat16}, {"channels": 2}, {"num_quantizers": 1}, {"upsample": 1, "receptive_field": 0}]
)
def test_other_decoders(knobs: dict[str, Any]) -> None:
    module = tiny(**knobs)
    with warm(module) as decoder:
        kinds = {call: check(decoder, codes_for(module, *call)).kind for call in WAYS}
    assert kinds == {call: kind for call, (kind, _) in WAYS.items()}


def test_code2wav_on_every_path(small: nn.Module) -> None:
    reference = Reference(small)
    kinds = Counter()
    with warm(small, BucketPlan.grid([1, 3], [4, 9], extra=[(4, 9)])) as decoder:
        assert (decoder.facts.upsample, decoder.facts.trim) == (1920, 555)
        for call in [(1, 4), (1, 6), (1, 7), (2, 9), (3, 8), (5, 4), (7, 9), (1, 10), (2, 1)]:
            outcome = check(decoder, codes_for(small, *call), reference)
            kinds[outcome.kind] += 1
            assert eager(small, codes_for(small, *call)).shape[-1] == call[1] * 1920 - 555
    assert set(kinds) == {"exact", "padded", "split", "fallback"}


def test_codes_need_not_be_contiguous() -> None:
    module = tiny()
    with warm(module) as decoder:
        codes = codes_for(module, 4, 8)
        turned = codes.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        assert torch.equal(decoder.decode(turned), eager(module, codes))
        assert torch.equal(decoder.decode(codes[:1, :, :1].expand(1, 4, 5)), eager(module, codes[:1, :, :1].expand(1, 4, 5)))


def test_results_are_the_callers_own() -> None:
    module = tiny()
    with warm(module) as decoder:
        inputs = [codes_for(module, *call, seed) for seed in range(2) for call in WAYS]
        results = [decoder.decode(codes) for codes in inputs]
        kept = [audio.clone() for audio in results]
        for codes in inputs:
            decoder.decode(codes.flip(0)).fill_(9)
        assert all(map(torch.equal, results, kept))
        memory = {audio.untyped_storage().data_ptr() for audio in results}
        assert len(memory) == len(results)
    assert all(map(torch.equal, results, kept))  # closing takes nothing back


def test_padding_is_zeros_whatever_was_there() -> None:
    module = tiny()
    with warm(module, BucketPlan.grid([4], [8])) as decoder:
        [graph] = decoder._live.graphs.values()
        decoder.decode(codes_for(module, 4, 8))
        codes = codes_for(module, 3, 6)
        decoder.decode(codes)
        there = graph.inputs[0]
        assert torch.equal(there[:3, :, :6], codes)
        assert there[3:].count_nonzero() == there[:, :, 6:].count_nonzero() == 0


def test_static_buffers_may_hold_anything_before_a_call() -> None:
    module = tiny(trim=3)
    reference = Reference(module)
    with warm(module) as decoder:
        for call in WAYS:
            decoder._live.poison(decoder.codebook_size - 1)
            check(decoder, codes_for(module, *call), reference)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("capture_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_no_gradients_whatever_the_mode_and_the_weights(capture_mode: Any, mode: Any) -> None:
    module = tiny().requires_grad_(True)
    with capture_mode(), GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup()
        for call in WAYS:
            with mode():
                codes = codes_for(module, *call)
                audio = decoder.decode(codes)
                assert not audio.requires_grad
                expected = eager(module, codes)
            torch.testing.assert_close(audio, expected, rtol=1e-4, atol=1e-6)
            if WAYS[call][0] == "exact":
                assert torch.equal(audio, expected)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        module = tiny()
    with warm(module) as decoder:
        assert {check(decoder, codes_for(module, *call)).kind for call in WAYS} == {"exact", "padded", "split", "fallback"}


def test_a_decoder_that_looks_ahead_is_never_padded_in_frames() -> None:
    module = tiny(lookahead=2)
    with warm(module, BucketPlan.grid([2, 4], [5, 8])) as decoder:
        assert not decoder.facts.causal
        served = {call: check(decoder, codes_for(module, *call)) for call in [(2, 5), (4, 8), (2, 4), (1, 5), (3, 8), (6, 5), (1, 9)]}
    assert {call: outcome.kind for call, outcome in served.items()} == {
        (2, 5): "exact",
        (4, 8): "exact",
        (2, 4): "fallback",
        (1, 5): "padded",  # in rows: they do not see each other
        (3, 8): "padded",
        (6, 5): "split",
        (1, 9): "fallback",
    }
    assert served[2, 4].reason == Fallback.PADDING_UNSAFE
    assert served[1, 9].reason == Fallback.NO_BUCKET


def test_a_decoder_that_mixes_rows_is_never_padded_or_split_in_rows() -> None:
    module = tiny(mix_rows=True)
    with warm(module) as decoder:
        served = {call: check(decoder, codes_for(module, *call)) for call in [(4, 5), (4, 4), (3, 5), (5, 8), (1, 8)]}
    assert {call: (o.kind, o.reason) for call, o in served.items()} == {
        (4, 5): ("exact", None),
        (4, 4): ("padded", None),
        (3, 5): ("fallback", Fallback.PADDING_UNSAFE),
        (5, 8): ("fallback", Fallback.PADDING_UNSAFE),
        (1, 8): ("exact", None),
    }


def test_padding_exact_never_pads_and_allow_insists() -> None:
    module = tiny()
    with warm(module, padding="exact") as decoder:
        served = {call: check(decoder, codes_for(module, *call)) for call in [(1, 5), (1, 4), (5, 8)]}
    assert [(o.kind, o.reason) for o in served.values()] == [("exact", None), ("fallback", Fallback.NO_BUCKET), ("split", None)]
    with warm(module, padding="allow") as decoder:
        assert check(decoder, codes_for(module, 1, 4)).kind == "padded"
    for knobs in ({"lookahead": 1}, {"mix_rows": True}):
        decoder = GraphedDecoder(tiny(**knobs), PLAN, padding="allow")
        with pytest.raises(ValueError, match="padding would change samples"):
            decoder.warmup()
        assert decoder.captured == ()
        assert check(decoder, codes_for(module, 1, 5)).reason == Fallback.NOT_WARMED_UP


def test_too_much_padding_goes_eager() -> None:
    module = tiny()
    with warm(module, BucketPlan.grid([1], [8])) as decoder:
        assert check(decoder, codes_for(module, 1, 4)).kind == "padded"
        assert check(decoder, codes_for(module, 1, 3)).reason == Fallback.TOO_MUCH_PADDING


def test_costs_decide_where_they_are_given() -> None:
    module = tiny()
    prices = {"eager": lambda s: 10.0, "plain": lambda s: 4.0 if s.frames == 8 else 9.0}
    with warm(module, cost=lambda shape, how: prices[how](shape)) as decoder:
        outcome = check(decoder, codes_for(module, 1, 2))
        assert (outcome.kind, outcome.buckets) == ("padded", (Bucket(Shape(1, 8)),))
        outcome = check(decoder, codes_for(module, 5, 2))
        assert (outcome.kind, outcome.buckets) == ("split", (Bucket(Shape(4, 8)), Bucket(Shape(1, 8))))
    prices["eager"] = lambda s: 1.0
    with warm(module, cost=lambda shape, how: prices[how](shape)) as decoder:
        assert check(decoder, codes_for(module, 1, 8)).reason == Fallback.EAGER_IS_FASTER


def test_served_says_what_decode_does() -> None:
    module = tiny()
    with warm(module) as decoder:
        for call in WAYS:
            said = decoder.served(Shape(*call))
            assert decoder.stats.calls == 0
            assert check(decoder, codes_for(module, *call)) == said
        decoder.enabled = False
        assert decoder.served(Shape(1, 5)).reason == Fallback.DISABLED
    assert GraphedDecoder(module, PLAN).served(Shape(1, 5)).reason == Fallback.NOT_WARMED_UP


def test_disabled_and_not_warmed_up_are_counted() -> None:
    module = tiny()
    codes = codes_for(module, 1, 5)
    decoder = GraphedDecoder(module, PLAN)
    assert check(decoder, codes).reason == Fallback.NOT_WARMED_UP
    assert decoder.facts.causal  # probed now
    decoder.warmup()
    decoder.enabled = False
    assert check(decoder, codes).reason == Fallback.DISABLED
    decoder.enabled = True
    assert check(decoder, codes).kind == "exact"
    off = GraphedDecoder(module, PLAN, enabled=False)
    off.warmup()
    assert check(off, codes).reason == Fallback.DISABLED


def test_backend_eager_makes_no_graphs_and_says_so() -> None:
    module = tiny()
    decoder = GraphedDecoder(module, PLAN, backend="eager")
    report = decoder.warmup()
    assert (report.backend, report.rows) == ("eager", ())
    assert "every call goes eager" in report.note
    assert check(decoder, codes_for(module, 1, 5)).reason == Fallback.DISABLED
    assert "every call goes eager" in decoder.reconfigure(PLAN).note


def test_warm_up_reports_each_bucket_and_does_nothing_the_second_time() -> None:
    module = tiny().train()
    steps: list[tuple[str, int, int]] = []
    with GraphedDecoder(module, PLAN) as decoder:
        report = decoder.warmup(strict=True, progress=lambda *step: steps.append(step))
        assert not module.training
        assert [row.bucket for row in report.rows] == list(PLAN.buckets)
        assert report.captured == PLAN.buckets == decoder.captured
        assert (report.failed, report.backend, report.note) == ((), "cpu", "")
        assert report.nbytes == decoder.nbytes > 0
        assert all(row.seconds > 0 and row.nbytes > 0 for row in report.rows)
        assert sum(row.nbytes for row in report.rows) >= report.nbytes
        assert [done for _, done, _ in steps] == list(range(len(steps)))
        assert {of for _, _, of in steps} == {len(steps) - 1}
        assert str(report).startswith("6 of 6 buckets captured on cpu in ")
        frame = report.to_frame()
        assert list(frame["bucket"]) == [str(b) for b in PLAN.buckets]
        assert frame["error"].eq("").all()
        again = decoder.warmup(strict=True)
        assert (again.rows, again.note) == ((), "already warmed up: nothing was done")
        assert repr(decoder) == "<GraphedDecoder of TinyDecoder: 6 of 6 buckets captured>"


class Counted(TinyDecoder):
    """Counts its calls by shape."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.called: Counter[tuple[int, int]] = Counter()

    def forward(self, codes: Tensor) -> Tensor:
        self.called[codes.shape[0], codes.shape[-1]] += 1
        return super().forward(codes)


@pytest.fixture
def counted() -> Counted:
    return Counted(tiny().config).eval().requires_grad_(False)


def test_equal_buckets_are_captured_once(counted: Counted) -> None:
    with warm(counted) as decoder:
        assert {(b, f) for b in (1, 4) for f in (2, 5, 8)} < set(counted.called)
        counted.called.clear()
        decoder.warmup()
        for call in WAYS:
            if WAYS[call][0] != "fallback":
                decoder.decode(codes_for(counted, *call))
        graphs = dict(decoder._live.graphs)
        report = decoder.reconfigure(BucketPlan.grid([4, 1], [8, 5, 2]))
        assert (report.rows, report.note.split(";")[0]) == ((), "6 kept, 0 dropped")
        assert not counted.called  # replays call nothing either
        report = decoder.reconfigure(BucketPlan.grid([1, 4], [2, 5, 8], extra=[(2, 8)]))
        assert [str(row.bucket) for row in report.rows] == ["2x8"]
        assert set(counted.called) == {(2, 8)}
        assert all(decoder._live.graphs[bucket] is graph for bucket, graph in graphs.items())
        counted.called.clear()
        decoder.reconfigure(PLAN)  # one of seven, and not the largest: dropped at once, the rest stays
        assert decoder.captured == PLAN.buckets
        assert not counted.called
        decoder.recapture()
        assert {(b, f) for b in (1, 4) for f in (2, 5, 8)} < set(counted.called)


def test_giving_up_a_large_share_moves_the_rest_to_a_fresh_pool(counted: Counted) -> None:
    with warm(counted) as decoder:
        pool, held = decoder._live.pool, decoder.nbytes
        counted.called.clear()
        report = decoder.reconfigure(BucketPlan.grid([1], [2, 5]))
        assert decoder._live.pool is not pool
        assert report.nbytes == decoder.nbytes < held
        assert report.freed == held - decoder.nbytes
        assert {(1, 2), (1, 5)} < set(counted.called)
        assert not {(1, 8), (4, 2), (4, 5), (4, 8)} & set(counted.called)
        assert {call: check(decoder, codes_for(counted, *call)).kind for call in [(1, 5), (1, 4), (2, 2)]} == {
            (1, 5): "exact",
            (1, 4): "padded",
            (2, 2): "split",
        }
        assert check(decoder, codes_for(counted, 1, 8)).reason == Fallback.NO_BUCKET


def test_routes_are_found_anew_after_a_reconfiguration() -> None:
    module = tiny()
    with warm(module, BucketPlan.grid([1], [8])) as decoder:
        assert check(decoder, codes_for(module, 1, 5)).buckets == (Bucket(Shape(1, 8)),)
        decoder.reconfigure(BucketPlan.grid([1], [8, 5]))
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        decoder.reconfigure(BucketPlan.grid([1], [8, 6]))
        assert check(decoder, codes_for(module, 1, 5)).buckets == (Bucket(Shape(1, 6)),)
        assert decoder.plan == BucketPlan.grid([1], [8, 6])


def test_reconfigure_warms_up_what_was_not() -> None:
    module = tiny()
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.reconfigure(BucketPlan.grid([2], [3]))
        assert [str(b) for b in decoder.captured] == ["2x3"]
        assert check(decoder, codes_for(module, 2, 3)).kind == "exact"


@pytest.mark.parametrize("plan", [BucketPlan.grid([1, 2], [2, 5, 8, 9]), BucketPlan.grid([1], [3, 4])], ids=["grow", "shrink"])
def test_an_interrupted_reconfiguration_changes_nothing(plan: BucketPlan) -> None:
    module = tiny()
    with warm(module, BucketPlan.grid([1], [2, 5, 8])) as decoder:
        before = decoder.plan, decoder.captured, dict(decoder._live.graphs)
        for stop in itertools.count():

            def progress(what: str, done: int, of: int, stop: int = stop) -> None:
                if done == stop:
                    raise KeyboardInterrupt

            try:
                decoder.reconfigure(plan, progress=progress)
            except KeyboardInterrupt:
                assert (decoder.plan, decoder.captured, decoder._live.graphs) == before
                assert [check(decoder, codes_for(module, 1, f)).kind for f in (5, 4, 9)] == ["exact", "padded", "fallback"]
                continue
            break
        assert stop > 2
        assert decoder.captured == plan.buckets
        assert [check(decoder, codes_for(module, *b.shape)).kind for b in plan.buckets] == ["exact"] * len(plan)


def test_an_interrupted_warm_up_can_be_done_again() -> None:
    module = tiny()

    def progress(what: str, done: int, of: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with GraphedDecoder(module, PLAN) as decoder:
        with pytest.raises(KeyboardInterrupt):
            decoder.warmup(progress=progress)
        assert check(decoder, codes_for(module, 1, 5)).reason == Fallback.NOT_WARMED_UP
        assert decoder.warmup(strict=True).captured == PLAN.buckets


def test_a_failed_reconfiguration_keeps_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny()
    with warm(module) as decoder:
        module.broken = True
        with pytest.raises(RuntimeError, match="the tiny decoder is broken"):
            decoder.recapture()
        module.broken = False
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        assert decoder.captured == PLAN.buckets


class BreaksAt(TinyDecoder):
    """Fails for some shapes, only when they are captured, or at any time."""

    bad: tuple[int, ...] = ()
    always = False

    def forward(self, codes: Tensor) -> Tensor:
        if codes.shape[-1] in self.bad and (self.always or recording()):
            raise RuntimeError(f"no {codes.shape[-1]} frames")
        return super().forward(codes)


@pytest.mark.parametrize("always", [True, False])
def test_a_bucket_that_fails_leaves_the_others(always: bool) -> None:
    module = BreaksAt(tiny().config).eval().requires_grad_(False)
    module.bad, module.always = (5,), always
    with GraphedDecoder(module, PLAN) as decoder:
        report = decoder.warmup()
        assert [str(row.bucket) for row in report.failed] == ["4x5", "1x5"]
        assert all("RuntimeError: no 5 frames" in row.error and row.captured is None for row in report.failed)
        assert [str(b) for b in decoder.captured] == ["4x8", "1x8", "4x2", "1x2"]
        assert "4x5: eager: RuntimeError: no 5 frames" in str(report)
        assert check(decoder, codes_for(module, 4, 8)).kind == "exact"
        assert check(decoder, codes_for(module, 1, 4)).buckets == (Bucket(Shape(1, 8)),)
    text = r"strict=True\): 4 of 6 buckets captured(.|\n)*1x5: eager: RuntimeError: no 5 frames"
    with GraphedDecoder(module, PLAN) as decoder, pytest.raises(RuntimeError, match=text):
        decoder.warmup(strict=True)


def test_a_host_read_of_the_codes_means_no_graphs_and_a_report_that_says_so() -> None:
    module = tiny(host_read=True)
    with GraphedDecoder(module, PLAN) as decoder:
        report = decoder.warmup()
        assert report.captured == decoder.captured == ()
        assert all("HostRead" in row.error and "depends on the inputs" in row.error for row in report.rows)
        assert report.note == "no bucket was captured: every call goes eager"
        assert check(decoder, codes_for(module, 1, 5)).reason == Fallback.NO_BUCKET


@pytest.mark.parametrize(("knob", "why"), [("counter", "keeps state"), ("noise", "other outputs")])
def test_state_and_randomness_mean_no_graphs(knob: str, why: str) -> None:
    module = tiny(**{knob: True})
    with GraphedDecoder(module, PLAN) as decoder:
        report = decoder.warmup()
        assert report.rows == decoder.captured == ()
        assert why in report.note
        codes = codes_for(module, 1, 5)
        count = module.count.clone() if knob == "counter" else None
        torch.manual_seed(3)
        first, second = decoder.decode(codes), decoder.decode(codes)
        assert decoder.stats.fallbacks == {Fallback.UNSAFE_MODULE: 2}
        if count is not None:
            module.count.copy_(count)
        torch.manual_seed(3)
        assert torch.equal(first, eager(module, codes))
        assert torch.equal(second, eager(module, codes))
        assert not torch.equal(first, second)
        assert why in decoder.reconfigure(BucketPlan.grid([1], [3])).note


def test_a_module_that_raises_once_can_be_warmed_up_afterwards() -> None:
    module = tiny(raise_once=True)
    with GraphedDecoder(module, PLAN) as decoder:
        with pytest.raises(RuntimeError, match="raises at this call"):
            decoder.warmup()
        assert check(decoder, codes_for(module, 1, 5)).reason == Fallback.NOT_WARMED_UP
        assert decoder.warmup(strict=True).captured == PLAN.buckets
        module.raise_in = 1
        with pytest.raises(RuntimeError, match="raises at this call"):
            decoder.decode(codes_for(module, 1, 9))  # eager: the error is the caller's
        assert decoder.stats.calls == 0
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"


def test_an_error_in_a_replay_is_the_callers_and_the_next_call_works() -> None:
    module = tiny()
    with warm(module, check_codes=False) as decoder:
        with pytest.raises(IndexError):
            decoder.decode(torch.full((1, 4, 5), 10_000))
        with pytest.raises(IndexError):
            decoder.decode(torch.full((5, 4, 5), 10_000))
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        with pytest.raises(IndexError):
            decoder.decode(torch.full((1, 4, 5), 10_000))  # on the path of shapes that were seen before
        assert decoder.stats.calls == 0
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        assert check(decoder, codes_for(module, 1, 4)).kind == "padded"


def rebind(module: nn.Module) -> None:
    module.context.weight = nn.Parameter(module.context.weight * 2, requires_grad=False)


def data(module: nn.Module) -> None:
    module.context.weight.data = module.context.weight.data * 2


def move(module: nn.Module) -> None:
    module.double()


def assign(module: nn.Module) -> None:
    module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()}, assign=True)


def submodule(module: nn.Module) -> None:
    module.upsample = tiny(seed=1).upsample


def buffer(module: nn.Module) -> None:
    module.offset = module.offset.clone()


def hook(module: nn.Module) -> None:
    module.context.register_forward_hook(lambda _, inputs, output: output * 2)


def parametrization(module: nn.Module) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    parametrize.register_parametrization(module.context, "weight", Twice())


def method(module: nn.Module) -> None:
    module.upsample.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, module.upsample)


CHANGES = [rebind, data, move, assign, submodule, buffer, hook, parametrization, method]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_goes_eager_until_it_is_captured_again(change: Callable[[nn.Module], None]) -> None:
    module = tiny()
    with warm(module) as decoder:
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        change(module)
        for call in WAYS:
            assert check(decoder, codes_for(module, *call)).reason == Fallback.MODULE_CHANGED
        decoder.recapture()
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        change(module)
        assert decoder.reconfigure(BucketPlan.grid([1], [5, 8])).captured == BucketPlan.grid([1], [5, 8]).buckets
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"


def test_training_mode_goes_eager() -> None:
    module = nn.Sequential(tiny(), nn.Dropout(0.5))
    module.config = module[0].config
    with warm(module) as decoder:
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        module.train()
        torch.manual_seed(0)
        audio = decoder.decode(codes_for(module, 1, 5))
        torch.manual_seed(0)
        assert torch.equal(audio, eager(module, codes_for(module, 1, 5)))
        assert last(decoder).reason == Fallback.MODULE_CHANGED
        module.eval()
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"


def test_a_disabled_decoder_is_not_reconfigured_onto_stale_graphs() -> None:
    module = tiny()
    with warm(module) as decoder:
        decoder.enabled = False
        rebind(module)
        decoder.reconfigure(BucketPlan.grid([1, 4], [2, 5, 8, 9]))
        decoder.enabled = True
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"
        assert check(decoder, codes_for(module, 1, 9)).kind == "exact"
        decoder.enabled = False
        with torch.autocast("cpu", torch.bfloat16):
            decoder.reconfigure(PLAN)
        decoder.enabled = True
        assert check(decoder, codes_for(module, 1, 5)).reason == Fallback.ENVIRONMENT_CHANGED


def test_updates_in_place_stay_valid_and_are_seen() -> None:
    module, other = tiny(), tiny(seed=1)
    with warm(module) as decoder:
        codes = codes_for(module, 1, 5)
        before = decoder.decode(codes)
        decoder.stats.reset()
        module.load_state_dict(other.state_dict())
        assert check(decoder, codes).kind == "exact"
        assert torch.equal(decoder.decode(codes), eager(other, codes))
        assert not torch.equal(decoder.decode(codes), before)
        decoder.stats.reset()
        with torch.no_grad():
            module.context.weight.mul_(0.5)
        for call in WAYS:
            assert check(decoder, codes_for(module, *call)).kind == WAYS[call][0]


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


ENVIRONMENTS = [lambda: torch.autocast("cpu", torch.bfloat16), default_dtype, deterministic, precision]


@pytest.mark.parametrize("other", ENVIRONMENTS, ids=["autocast", "dtype", "deterministic", "precision"])
def test_another_environment_goes_eager(other: Any) -> None:
    module = tiny()
    with warm(module) as decoder:
        for call in [(1, 5), (1, 4), (5, 8)]:
            codes = codes_for(module, *call)
            with other():
                audio, expected = decoder.decode(codes), eager(module, codes)
            assert last(decoder).reason == Fallback.ENVIRONMENT_CHANGED
            assert audio.dtype == expected.dtype
            assert torch.equal(audio, expected)
            check(decoder, codes)
        with other():
            decoder.reconfigure(PLAN)  # captured anew
            codes = codes_for(module, 1, 5)
            assert torch.equal(decoder.decode(codes), eager(module, codes))
            assert last(decoder).kind == "exact"
        assert check(decoder, codes).reason == Fallback.ENVIRONMENT_CHANGED


def test_another_default_device_changes_nothing() -> None:
    module = tiny()
    codes = codes_for(module, 1, 4)
    with torch.device("meta"), GraphedDecoder(module, PLAN) as decoder:
        assert decoder.warmup(strict=True).captured == PLAN.buckets
        audio = decoder.decode(codes)
        assert last(decoder).kind == "padded"
    torch.testing.assert_close(audio, eager(module, codes))


def test_within_a_capture_of_somebody_else_a_call_goes_eager() -> None:
    module = tiny()
    with warm(module) as decoder:
        graph = capture(lambda codes: decoder.decode(codes) * 2, codes_for(module, 1, 4), warmup=0)
        assert set(decoder.stats.fallbacks) == {Fallback.OUTER_CAPTURE}
        assert decoder.stats.hits == 0
        decoder.stats.reset()
        for seed in range(3):
            codes = codes_for(module, 1, 4, seed)
            assert torch.equal(graph.replay(codes), eager(module, codes) * 2)
        capture(lambda codes: decoder.decode(codes), codes_for(module, 1, 4))  # the warm-up call before it is an ordinary one
        assert decoder.stats.kinds["padded"] == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_while_torch_compile_traces_a_call_goes_eager() -> None:
    module = tiny()
    codes = codes_for(module, 1, 5)
    with warm(module) as decoder:
        torch._dynamo.reset()
        compiled = torch.compile(lambda codes: decoder.decode(codes) * 2, backend="eager")
        for seed in range(2):
            codes = codes_for(module, 1, 5, seed)
            assert torch.equal(compiled(codes), eager(module, codes) * 2)
        assert decoder.stats.fallbacks == {Fallback.COMPILING: 2}


def test_a_closed_decoder_refuses_calls_and_holds_nothing() -> None:
    module = tiny()
    gc.collect()
    gc.disable()
    try:
        with GraphedDecoder(module, PLAN) as decoder:
            decoder.warmup()
            for call in WAYS:
                decoder.decode(codes_for(module, *call))
            live = decoder._live
            refs = [weakref.ref(live.pool)] + [weakref.ref(graph) for graph in live.graphs.values()]
            refs += [weakref.ref(graph.outputs) for graph in live.graphs.values()]
            del live
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
    assert (decoder.captured, decoder.nbytes) == ((), 0)
    assert decoder.stats.calls == len(WAYS)
    decoder.close()
    for call in (
        lambda: decoder.decode(codes_for(module, 1, 5)),
        decoder.warmup,
        lambda: decoder.reconfigure(PLAN),
        decoder.recapture,
    ):
        with pytest.raises(RuntimeError, match="this decoder is closed: make a new GraphedDecoder"):
            call()
    assert repr(decoder) == "<GraphedDecoder of TinyDecoder: closed>"


def test_a_dropped_decoder_is_freed_without_the_collector() -> None:
    module = tiny()
    gc.collect()
    gc.disable()
    try:
        decoder = GraphedDecoder(module, PLAN)
        decoder.warmup()
        decoder.decode(codes_for(module, 1, 4))
        decoder.reconfigure(BucketPlan.grid([1], [5]))
        refs = [weakref.ref(decoder), weakref.ref(decoder._live.pool)]
        del decoder
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_threads_share_a_decoder_while_it_is_reconfigured() -> None:
    module = tiny(trim=3)
    calls = [(b, f) for b in (1, 2, 3, 4, 5) for f in (1, 2, 4, 5, 7, 8, 9)]
    inputs = {(call, seed): codes_for(module, *call, seed) for call in calls for seed in range(3)}
    expected = {key: eager(module, codes) for key, codes in inputs.items()}
    plans = [PLAN, BucketPlan.grid([1, 4], [2, 5, 8, 9]), BucketPlan.grid([1], [5]), BucketPlan.grid([2], [4, 9], extra=[(1, 5)])]
    wrong: list[object] = []
    with warm(module) as decoder:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(100):
                    key = rng.choice(calls), rng.randrange(3)
                    audio = decoder.decode(inputs[key])
                    if audio.shape != expected[key].shape or not torch.allclose(audio, expected[key], rtol=1e-4, atol=1e-6):
                        wrong.append(key)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for plan in itertools.cycle(plans):
            decoder.reconfigure(plan)
            assert set(decoder.captured) == set(plan.buckets)
            if not any(thread.is_alive() for thread in threads):
                break
        for thread in threads:
            thread.join()
        assert wrong == []
        assert decoder.stats.calls == 400
        assert decoder.stats.hits > 100


def test_a_route_is_not_made_of_graphs_that_were_closed_meanwhile() -> None:
    module = tiny()
    with warm(module) as decoder:
        old = decoder._live
        decoder.reconfigure(BucketPlan.grid([1], [8]))
        assert old.way((4, module.config.num_quantizers, 8), None, True, decoder.stats) is None
        assert old.ways == {}
        assert check(decoder, codes_for(module, 1, 8)).kind == "exact"


def test_a_profile_of_another_model_says_so_at_the_warm_up() -> None:
    from omnigraph.profile import Profile

    profile = Profile.measure(tiny(seed=1), [(1, 4)], repeats=5, seconds_each=0.01, progress=False)
    with GraphedDecoder(tiny(), BucketPlan(((1, 4),)), cost=profile.cost) as decoder:
        decoder.warmup(strict=True)
    with (
        GraphedDecoder(tiny(dtype=torch.bfloat16), BucketPlan(((1, 4),)), cost=profile.cost) as decoder,
        pytest.warns(UserWarning, match="the cost was made for dtype 'float32', here it is 'bfloat16'"),
    ):
        decoder.warmup(strict=True)


def test_latency_is_kept_when_asked_for() -> None:
    module = tiny()
    with warm(module, latency=True) as decoder:
        decoder.decode(codes_for(module, 1, 5))
        decoder.decode(codes_for(module, 1, 9))
        assert [len(times) for times in decoder.stats.times().values()] == [1, 1]
        assert all(0 < ms < 10_000 for times in decoder.stats.times().values() for ms in times)
    with warm(module) as decoder:
        decoder.decode(codes_for(module, 1, 5))
        assert decoder.stats.times() == {}


def test_log_line(caplog: pytest.LogCaptureFixture) -> None:
    module = tiny()
    with warm(module) as decoder, caplog.at_level(logging.INFO, "omnigraph"):
        decoder.stats.log_every = 2
        for frames in (5, 5, 9, 5):
            decoder.decode(codes_for(module, 1, frames))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["2 calls, hit rate 1.00", "4 calls, hit rate 0.75"]


def test_a_plan_made_for_another_model_says_so() -> None:
    module = tiny()
    plan = BucketPlan.grid([1], [5])
    plan = BucketPlan(plan.plain, made_for={"model": "Other", "dtype": "float32"})
    with (
        GraphedDecoder(module, plan) as decoder,
        pytest.warns(UserWarning, match="the plan was made for model 'Other', here it is 'TinyDecoder'"),
    ):
        decoder.warmup()


def test_the_callers_random_numbers_are_left_alone() -> None:
    module = tiny()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with warm(module) as decoder:
        decoder.decode(codes_for(module, 1, 5))
        assert torch.equal(torch.rand(3), expected)


# Compiled buckets. Real tracing, but the code that it finds is run as it is: a compiler takes seconds a shape.
@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(owner_module, "compile_module", lambda module: torch.compile(module, dynamic=False, backend="eager"))


def test_compiled_buckets_serve_before_plain_ones(traced: None) -> None:
    module = tiny(trim=3)
    plan = BucketPlan.grid([1, 4], [2, 5, 8], compiled=[(1, 5), (4, 8)], extra=[(2, 5)])
    both = BucketPlan((*plan.plain, Shape(1, 5)), plan.compiled)
    with GraphedDecoder(module, both) as decoder:
        report = decoder.warmup(strict=True)
        assert report.compile_seconds > 0
        assert Bucket(Shape(1, 5), True) in decoder.captured
        assert Bucket(Shape(1, 5)) in decoder.captured
        for call, buckets in {(1, 5): ["1x5 compiled"], (1, 4): ["1x5 compiled"], (4, 8): ["4x8 compiled"], (2, 5): ["2x5"]}.items():
            decoder._live.poison(0)
            outcome = check(decoder, codes_for(module, *call))
            assert [str(b) for b in outcome.buckets] == buckets
        assert check(decoder, codes_for(module, 5, 8)).compiled


def test_a_call_compiles_nothing_that_the_warm_up_has_compiled(traced: None) -> None:
    torch._dynamo.reset()
    module, seen = tiny(), torch._dynamo.utils.counters["stats"]
    with GraphedDecoder(module, BucketPlan.grid([1], [2], compiled=[(1, 5)])) as decoder:
        before = seen["unique_graphs"]
        decoder.warmup(strict=True)
        after = seen["unique_graphs"]
        assert after > before
        for frames in (5, 4, 5):
            decoder.decode(codes_for(module, 1, frames))
        assert seen["unique_graphs"] == after


def test_a_compile_failure_falls_back_to_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if any(x.shape[-1] == 5 for x in inputs if x.dtype == torch.int64 and x.dim() == 3):
            raise NotImplementedError("no compiler for 5 frames")
        return graph.forward

    monkeypatch.setattr(owner_module, "compile_module", lambda module: torch.compile(module, dynamic=False, backend=backend))
    torch._dynamo.reset()
    module = tiny()
    with GraphedDecoder(module, BucketPlan.grid([1], [2, 5], compiled=[(1, 2), (1, 5)])) as decoder:
        report = decoder.warmup()
        [row] = report.failed
        assert (row.bucket, row.captured) == (Bucket(Shape(1, 5), True), Bucket(Shape(1, 5)))
        assert "no compiler for 5 frames" in row.error
        assert "1x5 compiled: captured as 1x5: " in str(report)
        outcome = check(decoder, codes_for(module, 1, 5))
        assert (outcome.kind, outcome.compiled) == ("exact", False)
        assert check(decoder, codes_for(module, 1, 2)).compiled
    with GraphedDecoder(module, BucketPlan.grid([1], [5], compiled=[(1, 5)])) as decoder, pytest.raises(RuntimeError, match="no compiler"):
        decoder.warmup(strict=True)


def test_compiled_code_that_cannot_be_captured_falls_back_to_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_module(module: nn.Module) -> Callable[[Tensor], Tensor]:
        calls = itertools.count()

        def compiled(codes: Tensor) -> Tensor:
            if next(calls) >= 3:  # the warm-up calls work
                raise RuntimeError("not under capture")
            return module(codes)

        return compiled

    monkeypatch.setattr(owner_module, "compile_module", compile_module)
    module = tiny()
    with GraphedDecoder(module, BucketPlan.grid([1], [5], compiled=[(1, 5)])) as decoder:
        [row] = decoder.warmup().failed
        assert row.captured == Bucket(Shape(1, 5))
        assert "not under capture" in row.error
        assert check(decoder, codes_for(module, 1, 5)).kind == "exact"


def test_the_recompile_limit_is_an_error_not_a_silent_eager(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warmup, "RECOMPILE_LIMIT", 2)
    module = tiny()
    shapes = [(1, f) for f in (2, 3, 4, 5)]
    with GraphedDecoder(module, BucketPlan((), tuple(Shape(*s) for s in shapes))) as decoder:
        report = decoder.warmup()
        assert [str(row.bucket) for row in report.failed] == ["1x3 compiled", "1x2 compiled"]  # the largest come first
        assert all("RecompileLimit" in row.error and row.captured == Bucket(row.bucket.shape) for row in report.failed)
        for call in shapes:
            assert check(decoder, codes_for(module, *call)).compiled == (call[1] > 3)
    monkeypatch.setattr(_warmup, "RECOMPILE_LIMIT", 1024)
    torch._dynamo.reset()
    with GraphedDecoder(module, BucketPlan((), tuple(Shape(1, f) for f in range(1, 13)))) as decoder:
        assert decoder.warmup(strict=True).failed == ()  # more than torch's own limit of 8


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs a C++ compiler (g++), none is here")
def test_compiled_by_inductor() -> None:
    module = tiny(trim=3, hidden=4)
    torch._dynamo.reset()
    with GraphedDecoder(module, BucketPlan.grid([1], [5], compiled=[(1, 5)])) as decoder:
        assert decoder.warmup(strict=True).captured == (Bucket(Shape(1, 5), True),)
        for seed in range(3):
            outcome = check(decoder, codes_for(module, 1, 5, seed))
            assert (outcome.kind, outcome.compiled) == ("exact", True)
        assert check(decoder, codes_for(module, 1, 4)).kind == "padded"
        assert check(decoder, codes_for(module, 3, 4)).kind == "split"


class Cached(torch.nn.Module):
    """Adds positions that it keeps by length: in a dictionary, or the latest alone, or a slice of the longest."""

    num_quantizers, codebook_size = 2, 16

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept, self.latest = how, dict[int, torch.Tensor](), torch.zeros(0, 8)
        self.embed, self.out = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 4)
        self.requires_grad_(False)

    def positions(self, n: int) -> torch.Tensor:
        if self.how == "each":
            if n not in self.kept:
                self.kept[n] = torch.arange(n, device=self.out.weight.device)[:, None].expand(n, 8).sin() / 10
            return self.kept[n]
        if len(self.latest) < n or (self.how == "latest" and len(self.latest) != n):
            self.latest = torch.arange(n, device=self.out.weight.device)[:, None].expand(n, 8).sin() / 10
        return self.latest[:n]

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.embed(codes).sum(1) + self.positions(codes.shape[-1])
        audio: torch.Tensor = self.out(x).reshape(len(codes), 1, -1)
        return audio


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["each", "latest", "longest"])
def test_tensors_that_a_module_keeps_in_attributes_stay_right(how: str, device: str) -> None:
    module, fresh = Cached(how).eval().to(device), Cached(how).eval().to(device)
    fresh.load_state_dict(module.state_dict())
    shapes = [(1, 8), (1, 5), (2, 8), (2, 12), (1, 12)]
    with GraphedDecoder(module, BucketPlan(tuple(shapes))) as decoder:
        decoder.warmup(strict=True)
        for graph in decoder._live.graphs.values():  # what it read is alive, whatever the module remembers by now
            assert [tuple(t.shape) for t in graph.keeps if len(t) >= graph.inputs[0].shape[-1]]
        for batch, frames in [*shapes, (1, 7), (3, 13), *reversed(shapes), (1, 4), *shapes]:
            codes = torch.randint(16, (batch, 2, frames), device=device)
            assert torch.equal(decoder.decode(codes), fresh(codes))
            assert torch.equal(module(codes), fresh(codes))


def test_what_a_capture_leaves_in_attributes_is_made_again_by_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Shape] = []
    call = _warmup._Capturing._call
    monkeypatch.setattr(_warmup._Capturing, "_call", lambda self, bucket, codes: (called.append(bucket.shape), call(self, bucket, codes)))
    for how, expected in {"longest": [Shape(1, 12)], "each": [Shape(1, 12), Shape(1, 8), Shape(1, 5)]}.items():
        called.clear()
        with GraphedDecoder(Cached(how).eval(), BucketPlan(((1, 5), (1, 8), (1, 12)))) as decoder:
            decoder.warmup(strict=True)
        assert called == expected
