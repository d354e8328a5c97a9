"""Decode graphs on the small Qwen-Image transformer of diffusers: every result against its own cached call, every reason provoked."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

import omnigraph._prefix_entries
from omnigraph._prefix_entry import ALIGNMENT
from omnigraph.graph import capture
from omnigraph.models._qwen_adapter import QwenImageAdapter
from omnigraph.models._qwen_image import qwen_image
from omnigraph.models.diffusion import ImageRequest, decode, denoise, image_request, prefill
from omnigraph.prefix import DecodeBuffers, DecodeGraphCache, DecodeGraphKey, Prefix
from omnigraph.stats import Fallback

TIME = torch.tensor([0.75])


class Run:
    """One request in the middle of its denoising."""

    def __init__(
        self, model: nn.Module, cache: DecodeGraphCache | None = None, seed: int = 0, size: tuple[int, int] = (4, 4), **more: Any
    ) -> None:
        self.model, self.request = model, image_request(model, size, text_tokens=more.pop("text", 6), seed=seed, **more)
        self.velocity, self.prefix = prefill(model, self.request, "conditional", self.request.latents, TIME)
        self.refused = cache.register_prefill(self.prefix) if cache is not None else None

    def step(self, cache: DecodeGraphCache, time: float = 0.5) -> Tensor | None:
        """A step through the cache, which must be bitwise what eager gives."""
        timestep = torch.tensor([time])
        found = cache.try_decode(self.prefix, self.request.latents, timestep)
        if found is not None:
            assert torch.equal(found, self.eager(time))
        return found

    def eager(self, time: float = 0.5) -> Tensor:
        return decode(self.model, self.request, self.prefix, self.request.latents, torch.tensor([time]))


@pytest.fixture
def model() -> Iterator[nn.Module]:
    from diffusers import attention_backend

    with attention_backend("native"):  # setting one on a model sets it for the process, too
        yield qwen_image("small", seed=1)


@pytest.fixture
def cache(model: nn.Module) -> DecodeGraphCache:
    return DecodeGraphCache(QwenImageAdapter(model))


def last_reason(cache: DecodeGraphCache) -> Fallback:
    [reason] = cache.stats.fallbacks
    cache.stats.reset()
    return reason


# What is served


def test_a_denoising_run_replays_all_steps_but_the_first_bitwise(model: nn.Module, cache: DecodeGraphCache) -> None:
    request = image_request(model, (4, 8), conditions=[(4, 4)], text_tokens=9, negative_tokens=5)
    graphs = denoise(model, request, steps=6, guidance=4.0, graphs=cache)
    assert torch.equal(graphs, denoise(model, request, steps=6, guidance=4.0, graphs=False))
    assert (cache.stats.calls, cache.stats.hit_rate, cache.copies) == (10, 1.0, 2)  # a copy for each branch
    assert [key.branch for key in cache.keys] == ["conditional", "negative"]


def test_the_key_tells_layouts_of_equal_size_apart(model: nn.Module, cache: DecodeGraphCache) -> None:
    runs = [Run(model, cache, size=size) for size in ((4, 4), (2, 8), (8, 2))]
    velocities = [run.step(cache) for run in (*runs, *runs)]
    assert all(velocity is not None for velocity in velocities)
    assert len(cache.keys) == 3
    assert {key.prefix_tokens for key in cache.keys} == {6}
    assert not torch.equal(runs[0].eager(), runs[1].eager())


@pytest.mark.parametrize("change", ["branch", "batch", "text", "layout", "attention"])
def test_every_part_of_the_key_counts(model: nn.Module, cache: DecodeGraphCache, change: str) -> None:
    first = Run(model, cache)
    first.step(cache)
    if change == "branch":
        cache.register_prefill(replace(first.prefix, branch="negative"))
    elif change == "attention":
        model.set_attention_backend("_native_math")
        cache.register_prefill(first.prefix)
    else:
        more: dict[str, Any] = {"batch": {"batch": 2}, "text": {"text": 7}, "layout": {"conditions": [(2, 2)], "text": 2}}[change]
        Run(model, None, **more)
        other = image_request(model, (4, 4), text_tokens=more.pop("text", 6), **more)
        cache.register_prefill(prefill(model, other, "conditional", other.latents, TIME.expand(len(other.latents)))[1])
    assert len(cache.keys) == 2


def test_the_target_tokens_are_the_last_of_hidden(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache, conditions=[(2, 4)])
    hidden = torch.cat([run.request.conditions, run.request.latents], dim=1)
    found = cache.try_decode(run.prefix, hidden, torch.tensor([0.5]))
    assert found is not None
    assert torch.equal(found, run.eager())


def test_results_belong_to_the_caller(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    first = run.step(cache, 0.5)
    assert first is not None
    kept = first.clone()
    run.step(cache, 0.25)
    assert torch.equal(first, kept)


def test_in_inference_mode_and_out_of_it(model: nn.Module, cache: DecodeGraphCache) -> None:
    with torch.inference_mode():
        run = Run(model, cache)
        assert run.prefix.tensors[0].is_inference()
        assert run.step(cache) is not None
    assert run.step(cache) is not None
    with torch.enable_grad():
        assert run.step(cache) is not None
    assert cache.copies == 1


# Whose prefix


def test_interleaved_requests_on_one_key_never_read_each_other(model: nn.Module, cache: DecodeGraphCache) -> None:
    a, b = Run(model, cache, seed=1), Run(model, cache, seed=2)
    assert float((a.eager() - b.eager()).norm() / a.eager().norm()) > 0.05  # the prefix shows
    assert [run.step(cache, time) is not None for run, time in ((a, 0.6), (b, 0.6), (a, 0.4), (a, 0.2), (b, 0.4))] == [True] * 5
    assert (len(cache.keys), cache.copies) == (1, 4)  # a copy at each change of request


def test_under_eager_contention_the_first_owns_the_key_until_it_is_gone(model: nn.Module) -> None:
    cache = DecodeGraphCache(QwenImageAdapter(model), contention="eager")
    a, b = Run(model, cache, seed=1), Run(model, cache, seed=2)
    assert (a.refused, b.refused) == (None, Fallback.OWNED)
    assert a.step(cache) is not None
    assert b.step(cache) is None
    assert last_reason(cache) is Fallback.OWNED
    assert cache.register_prefill(a.prefix) is None  # the owner may again
    assert a.step(cache) is not None
    del a
    gc.collect()
    assert b.step(cache) is not None  # adopted
    c = Run(model, cache, seed=3)
    assert c.refused is Fallback.OWNED
    assert cache.refused == {Fallback.OWNED: 2}


def test_an_unchanged_prefix_is_copied_once_and_a_written_one_again(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    before, *_ = [run.step(cache, time) for time in (0.6, 0.5, 0.4)]
    assert cache.copies == 1
    run.prefix.layers[2][1].mul_(-1)
    after = run.step(cache, 0.6)
    assert cache.copies == 2
    assert before is not None
    assert after is not None
    assert not torch.equal(before, after)
    run.prefix.freqs[0].mul_(1)
    run.step(cache)
    assert cache.copies == 3


def test_the_same_tensors_in_another_prefix_are_not_copied(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    run.step(cache)
    run.prefix = replace(run.prefix)
    run.step(cache)
    assert cache.copies == 1


def test_a_prefill_into_the_same_inference_tensors_is_copied_when_it_registers(model: nn.Module, cache: DecodeGraphCache) -> None:
    with torch.inference_mode():
        run = Run(model, cache)
        run.step(cache)
        run.prefix.layers[0][0].mul_(2)  # no version counter tells
        cache.register_prefill(run.prefix)
        assert run.step(cache) is not None
    assert cache.copies == 2


def test_a_refresh_that_breaks_off_is_done_again(model: nn.Module, cache: DecodeGraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Run(model, cache, seed=1), Run(model, cache, seed=2)
    a.step(cache)

    def half(there: list[Tensor], now: list[Tensor]) -> None:
        there[0].copy_(now[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", half)
        with pytest.raises(KeyboardInterrupt):
            b.step(cache)
    assert a.step(cache) is not None
    assert b.step(cache) is not None


def test_a_reused_address_is_not_taken_for_the_same_prefix(model: nn.Module, cache: DecodeGraphCache) -> None:
    for seed in range(4):  # each frees its prefix, whose memory the next one gets
        assert Run(model, cache, seed=seed).step(cache) is not None
    assert (len(cache.keys), cache.copies) == (1, 4)


def test_a_prefix_of_another_model_on_the_same_key_is_an_error(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    run.step(cache)
    with pytest.raises(ValueError, match="come from another model"):
        cache.try_decode(replace(run.prefix, layers=run.prefix.layers[:2]), run.request.latents, TIME)
    assert run.step(cache) is not None


def test_threads_take_turns(model: nn.Module, cache: DecodeGraphCache) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            run = Run(model, cache, seed=seed)
            for n in range(6):
                assert run.step(cache, 0.9 - n / 10) is not None
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.stats.hits == 18


# Room


def test_the_least_recently_used_goes_first(model: nn.Module) -> None:
    cache = DecodeGraphCache(QwenImageAdapter(model), max_entries=2)
    a, b = Run(model, cache, text=4), Run(model, cache, text=5)
    a.step(cache), b.step(cache), a.step(cache)
    c = Run(model, cache, text=6)
    assert [key.prefix_tokens for key in cache.keys] == [4, 6]
    assert b.step(cache) is None
    assert last_reason(cache) is Fallback.UNKNOWN_KEY
    assert a.step(cache) is not None
    assert c.step(cache) is not None


def test_entries_whose_requests_are_gone_go_before_older_ones(model: nn.Module) -> None:
    cache = DecodeGraphCache(QwenImageAdapter(model), max_entries=2)
    a, b = Run(model, cache, text=4), Run(model, cache, text=5)
    a.step(cache), b.step(cache)
    del b
    gc.collect()
    Run(model, cache, text=6)
    assert [key.prefix_tokens for key in cache.keys] == [4, 6]
    assert a.step(cache) is not None


def test_entries_are_kept_within_bytes(model: nn.Module) -> None:
    measured = DecodeGraphCache(QwenImageAdapter(model))
    runs = [Run(model, measured, text=text) for text in (4, 5, 6)]
    assert all(run.step(measured) is not None for run in runs)
    limit = measured.nbytes - 1
    cache = DecodeGraphCache(QwenImageAdapter(model), max_bytes=limit)
    for run in runs:
        cache.register_prefill(run.prefix)
        assert run.step(cache) is not None
        assert cache.nbytes <= limit
    assert [key.prefix_tokens for key in cache.keys] == [5, 6]


def test_an_entry_that_alone_is_too_large_is_marked(model: nn.Module) -> None:
    cache = DecodeGraphCache(QwenImageAdapter(model), max_bytes=1000)
    run = Run(model, cache)
    assert run.refused is Fallback.OVER_BUDGET
    assert run.step(cache) is None
    assert last_reason(cache) is Fallback.OVER_BUDGET
    cache = DecodeGraphCache(QwenImageAdapter(model), max_bytes=run.prefix.nbytes + 4096)
    cache.register_prefill(run.prefix)
    assert run.step(cache) is not None  # what the graph takes is known once it is there
    assert cache.keys == ()
    assert run.step(cache) is None
    assert last_reason(cache) is Fallback.OVER_BUDGET


def test_memory_by_entry(model: nn.Module, cache: DecodeGraphCache) -> None:
    runs = [Run(model, cache), Run(model, cache, text=9)]
    runs[0].step(cache)
    frame = cache.to_frame()
    assert list(frame["state"]) == ["captured", "registered"] or list(frame["state"]) == ["registered", "captured"]
    assert frame["mib"].sum() * 2**20 == pytest.approx(cache.nbytes)
    prefix = sum(run.prefix.nbytes for run in runs)
    assert prefix < cache.nbytes - frame["graph_mib"].sum() * 2**20 < prefix * 1.5
    assert list(frame.sort_values("prefix_tokens")[["owners", "copies", "replays"]].iloc[0]) == [1, 1, 1]
    cache.clear()
    assert (cache.nbytes, cache.keys, len(cache.to_frame())) == (0, (), 0)


def test_clear_frees_the_buffers_and_a_request_may_register_again(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    run.step(cache)
    kept = ref(cache._entries.live[cache.keys[0]].buffers.hidden)
    cache.clear()
    gc.collect()
    assert kept() is None
    assert run.step(cache) is None
    assert last_reason(cache) is Fallback.UNKNOWN_KEY
    cache.register_prefill(run.prefix)
    assert run.step(cache) is not None


@hypothesis_settings(max_examples=15)
@given(
    st.sampled_from(["refresh", "eager"]),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["step", "step", "register", "write", "free"])), max_size=14),
)
def test_whatever_happens_in_whatever_order_a_result_is_eagers(contention: Any, max_entries: int, events: list[tuple[int, str]]) -> None:
    cache = DecodeGraphCache(QwenImageAdapter(SHARED), max_entries=max_entries, contention=contention)
    runs: dict[int, Run] = {}
    for n, what in events:
        run = runs.get(n) or runs.setdefault(n, Run(SHARED, cache, seed=n, text=4 + n % 2))
        if what == "step":
            run.step(cache)
        elif what == "register":
            cache.register_prefill(run.prefix)
        elif what == "write":
            run.prefix.layers[n % 3][n % 2].neg_()
        else:
            del runs[n]
    assert len(cache.keys) <= max_entries
    assert set(cache.stats.fallbacks) <= {Fallback.OWNED, Fallback.UNKNOWN_KEY}


SHARED = qwen_image("small", seed=2)


# What fails


class Failing(QwenImageAdapter):
    """Fails for prefixes of 5 tokens: asks for too much memory, or reads a value on the host."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__(model)
        self.where, self.asked = where, 0
        self.seen: list[ref[Tensor]] = []

    def buffers(self, key: DecodeGraphKey, prefix: Prefix) -> DecodeBuffers:
        if key.prefix_tokens == 5 and self.where == "buffers":
            self.asked += 1
            torch.empty(2**50)
        return super().buffers(key, prefix)

    def step(self, buffers: DecodeBuffers) -> Tensor:
        if buffers.layers[0][0].shape[1] == 5 and self.where == "step":
            self.asked += 1
            self.seen.append(ref(buffers.hidden))
            if buffers.hidden.sum().item() > 0:
                return super().step(buffers)
        return super().step(buffers)


