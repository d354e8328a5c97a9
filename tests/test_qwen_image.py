"""The adapter's step against the model's own cached call, and the requests and runs that notebooks and tests use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from omnigraph.compare import relative_error, within_rule
from omnigraph.models._qwen_adapter import QwenImageAdapter
from omnigraph.models._qwen_image import qwen_image
from omnigraph.models._weights import OUTPUT_RMS
from omnigraph.models.diffusion import decode, denoise, denoising, image_request, prefill
from omnigraph.prefix import DecodeBuffers, DecodeGraphCache

MODEL = qwen_image("small")
EVEN = st.sampled_from([(2, 2), (4, 2), (4, 4), (2, 6)])


@hypothesis_settings(max_examples=20)
@given(EVEN, st.lists(EVEN, max_size=2), st.integers(1, 9), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_step_is_bitwise_the_models_cached_call(target: Any, conditions: Any, text: int, batch: int, dtype: torch.dtype) -> None:
    model = qwen_image("small", dtype=dtype)
    request = image_request(model, target, conditions=conditions, text_tokens=text, batch=batch)
    _, prefix = prefill(model, request, "conditional", request.latents, torch.full((batch,), 1.0))
    assert prefix.layers[0][0].shape[:2] == (batch, request.prefix_tokens("conditional"))
    adapter = QwenImageAdapter(model)
    buffers = DecodeBuffers.like(prefix, tokens=target[0] * target[1], channels=16, dtype=dtype)
    for there, now in zip(buffers.layers, prefix.layers, strict=True):
        there[0].copy_(now[0]), there[1].copy_(now[1])
    buffers.freqs[0].copy_(prefix.freqs[0])
    buffers.hidden.copy_(request.latents)
    times = torch.linspace(0.2, 0.9, batch)
    buffers.timestep.copy_(times)
    assert torch.equal(adapter.step(buffers), decode(model, request, prefix, request.latents, times))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_size_at_which_errors_show(dtype: torch.dtype) -> None:
    model = qwen_image("small", dtype=dtype, seed=5)
    request = image_request(model, (8, 8), seed=1)
    velocity, _ = prefill(model, request, "conditional", request.latents, torch.tensor([0.6]))
    assert velocity.dtype == dtype
    assert float(velocity.double().pow(2).mean().sqrt()) == pytest.approx(OUTPUT_RMS, rel=0.2)


def test_weights_come_from_the_seed_and_leave_the_callers_generators_alone() -> None:
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    first, same, other = (qwen_image("small", seed=seed, dtype=torch.bfloat16) for seed in (3, 3, 4))
    assert torch.equal(first.proj_out.weight, same.proj_out.weight)
    assert not torch.equal(first.proj_out.weight, other.proj_out.weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is dtype
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_the_default_size_is_the_real_one() -> None:
    from diffusers import QwenImage21Transformer2DModel

    with torch.device("meta"):
        model = QwenImage21Transformer2DModel()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(7.1e9, rel=0.01)
    assert len(model.transformer_blocks) == 32


@pytest.mark.parametrize("guidance", [None, 4.0])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_is_the_same_eager_and_by_graphs(guidance: float | None, batch: int) -> None:
    request = image_request(MODEL, (4, 4), conditions=[(2, 4)], text_tokens=5, negative_tokens=3, batch=batch)
    eager = list(denoising(MODEL, request, steps=4, guidance=guidance, graphs=False))
    graphs = list(denoising(MODEL, request, steps=4, guidance=guidance, graphs=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, graphs, strict=True))
    assert len(eager) == 4
    assert torch.equal(denoise(MODEL, request, steps=4, guidance=guidance), eager[-1])


def test_the_first_step_is_the_models_call_without_a_cache() -> None:
    request = image_request(MODEL, (4, 4))
    timestep = torch.tensor([1.0])
    velocity, _ = prefill(MODEL, request, "conditional", request.latents, timestep)
    whole = MODEL(
        request.latents, request.texts["conditional"], timestep, [[(1, 4, 4)]], request.image_slots("conditional"), return_dict=False
    )[0]
    assert torch.equal(velocity, whole[:, -16:])


def test_guidance_moves_the_result() -> None:
    request = image_request(MODEL, (4, 4))
    assert not torch.equal(denoise(MODEL, request, steps=3), denoise(MODEL, request, steps=3, guidance=5.0))


def test_interleaved_runs_on_one_cache() -> None:
    requests = [image_request(MODEL, (4, 4), seed=seed) for seed in (1, 2)]
    alone = [denoise(MODEL, request, steps=5, guidance=3.0, graphs=False) for request in requests]
    cache = DecodeGraphCache(QwenImageAdapter(MODEL))
    runs = zip(*(denoising(MODEL, request, steps=5, guidance=3.0, graphs=cache) for request in requests), strict=True)
    *_, together = runs
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert (cache.stats.hit_rate, len(cache.keys), cache.copies) == (1.0, 2, 16)


def test_padded_texts_run_eagerly() -> None:
    request = image_request(MODEL, (4, 4), text_tokens=8, padded=3)
    cache = DecodeGraphCache(QwenImageAdapter(MODEL))
    assert torch.equal(denoise(MODEL, request, steps=3, graphs=cache), denoise(MODEL, request, steps=3, graphs=False))
    assert cache.stats.hits == 0
    shorter = image_request(MODEL, (4, 4), text_tokens=8)
    assert not torch.equal(denoise(MODEL, request, steps=3, graphs=False), denoise(MODEL, shorter, steps=3, graphs=False))


def test_compiled_blocks_err_no_more_than_eager_does() -> None:
    torch.compiler.reset()
    model, exact = qwen_image("small"), qwen_image("small").double()
    request = image_request(model, (4, 4), text_tokens=6)
    run = prefill(model, request, "conditional", request.latents, torch.tensor([1.0]))[1]
    cache = DecodeGraphCache(QwenImageAdapter(model, compiled=True))
    cache.register_prefill(run)
    time = torch.tensor([0.5])
    found = cache.try_decode(run, request.latents, time)
    assert found is not None
    eager = decode(model, request, run, request.latents, time)
    reference = decode(exact, *double(request, run), request.latents.double(), time.double())
    assert within_rule(relative_error(found, reference), relative_error(eager, reference), torch.float32)
    assert relative_error(eager, reference) < 1e-5
    assert cache.stats.compiled_hits == 1
    assert cache.to_frame()["seconds"].iloc[0] > 0
    assert type(model.transformer_blocks[0]).forward is type(exact.transformer_blocks[0]).forward  # the eager model stays as it was


def double(request: Any, prefix: Any) -> tuple[Any, Any]:
    from dataclasses import replace

    texts = {branch: text.double() for branch, text in request.texts.items()}
    layers = tuple((k.double(), v.double()) for k, v in prefix.layers)
    return replace(request, conditions=request.conditions.double(), texts=texts), replace(prefix, layers=layers)


def test_what_cannot_be_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="'default', 'small'"):
        qwen_image("large")
    for wrong in ({"target": (3, 3)}, {"target": (0, 4)}, {"text_tokens": 0}, {"padded": 5}, {"negative_tokens": 0}, {"batch": 0}):
        with pytest.raises(ValueError, match="multiple of 4 tokens"):
            image_request(MODEL, **{"target": (4, 4), "text_tokens": 5, **wrong})
    with pytest.raises(ValueError, match="steps is positive"):
        denoise(MODEL, image_request(MODEL, (4, 4)), steps=0)


def test_the_adapter_names_the_attention_backend() -> None:
    model: nn.Module = qwen_image("small")
    adapter = QwenImageAdapter(model)
    from diffusers import attention_backend

    with attention_backend("native"):
        assert adapter.attention() == "native"
        with attention_backend("_native_math"):
            assert adapter.attention() == "_native_math"
            model.transformer_blocks[1].attn.processor._attention_backend = "native"
            assert adapter.attention() == "_native_math native _native_math"
