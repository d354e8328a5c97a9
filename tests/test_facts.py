"""The probe finds every knob of the tiny decoder, the truth about real decoders, and what a decoder must not do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from omnigraph import models
from omnigraph.facts import DecoderFacts, code_space, probe


class Made(nn.Module):
    """A decoder of two samples a frame and one channel, out of a function of codes `[batch, 2, frames]`."""

    num_quantizers, codebook_size = 2, 8

    def __init__(self, forward: Callable[[Made, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.made = forward

    def forward(self, codes: Tensor) -> object:
        return self.made(self, codes)


def spread(codes: Tensor) -> Tensor:
    """`[batch, 1, 2 * frames]`, each frame heard in its own samples alone."""
    return (codes * torch.tensor([[1.0], [0.1]])).sum(1, keepdim=True).repeat_interleave(2, -1)


def said(facts: DecoderFacts, part: str) -> bool:
    return any(part in sentence for sentence in facts.assumed)


@pytest.mark.parametrize("trim", [0, 1, 7, 8, 20])
@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_lengths_and_context_are_found(trim, lookahead):
    facts = probe(models.tiny(upsample=8, trim=trim, lookahead=lookahead, receptive_field=6, channels=2), reach=6)
    assert (facts.upsample, facts.trim, facts.lookahead, facts.receptive_field) == (8, trim, lookahead, 6)
    assert facts.causal == (lookahead == 0)
    assert (facts.channels, facts.dtype, facts.num_quantizers, facts.codebook_size) == (2, torch.float32, 4, 32)
    assert facts.deterministic and facts.rows_independent and not facts.stateful


@settings(max_examples=30)
@given(
    upsample=st.integers(1, 12),
    trim=st.integers(0, 30),
    lookahead=st.integers(0, 6),
    field=st.integers(0, 12),
    seed=st.integers(0, 999),
    codes=st.sampled_from([(1, 2), (1, 5), (3, 64)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_any_knobs_are_found(upsample, trim, lookahead, field, seed, codes, dtype):
    module = models.tiny(
        upsample=upsample, trim=trim, lookahead=lookahead, receptive_field=field, seed=seed, num_quantizers=codes[0], codebook_size=codes[1]
    )
    facts = probe(module.to(dtype), reach=12, frames=2 * (trim // upsample + 1) + 12)
    assert (facts.upsample, facts.trim, facts.lookahead, facts.receptive_field) == (upsample, trim, lookahead, field)


def test_more_than_reach_and_no_bound():
    facts = probe(models.tiny(receptive_field=9, lookahead=20), reach=8)
    assert (facts.receptive_field, facts.reach, facts.lookahead, facts.causal) == (None, 8, None, False)
    assert said(facts, "no bound was found for the lookahead in calls of 16 frames")
    assert probe(models.tiny(lookahead=20), reach=0, frames=32).lookahead == 20


@pytest.mark.parametrize("lookahead", [0, 3])
def test_without_a_reach_it_takes_few_short_calls(lookahead):
    module, shapes = models.tiny(lookahead=lookahead, trim=3), []
    module.register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
    facts = probe(module, reach=0)
    assert (facts.upsample, facts.trim, facts.lookahead, facts.receptive_field) == (8, 3, lookahead, None)
    assert len(shapes) <= (9 if not lookahead else 40) and max(shape[-1] for shape in shapes) <= 16
    assert said(facts, "reach=0")


@pytest.mark.parametrize(
    ("knobs", "deterministic", "stateful", "rows_independent"),
    [
        ({}, True, False, True),
        ({"counter": True}, True, True, True),
        ({"noise": True}, False, False, True),
        ({"noise": True, "counter": True}, False, True, True),
        ({"mix_rows": True}, True, False, False),
        ({"host_read": True}, True, False, True),
    ],
)
@pytest.mark.parametrize("reach", [0, 10])
def test_state_noise_and_rows(knobs, deterministic, stateful, rows_independent, reach):
    facts = probe(models.tiny(receptive_field=4, **knobs), reach=reach)
    assert (facts.deterministic, facts.stateful, facts.rows_independent) == (deterministic, stateful, rows_independent)
    assert facts.causal and facts.receptive_field == (4 if reach else None)


def test_state_outside_buffers_is_found_by_the_output():
    def forward(module, codes):
        module.calls += 1
        return spread(codes) + module.calls

    facts = probe(Made(forward), reach=0)
    assert facts.stateful and not facts.causal and said(facts, "state elsewhere")


def test_a_buffer_that_only_counts_is_state():
    def forward(module, codes):
        module.count.add_(1)
        return spread(codes)

    facts = probe(Made(forward), reach=4)
    assert facts.stateful and facts.deterministic and facts.causal and facts.receptive_field == 0


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("share", [0.1, 1e-6])
def test_a_row_that_sees_its_neighbour_is_found_on_either_side(shift, share):
    facts = probe(Made(lambda module, codes: spread(codes) + share * spread(codes).roll(shift, 0)), reach=0)
    assert not facts.rows_independent


def test_a_row_that_knows_its_place_is_not_independent():
    facts = probe(Made(lambda module, codes: spread(codes) + torch.arange(len(codes))[:, None, None]), reach=0)
    assert not facts.rows_independent and facts.causal


def test_samples_that_depend_on_the_length_of_the_call():
    facts = probe(Made(lambda module, codes: spread(codes) / codes.shape[-1]), reach=0)
    assert not facts.causal and facts.lookahead is None and said(facts, "when the call has 15")


def test_samples_that_depend_on_their_place_in_the_call():
    facts = probe(Made(lambda module, codes: spread(codes) + torch.arange(2 * codes.shape[-1])), reach=4)
    assert facts.causal and facts.receptive_field is None and said(facts, "differs from the whole")


def test_a_mean_over_the_call_has_no_bound():
    facts = probe(Made(lambda module, codes: spread(codes) - spread(codes).mean(-1, keepdim=True)), reach=4)
    assert not facts.causal and facts.lookahead is None and facts.receptive_field is None


def test_frames_mirrored_into_the_padding_are_a_lookahead():
    def forward(module, codes):
        audio = spread(codes)
        before = nn.functional.pad(audio, (0, 9))[..., 1:9].flip(-1)  # 4 frames
        return audio + 0.1 * torch.cat([before, audio], -1)[..., :-8]

    facts = probe(Made(forward), reach=6)
    assert (facts.causal, facts.lookahead, facts.receptive_field) == (False, 4, 4)
    assert probe(Made(forward), reach=0).lookahead == 4


def test_a_silent_decoder_is_not_called_causal():
    facts = probe(Made(lambda module, codes: torch.zeros(len(codes), 1, 2 * codes.shape[-1])), reach=4)
    assert not facts.causal and said(facts, "nothing is known of causality")


def test_the_module_is_left_as_it_was():
    def forward(module, codes):
        assert not module.training and not torch.is_grad_enabled()
        module.count = module.count + 1  # another tensor
        module.inner.seen.add_(codes.sum())
        module.register_buffer("late", torch.ones(1))
        codes.zero_()
        return spread(codes) + torch.rand(1) + module.count + module.late

    module = Made(forward)
    module.inner = nn.Linear(2, 2).eval()
    module.inner.register_buffer("seen", torch.tensor(5))
    module.inner.register_buffer("empty", None)
    module.train()
    module.inner.eval()
    count, seen, random = module.count, module.inner.seen, torch.get_rng_state()
    facts = probe(module, reach=3)
    assert facts.stateful
    assert module.training and not module.inner.training and all(p.requires_grad for p in module.parameters())
    assert module.count is count and count == 0 and module.inner.seen is seen and seen == 5 and module.inner.empty is None
    assert "late" not in module._buffers and torch.equal(torch.get_rng_state(), random)


def test_a_decoder_may_write_to_its_codes():
    def forward(module, codes):
        audio = spread(codes)
        codes.zero_()
        return audio

    facts = probe(Made(forward), reach=4)
    assert facts.causal and facts.deterministic and facts.rows_independent and facts.receptive_field == 0


def test_an_error_leaves_the_module_as_it_was_and_says_which_call():
    module = models.tiny(counter=True).train()
    module.raise_in = 3
    with pytest.raises(RuntimeError, match="raises at this call") as raised:
        probe(module)
    assert raised.value.__notes__ == ["when the probe called TinyDecoder with codes [1, 4, 1]"]
    assert module.training and module.count == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_in_any_mode(mode):
    with mode():
        module = models.tiny(counter=True, trim=3)
        facts = probe(module, reach=5)
    assert facts.causal and facts.stateful and facts.receptive_field == 3
    assert probe(module, reach=5) == facts


def test_buffers_born_in_inference_mode():
    @torch.inference_mode()
    def forward(module, codes):
        return spread(codes) + module.count.add_(1)

    with torch.inference_mode():
        module = Made(forward)
    facts = probe(module, reach=0)
    assert facts.causal and facts.stateful and module.count.is_inference() and module.count == 0


@pytest.mark.parametrize(
    ("forward", "kind", "text"),
    [
        (lambda m, c: spread(c)[:, 0], ValueError, r"\[1, channels, samples\].* codes \[1, 2, 16\].*returned torch.float32 \[1, 32\]"),
        (lambda m, c: spread(c)[:0], ValueError, r"returned torch.float32 \[0, 1, 32\]"),
        (lambda m, c: spread(c).repeat(2, 1, 1), ValueError, r"returned torch.float32 \[2, 1, 32\]"),
        (lambda m, c: spread(c)[..., :0], ValueError, r"not empty.*\[1, 1, 0\]"),
        (lambda m, c: spread(c).int(), ValueError, "floating point audio.*torch.int32"),
        (lambda m, c: (spread(c),), TypeError, "one tensor.*returned a tuple"),
        (lambda m, c: spread(c).log(), ValueError, "are not finite"),
        (lambda m, c: spread(c).double() if c.shape[-1] % 2 else spread(c), ValueError, "torch.float32, another 1 of torch.float64"),
        (lambda m, c: torch.ones(len(c), 1, 32), ValueError, "gave 32 for 16 frames, and 32 for 15"),
        (lambda m, c: spread(nn.functional.pad(c, (0, -c.shape[-1] % 5))), ValueError, r"n \* 10 - 120.* 10 for 13 frames, .* gave 30"),
        (lambda m, c: spread(c)[..., 17:], ValueError, "trim of 17 samples at 2 a frame.*frames=36"),
    ],
)  # fmt: skip
def test_what_a_decoder_must_not_do(forward, kind, text):
    with pytest.raises(kind, match=text):
        probe(Made(forward))


def test_arguments_out_of_range():
    for wrong in ({"reach": -1}, {"frames": 3}, {"codebook_size": 1}):
        with pytest.raises(ValueError, match="a probe needs"):
            probe(models.tiny(), **wrong)


def test_who_says_what_codes_there_are():
    class Plain(nn.Module):
        pass

    module = Plain()
    with pytest.raises(ValueError, match="neither Plain nor its config has num_quantizers: pass num_quantizers="):
        code_space(module)
    assert code_space(module, 3, 4) == (3, 4)
    module.config = SimpleNamespace(num_quantizers=8, codebook_size=1024)
    assert code_space(module) == (8, 1024)
    module.num_quantizers = 6
    assert code_space(module) == (6, 1024) and code_space(module, codebook_size=7) == (6, 7)
    for wrong in (0, -1, 2.0, True, "8"):
        with pytest.raises(ValueError, match=f"num_quantizers must be a positive integer, got {wrong!r}"):
            code_space(module, wrong)
    module.config.codebook_size = None
    with pytest.raises(ValueError, match="has codebook_size"):
        code_space(module)


def test_samples():
    facts = probe(models.tiny(upsample=8, trim=20), reach=0)
    assert [facts.samples(n) for n in (0, 1, 2, 3, 10)] == [0, 0, 0, 4, 60]


def code2wav_by_its_layers(config: SimpleNamespace) -> tuple[int, int, int]:
    """`(upsample, trim, receptive_field)`: what the first sample of a frame goes back to, layer by layer."""
    upsample, trim = math.prod(config.upsampling_ratios), 0
    for rate in config.upsample_rates:
        upsample, trim = upsample * rate, trim * rate + rate  # a transposed convolution of 2 * rate loses rate samples
    frame = 1000
    at = frame * upsample - trim - 6  # the last convolution
    for rate in reversed(config.upsample_rates):
        at = (at - 6 * (1 + 3 + 9)) // rate
    at -= 6
    for factor in reversed(config.upsampling_ratios):
        at = (at - 6) // factor
    return upsample, trim, frame - at + config.num_hidden_layers * (config.sliding_window - 1)


NARROW = {
    "codebook_size": 32, "num_quantizers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "decoder_dim": 16, "num_hidden_layers": 2, "initializer_range": 0.25, "layer_scale_initial_scale": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("shape", [{"upsample_rates": (3, 2), "sliding_window": 4}, {"upsample_rates": (8, 5, 4, 3), "sliding_window": 7}])
def test_code2wav_as_its_layers_say(shape):
    module = models.code2wav(config={**NARROW, **shape}, dtype=torch.float64)
    upsample, trim, field = code2wav_by_its_layers(module.config)
    facts = probe(module, reach=field, frames=8)
    assert (facts.upsample, facts.trim, facts.causal, facts.lookahead, facts.channels) == (upsample, trim, True, 0, 1)
    assert facts.receptive_field == field
    assert facts.deterministic and facts.rows_independent and not facts.stateful
    assert probe(module, reach=field - 1, frames=8).receptive_field is None


def test_code2wav_small():
    module = models.code2wav("small")
    assert code2wav_by_its_layers(module.config) == (1920, 555, 40)
    facts = probe(module, reach=40, frames=8)
    assert (facts.upsample, facts.trim, facts.causal, facts.lookahead, facts.channels) == (1920, 555, True, 0, 1)
    assert facts.deterministic and facts.rows_independent and not facts.stateful
    assert 34 <= facts.receptive_field <= 40  # float32 does not resolve the last frames


def test_code2wav_default_config_trims_555():
    transformers = pytest.importorskip("transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe")
    assert code2wav_by_its_layers(transformers.Qwen3OmniMoeCode2WavConfig()) == (1920, 555, 578)


def test_mimi_is_causal():
    facts = probe(models.mimi(), reach=24)
    assert (facts.upsample, facts.trim, facts.causal, facts.channels) == (1920, 0, True, 1)
    assert facts.receptive_field == 20 and facts.rows_independent and facts.deterministic and not facts.stateful


def test_encodec_mirrors_its_first_frames_and_remembers_all_of_them():
    facts = probe(models.encodec("24khz"), reach=24)
    assert (facts.upsample, facts.trim, facts.causal, facts.lookahead, facts.receptive_field) == (320, 0, False, 6, None)
    assert facts.rows_independent and facts.deterministic and not facts.stateful


def test_encodec_48khz_norms_over_the_whole_call():
    facts = probe(models.encodec("48khz"), reach=8)
    assert (facts.upsample, facts.trim, facts.channels) == (320, 0, 2)
    assert (facts.causal, facts.lookahead, facts.receptive_field) == (False, None, None)
    assert facts.rows_independent and facts.deterministic and not facts.stateful


def test_dac_looks_ahead_as_far_as_back():
    facts = probe(models.dac(), reach=16)
    assert (facts.upsample, facts.trim, facts.causal, facts.lookahead, facts.receptive_field) == (320, 8, False, 10, 10)
    assert facts.rows_independent and facts.deterministic and not facts.stateful


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_code2wav_at_full_size(dtype):
    module = models.code2wav("default", dtype=dtype, device="cuda")
    probe(module, reach=0)
    torch.cuda.synchronize()
    random, start = torch.cuda.get_rng_state(), time.perf_counter()
    facts = probe(module, reach=0)
    assert time.perf_counter() - start < 1
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert (facts.upsample, facts.trim, facts.causal, facts.lookahead, facts.dtype) == (1920, 555, True, 0, dtype)
    assert facts.deterministic and facts.rows_independent and not facts.stateful


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "lookahead"), [(models.tiny, 0), (models.mimi, 0), (models.encodec, 6), (models.dac, 10)])
def test_other_decoders_on_a_gpu(make, lookahead):
    facts = probe(make(device="cuda"), reach=24)
    assert facts.lookahead == lookahead and facts.causal == (lookahead == 0)
    assert facts.deterministic and facts.rows_independent and not facts.stateful