def test_a_failed_capture_marks_its_key_and_another_key_succeeds(model: nn.Module) -> None:
    adapter = Failing(model, "step")
    cache = DecodeGraphCache(adapter)
    bad = Run(model, cache, text=5)
    assert bad.refused is None
    assert [bad.step(cache) for _ in range(3)] == [None] * 3
    assert cache.stats.fallbacks == {Fallback.CAPTURE_FAILED: 3}
    assert adapter.asked == 3  # two warm-ups and the capture, once
    assert cache.keys == ()
    assert cache.to_frame()["state"].tolist() == ["capture_failed"]
    assert all(buffer() is None for buffer in adapter.seen)  # no tensor is kept, nor a traceback that would
    good = Run(model, cache, text=6)
    assert good.step(cache) is not None
    assert cache.register_prefill(bad.prefix) is Fallback.CAPTURE_FAILED
    cache.clear()
    adapter.where = ""
    assert cache.register_prefill(bad.prefix) is None
    assert bad.step(cache) is not None


def test_a_failed_allocation_marks_its_key_until_memory_comes_back(model: nn.Module) -> None:
    adapter = Failing(model, "buffers")
    cache = DecodeGraphCache(adapter, max_entries=1)
    good, bad = Run(model, cache, text=6), Run(model, text=5)
    good.step(cache)
    cache.clear()
    assert cache.register_prefill(bad.prefix) is Fallback.ALLOCATION_FAILED
    assert cache.register_prefill(bad.prefix) is Fallback.ALLOCATION_FAILED
    assert adapter.asked == 1
    assert bad.step(cache) is None
    assert last_reason(cache) is Fallback.ALLOCATION_FAILED
    cache.register_prefill(good.prefix)
    assert good.step(cache) is not None
    Run(model, cache, text=7)  # evicts the good one
    adapter.where = ""
    assert cache.register_prefill(bad.prefix) is None
    assert bad.step(cache) is not None


