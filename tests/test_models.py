"""The decoders in `models`: what they give, that seeds make them, and that nothing else in the process notices."""

from __future__ import annotations

import copy
import socket
import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from omnigraph import models
from omnigraph.graph import capture

MAKERS = {
    "tiny": models.tiny,
    "code2wav": partial(models.code2wav, "small"),
    "mimi": models.mimi,
    "encodec 24khz": models.encodec,
    "encodec 48khz": partial(models.encodec, "48khz"),
    "dac": models.dac,
}


def codes_for(module: nn.Module, batch: int, frames: int, seed: int = 1) -> Tensor:
    size = (batch, module.config.num_quantizers, frames)
    return torch.randint(module.config.codebook_size, size, generator=torch.Generator().manual_seed(seed)).to(
        next(module.parameters()).device
    )


def rms(audio: Tensor) -> float:
    return float(audio.double().pow(2).mean().sqrt())


@pytest.fixture(scope="module", params=MAKERS.values(), ids=MAKERS)
def make(request):
    return request.param


def test_seeds_make_the_weights_and_nobody_else_notices(make):
    random = torch.get_rng_state()
    one, same, other = make(), make(seed=0), make(seed=1)
    assert torch.equal(torch.get_rng_state(), random)
    codes = codes_for(one, 1, 4)
    assert torch.equal(one(codes), same(codes)) and not torch.equal(one(codes), other(codes))
    assert not any(m.training for m in one.modules()) and not any(p.requires_grad for p in one.parameters())


def test_the_output_is_neither_silent_nor_clipped_and_comes_from_the_codes(make):
    module = make()
    audio = module(codes_for(module, 4, 40))
    assert audio.dim() == 3 and audio.dtype == torch.float32
    assert 0.05 < rms(audio) < 0.3 and (audio.abs() >= 1).double().mean() < 1e-4
    assert rms(audio - audio.mean(0)) > 0.4 * rms(audio)


def test_it_can_be_cast_and_copied_after_a_call(make):
    module = make()
    codes = codes_for(module, 2, 5)
    audio = module(codes)
    assert torch.equal(copy.deepcopy(module)(codes), audio)
    double = module.double()(codes)
    assert double.dtype == torch.float64 and rms(double - audio) < 1e-4 * rms(audio)
    assert make(dtype=torch.bfloat16)(codes).dtype == torch.bfloat16


def test_it_is_a_pure_function_that_can_be_recorded(make):
    module = make()
    graph = capture(module, codes_for(module, 2, 6))
    codes = codes_for(module, 2, 6, seed=2)
    with torch.no_grad():  # with gradients an LSTM takes another kernel
        assert torch.equal(graph.replay(codes), module(codes))


def test_no_network_is_needed(make, monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    make()


@pytest.mark.parametrize("trim", [0, 1, 7, 8, 20])
@pytest.mark.parametrize(("field", "lookahead"), [(0, 0), (3, 0), (2, 1), (0, 3)])
def test_tiny_hears_each_frame_where_it_should(trim, field, lookahead):
    module, frames = models.tiny(upsample=8, trim=trim, receptive_field=field, lookahead=lookahead, dtype=torch.float64), 12
    codes = codes_for(module, 1, frames)
    audio = module(codes)
    assert audio.shape == (1, 1, frames * 8 - trim)
    frame = (torch.arange(audio.shape[-1]) + trim) // 8
    for k in range(frames):
        changed = codes.clone()
        changed[..., k] = (changed[..., k] + 1) % 32
        heard = (module(changed) != audio)[0, 0]
        assert torch.equal(heard, (frame >= k - lookahead) & (frame <= k + field))


def test_tiny_host_read_sees_a_code_out_of_range():
    codes = torch.full((1, 4, 2), 32)
    models.tiny()(codes[:, :1].expand(1, 4, 2).clamp(max=31))
    with pytest.raises(ValueError, match="a code of 32 is outside a codebook of 32"):
        models.tiny(host_read=True)(codes)


def test_tiny_raises_when_told():
    module = models.tiny(raise_once=True)
    codes = codes_for(module, 1, 3)
    with pytest.raises(RuntimeError, match="raises at this call"):
        module(codes)
    audio = module(codes)
    module.raise_in = 2
    assert torch.equal(module(codes), audio)
    with pytest.raises(RuntimeError, match="raises at this call"):
        module(codes)
    assert torch.equal(module(codes), audio)
    module.broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is broken"):
            module(codes)


def test_tiny_counter_noise_and_rows():
    module = models.tiny(counter=True)
    codes = codes_for(module, 2, 3)
    assert not torch.equal(module(codes), module(codes)) and module.count == 2
    module = models.tiny(noise=True)
    assert not torch.equal(module(codes), module(codes))
    module = models.tiny(mix_rows=True)
    assert not torch.equal(module(codes)[:1], module(codes[[0, 0]])[:1])


def test_tiny_refuses_sizes_that_are_none():
    for wrong in ({"upsample": 0}, {"hidden": 0}, {"trim": -1}, {"receptive_field": -1}, {"lookahead": -1}, {"codebook_size": 0}):
        with pytest.raises(ValueError, match="sizes must be positive"):
            models.tiny(**wrong)


def test_code2wav_gives_1920_samples_a_frame_less_555():
    module = models.code2wav("small")
    assert type(module).__name__ == "Qwen3OmniMoeCode2Wav"
    assert [module(codes_for(module, 2, n)).shape for n in (1, 7)] == [(2, 1, 1920 - 555), (2, 1, 7 * 1920 - 555)]


def test_code2wav_by_a_config_of_ones_own():
    fields = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "decoder_dim": 16}
    module = models.code2wav(config={**fields, "upsample_rates": (3, 2), "num_quantizers": 3})
    assert module(codes_for(module, 1, 4)).shape == (1, 1, 4 * 24 - 8)
    again = models.code2wav(config=module.config)
    assert torch.equal(again(codes_for(again, 1, 4)), module(codes_for(module, 1, 4)))


def test_sizes_and_variants_that_do_not_exist():
    with pytest.raises(ValueError, match="the sizes are 'default', 'small', or give config=; got 'large'"):
        models.code2wav("large")
    with pytest.raises(ValueError, match="the variants are '24khz', '48khz', or give config=; got '32khz'"):
        models.encodec("32khz")


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match='pip install "transformers'):
        models.dac()


def test_a_codec_keeps_only_its_decoder():
    for make in (models.mimi, models.encodec, models.dac):
        assert not [name for name, _ in make().named_parameters() if "encoder" in name.replace("decoder", "")]


@pytest.mark.gpu
def test_code2wav_default_on_a_gpu():
    random = torch.cuda.get_rng_state(), torch.get_rng_state()
    module = models.code2wav(dtype=torch.bfloat16, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), random[0]) and torch.equal(torch.get_rng_state(), random[1])
    assert 210e6 < sum(p.numel() for p in module.parameters()) < 220e6
    audio = module(codes_for(module, 2, 50))
    assert audio.shape == (2, 1, 50 * 1920 - 555) and audio.dtype == torch.bfloat16
    assert 0.1 < rms(audio) < 0.2 and (audio.abs() >= 1).double().mean() < 1e-4


@pytest.mark.gpu
def test_recorded_on_a_gpu(make):
    module = make(device="cuda")
    graph = capture(module, codes_for(module, 2, 6))
    codes = codes_for(module, 2, 6, seed=2)
    with torch.no_grad():  # with gradients an LSTM takes another kernel
        assert torch.equal(graph.replay(codes), module(codes))