def test_marks_are_bounded_and_take_no_place_of_an_entry(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omnigraph._prefix_entries, "MAX_FAILED", 2)
    cache = DecodeGraphCache(Failing(model, "step"), max_entries=2)
    good = Run(model, cache, text=6)
    good.step(cache)
    for size in ((2, 2), (2, 4), (4, 2)):
        assert Run(model, cache, text=5, size=size).step(cache) is None
    assert len(cache._entries.failed) == 2
    assert [key.prefix_tokens for key in cache.keys] == [6]
    assert good.step(cache) is not None


# What forbids graphs


def test_no_prefix(model: nn.Module, cache: DecodeGraphCache) -> None:
    empty = Prefix("negative", (), ((1, 4, 4),))
    assert cache.register_prefill(empty) is Fallback.NO_PREFIX
    for prefix in (None, empty):
        assert cache.try_decode(prefix, torch.zeros(1, 16, 16), TIME) is None
        assert last_reason(cache) is Fallback.NO_PREFIX


def test_a_key_that_never_registered_is_unknown(model: nn.Module, cache: DecodeGraphCache) -> None:
    assert Run(model).step(cache) is None
    assert last_reason(cache) is Fallback.UNKNOWN_KEY


def test_padded_text_at_prefill_and_again_at_decode(model: nn.Module, cache: DecodeGraphCache) -> None:
    padded, whole = Run(model, cache, padded=2), Run(model, cache)
    assert padded.refused is Fallback.PADDED_TEXT
    assert padded.step(cache) is None  # though its key is registered by now
    assert last_reason(cache) is Fallback.PADDED_TEXT
    assert whole.step(cache) is not None
    assert replace(padded.prefix, branch="negative").padded
    all_valid = torch.ones(1, 6, dtype=torch.bool)
    assert not Prefix("conditional", whole.prefix.layers, whole.prefix.layout, text_mask=all_valid).padded


def test_a_quantized_prefix(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    scaled = replace(run.prefix, scales=(torch.ones(3),))
    narrow = replace(run.prefix, layers=tuple((k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in run.prefix.layers))
    for prefix in (scaled, narrow):
        assert cache.register_prefill(prefix) is Fallback.QUANTIZED_PREFIX
        assert cache.try_decode(prefix, run.request.latents, TIME) is None
        assert last_reason(cache) is Fallback.QUANTIZED_PREFIX


def test_not_on_cuda_when_cuda_was_asked_for(model: nn.Module) -> None:
    cache = DecodeGraphCache(QwenImageAdapter(model), backend="cuda")
    run = Run(model, cache)
    assert run.refused is Fallback.NOT_ON_DEVICE
    assert run.step(cache) is None
    assert last_reason(cache) is Fallback.NOT_ON_DEVICE


def test_a_prefix_that_is_not_where_the_model_is(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model)
    away = replace(run.prefix, layers=tuple((k.to("meta"), v.to("meta")) for k, v in run.prefix.layers))
    assert cache.register_prefill(away) is Fallback.NOT_ON_DEVICE
    model.to("meta")
    assert cache.register_prefill(run.prefix) is Fallback.NOT_ON_DEVICE


def test_within_an_outer_capture(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    run.step(cache)

    def outer(latents: Tensor) -> Tensor:
        found = cache.try_decode(run.prefix, latents, TIME)
        return latents * 2 if found is None else found

    graph = capture(outer, run.request.latents, warmup=0)
    assert torch.equal(graph.replay(run.request.latents), run.request.latents * 2)
    assert last_reason(cache) is Fallback.OUTER_CAPTURE


def test_within_torch_compile(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    run.step(cache)
    assert cache.copies == 1

    def traced(latents: Tensor) -> Tensor:
        found = cache.try_decode(run.prefix, latents, TIME)
        return latents * 2 if found is None else found

    cache.stats.reset()
    torch.compiler.reset()
    found = torch.compile(traced, backend="eager")(run.request.latents)
    assert torch.equal(found, run.request.latents * 2)
    assert last_reason(cache) is Fallback.COMPILING
    assert cache.register_prefill(run.prefix) is None
    assert run.step(cache) is not None


def test_other_switches_than_at_the_capture(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    assert run.step(cache) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert run.step(cache) is None
    assert Fallback.ENVIRONMENT_CHANGED in cache.stats.fallbacks
    assert run.step(cache) is not None


def test_a_reason_is_logged_once_and_counted_always(model: nn.Module, cache: DecodeGraphCache, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(model)
    with caplog.at_level(logging.WARNING, "omnigraph"):
        for _ in range(3):
            run.step(cache)
    assert [record.message for record in caplog.records if "unknown_key" in record.message] == [
        "a step of conditional 1x6 ((1, 4, 4),) float32 native goes eager: unknown_key (told once; counted always)"
    ]
    assert cache.stats.fallbacks == {Fallback.UNKNOWN_KEY: 3}


# A model that changes


@pytest.mark.parametrize("change", ["dtype", "assign", "data"])
def test_replaced_weights_never_give_stale_output(model: nn.Module, cache: DecodeGraphCache, change: str) -> None:
    old = Run(model, cache)
    assert old.step(cache) is not None
    if change == "dtype":
        model.to(torch.bfloat16)
    elif change == "assign":
        other = qwen_image("small", seed=7)
        model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    else:
        model.proj_out.weight.data = model.proj_out.weight.data * 2
    assert cache.try_decode(old.prefix, old.request.latents, TIME) is None
    assert last_reason(cache) is Fallback.MODULE_CHANGED
    assert cache.keys == ()
    new = Run(model, cache)
    assert new.step(cache) is not None
    assert not cache.stats.fallbacks


def test_weights_updated_in_place_are_read_by_the_next_replay(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    before = run.step(cache)
    with torch.no_grad():
        model.proj_out.weight.mul_(2)
    after = run.step(cache)
    assert before is not None
    assert after is not None
    assert torch.equal(after, before * 2)


def test_lora_appears_and_disappears(model: nn.Module, cache: DecodeGraphCache) -> None:
    from peft import LoraConfig

    run = Run(model, cache)
    plain = run.step(cache)
    assert plain is not None
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    assert run.step(cache) is None
    assert last_reason(cache) is Fallback.DYNAMIC_WRAPPERS
    assert cache.keys == ()
    tuned = Run(model, cache)
    assert tuned.refused is Fallback.DYNAMIC_WRAPPERS
    assert tuned.step(cache) is None
    assert last_reason(cache) is Fallback.DYNAMIC_WRAPPERS
    assert not torch.equal(tuned.eager(), run.eager())
    model.unload_lora()
    again = Run(model, cache)
    found = again.step(cache)
    assert found is not None
    assert torch.equal(found, plain)


def test_parametrizations_are_wrappers_too(model: nn.Module, cache: DecodeGraphCache) -> None:
    nn.utils.parametrizations.weight_norm(model.transformer_blocks[1].attn.to_q)
    run = Run(model, cache)
    assert run.refused is Fallback.DYNAMIC_WRAPPERS


def forbids(model: nn.Module, cache: DecodeGraphCache, reason: Fallback) -> None:
    """A change that just happened sends the next step eager, drops entries, and keeps new requests out."""
    assert cache.keys, "there was an entry to drop"
    [entry] = cache._entries.live.values()
    owner = Run(model)
    assert cache.try_decode(owner.prefix, owner.request.latents, TIME) is None
    assert last_reason(cache) is reason
    assert cache.keys == ()
    assert cache.register_prefill(owner.prefix) is reason
    assert entry.graph is None or entry.graph.outputs is None


def test_hooks_of_accelerate_that_offload(model: nn.Module, cache: DecodeGraphCache) -> None:
    from accelerate.hooks import CpuOffload, add_hook_to_module, remove_hook_from_module

    run = Run(model, cache)
    run.step(cache)
    add_hook_to_module(model, CpuOffload("cpu"))
    forbids(model, cache, Fallback.OFFLOAD_HOOKS)
    remove_hook_from_module(model)
    assert cache.register_prefill(run.prefix) is None
    assert run.step(cache) is not None


def test_hooks_of_diffusers_that_offload_groups(model: nn.Module, cache: DecodeGraphCache) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    run = Run(model, cache)
    run.step(cache)
    registry = HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[0])
    registry.register_hook(ModelHook(), "group_offloading")
    forbids(model, cache, Fallback.OFFLOAD_HOOKS)
    registry.remove_hook("group_offloading")
    assert cache.register_prefill(run.prefix) is None
    assert run.step(cache) is not None


def test_cache_hooks(model: nn.Module, cache: DecodeGraphCache) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    run = Run(model, cache)
    run.step(cache)
    HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[0]).register_hook(ModelHook(), "fbc_block_hook")
    forbids(model, cache, Fallback.CACHE_HOOKS)


def test_a_cache_enabled_on_the_model(model: nn.Module, cache: DecodeGraphCache) -> None:
    Run(model, cache).step(cache)
    model._cache_config = object()
    forbids(model, cache, Fallback.CACHE_HOOKS)
    model._cache_config = None
    assert Run(model, cache).refused is None


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_other_hooks(model: nn.Module, cache: DecodeGraphCache, how: str) -> None:
    Run(model, cache).step(cache)
    part = model.transformer_blocks[1].img_mlp
    if how == "hook":
        part.register_forward_hook(lambda module, inputs, output: output * 2)
    else:
        forward = part.forward
        part.forward = lambda hidden: forward(hidden) * 2
    forbids(model, cache, Fallback.FORWARD_HOOKS)


class Staging:
    """Offloading that brings the weights back to the same addresses, from a copy elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        from diffusers.hooks import HookRegistry, ModelHook

        self.parameters = list(model.parameters())
        self.here = [parameter.data for parameter in self.parameters]
        self.away = [parameter.data.clone() for parameter in self.parameters]
        HookRegistry.check_if_exists_or_initialize(model).register_hook(ModelHook(), "sequential_offload")

    def bring(self, here: bool, elsewhere: bool = False) -> None:
        for parameter, there, away in zip(self.parameters, self.here, self.away, strict=True):
            parameter.data = there.clone() if elsewhere else there if here else away


def test_offload_hooks_with_persistent_staging_are_held_to_their_addresses(model: nn.Module) -> None:
    staging = Staging(model)
    assert Run(model, DecodeGraphCache(QwenImageAdapter(model))).refused is Fallback.OFFLOAD_HOOKS
    cache = DecodeGraphCache(QwenImageAdapter(model, persistent_staging=True))
    run = Run(model, cache)
    assert run.step(cache) is not None
    staging.bring(here=False)
    staging.bring(here=True)
    assert run.step(cache) is not None
    staging.bring(here=True, elsewhere=True)
    assert run.step(cache) is None
    assert last_reason(cache) is Fallback.MODULE_CHANGED


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters(model: nn.Module, cache: DecodeGraphCache, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    run = Run(model, cache)
    run.step(cache)
    fully_shard(model.transformer_blocks[0], mesh=mesh)
    assert cache.try_decode(run.prefix, run.request.latents, TIME) is None
    assert last_reason(cache) is Fallback.SHARDED_PARAMETERS


def test_tensor_parallel_layers(model: nn.Module, cache: DecodeGraphCache, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    run = Run(model, cache)
    run.step(cache)
    parallelize_module(model.transformer_blocks[0].img_mlp, mesh, {"proj": ColwiseParallel()})
    assert cache.try_decode(run.prefix, run.request.latents, TIME) is None
    assert last_reason(cache) is Fallback.TENSOR_PARALLEL


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("ring", Fallback.RING_PARALLEL), ("ulysses", Fallback.SEQUENCE_PARALLEL), ("tensor", Fallback.TENSOR_PARALLEL)],
)
def test_parallelism_by_configuration(model: nn.Module, cache: DecodeGraphCache, kind: str, reason: Fallback) -> None:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

    run = Run(model, cache)
    run.step(cache)
    context = None if kind == "tensor" else ContextParallelConfig(**{f"{kind}_degree": 2})
    tensor = TensorParallelConfig() if kind == "tensor" else None
    model._parallel_config = ParallelConfig(context_parallel_config=context, tensor_parallel_config=tensor)
    assert cache.try_decode(run.prefix, run.request.latents, TIME) is None
    assert last_reason(cache) is reason
    model._parallel_config = None
    assert cache.register_prefill(run.prefix) is None
    assert run.step(cache) is not None


def test_a_quantized_cache(model: nn.Module, cache: DecodeGraphCache) -> None:
    Run(model, cache).step(cache)
    model.transformer_blocks[1].attn._kv_cache_dtype = torch.float8_e4m3fn
    forbids(model, cache, Fallback.QUANTIZED_CACHE)


def test_another_attention_processor(model: nn.Module, cache: DecodeGraphCache) -> None:
    run = Run(model, cache)
    run.step(cache)
    model.transformer_blocks[0].attn.processor = type(model.transformer_blocks[0].attn.processor)()
    assert run.step(cache) is None
    assert last_reason(cache) is Fallback.MODULE_CHANGED


def test_every_reason_of_decode_graphs_is_provoked_in_this_file() -> None:
    from pathlib import Path

    text = Path(__file__).read_text()
    general = {"DISABLED", "NOT_WARMED_UP", "NO_BUCKET", "TOO_MUCH_PADDING", "EAGER_IS_FASTER", "PADDING_UNSAFE", "UNSAFE_MODULE"}
    missing = [name for name in Fallback.__members__ if name not in general and f"Fallback.{name}" not in text]
    assert missing == []


# Bad input


@pytest.mark.parametrize(
    ("hidden", "timestep"),
    [((1, 16, 16), (1,)), ((2, 15, 16), (2,)), ((2, 16, 1), (2,)), ((2, 16), (2,)), ((2, 16, 16), ()), ((2, 16, 16), (1,))],
)
def test_what_would_broadcast_into_a_buffer_is_an_error(model: nn.Module, cache: DecodeGraphCache, hidden: Any, timestep: Any) -> None:
    request = image_request(model, (4, 4), batch=2)
    prefix = prefill(model, request, "conditional", request.latents, torch.full((2,), 0.5))[1]
    cache.register_prefill(prefix)
    with pytest.raises(ValueError, match=r"expected (hidden \[2, 16 or more, 16\]|timestep \[2\]) on cpu; got"):
        cache.try_decode(prefix, torch.zeros(hidden), torch.zeros(timestep))
    with pytest.raises(ValueError, match="expected hidden and timestep on cpu; got meta and cpu"):
        cache.try_decode(prefix, request.latents.to("meta"), torch.zeros(2))
    assert cache.stats.calls == 0
    assert cache.try_decode(prefix, request.latents, torch.full((2,), 0.5)) is not None


def test_arguments_are_checked(model: nn.Module) -> None:
    adapter: Any = QwenImageAdapter(model)
    for wrong in ({"max_entries": 0}, {"max_bytes": 0}, {"contention": "queue"}, {"backend": "metal"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DecodeGraphCache(adapter, **wrong)
    with pytest.raises(ValueError, match="agree in batch, length, dtype and device"):
        Prefix("conditional", ((torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 3, 4)),), ())


def test_buffers_are_one_allocation_in_which_nothing_overlaps(model: nn.Module) -> None:
    run = Run(model)
    buffers = DecodeBuffers.like(run.prefix, tokens=16, channels=16, dtype=torch.float32)
    flat = [buffers.hidden, buffers.timestep, *(t for pair in buffers.layers for t in pair), *buffers.freqs]
    for n, tensor in enumerate(flat):
        tensor.fill_(n + 1)
    assert all(bool((tensor == n + 1).all()) for n, tensor in enumerate(flat))
    assert {tensor.untyped_storage().data_ptr() for tensor in flat} == {buffers.hidden.untyped_storage().data_ptr()}
    assert all((tensor.data_ptr() - buffers.hidden.data_ptr()) % ALIGNMENT == 0 for tensor in flat)
    assert [(t.shape, t.dtype) for t in flat[2:]] == [(t.shape, t.dtype) for t in run.prefix.tensors]


def test_requests_are_what_their_seed_says(model: nn.Module) -> None:
    first, second = (image_request(model, (4, 4), conditions=[(2, 2)], seed=3) for _ in range(2))
    assert isinstance(first, ImageRequest)
    assert torch.equal(first.latents, second.latents)
    assert first.prefix_tokens("conditional") == 32 + 4
