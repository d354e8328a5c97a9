"""The speech codec: what holds with any weights, how weights are loaded, how training goes on, and what the trained ones promise."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import omnigraph as og
from omnigraph._files import FileError, read_json
from omnigraph.models import SpeechCodec, speech_codec
from omnigraph.models._speech_codec import nearest, save_speech_codec

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "data" / "models" / "speech_codec"
CODES = ROOT / "data" / "codes"
FIELD = 76  # frames: 4 layers look back 15 each, the convolutions before and after them 16
TINY = {
    "num_quantizers": 2,
    "codebook_size": 16,
    "codebook_dim": 8,
    "hidden": 32,
    "heads": 2,
    "layers": 2,
    "window": 4,
    "rates": [4, 2],
    "channels": [16, 8],
    "dilations": [1],
    "encoder_layers": 1,
}


def rms(audio: Tensor) -> float:
    return float(audio.double().square().mean().sqrt())


def codes_for(codec: SpeechCodec, batch: int, frames: int, seed: int = 0) -> Tensor:
    size = (batch, codec.config.num_quantizers, frames)
    return torch.randint(codec.config.codebook_size, size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def codec() -> SpeechCodec:
    return speech_codec(untrained=True)


@pytest.fixture(scope="module")
def tiny() -> SpeechCodec:
    return speech_codec(untrained=True, config=TINY)


# -- any weights --


def test_the_decoder_is_causal_and_its_lengths_are_those_of_its_config(codec: SpeechCodec) -> None:
    facts = og.probe(codec.decoder)
    assert (facts.upsample, facts.trim, facts.channels) == (codec.config.upsample, codec.config.trim, 1) == (320, 50, 1)
    assert (facts.num_quantizers, facts.codebook_size, codec.config.frame_rate) == (8, 1024, 50)
    assert facts.causal and facts.lookahead == 0 and facts.receptive_field == FIELD
    assert facts.deterministic and not facts.stateful and facts.rows_independent


def test_the_transformer_looks_back_over_its_window_and_no_further(tiny: SpeechCodec) -> None:
    transformer = tiny.double().decoder.transformer
    x = torch.randn(1, 32, 20, dtype=torch.float64)
    changed = x.clone()
    changed[..., 5] += 1
    heard = (transformer(x) != transformer(changed)).any(1)[0]
    assert heard.nonzero()[:, 0].tolist() == list(range(5, 5 + 2 * 3 + 1))  # two layers, each a window of 4
    tiny.float()


def test_a_replay_is_eager_bit_by_bit(codec: SpeechCodec) -> None:
    with og.GraphedDecoder(codec.decoder, og.BucketPlan.grid([1, 2], [9])) as decoder:
        assert not decoder.warmup().failed
        exact, other = og.verify(decoder, [(1, 9), (2, 9)]), og.verify(decoder, [(2, 7)])
    assert exact.ok and all(row.bitwise and row.outcome.kind == "exact" for row in exact.rows)
    assert other.ok and all(row.outcome.kind == "padded" for row in other.rows)


def test_chunks_are_the_whole_once_their_context_covers_the_receptive_field(codec: SpeechCodec) -> None:
    codes, errors = codes_for(codec, 1, 125), {}
    with og.GraphedDecoder(codec.decoder, og.BucketPlan.grid([1], [25]), backend="eager") as decoder, torch.no_grad():
        whole = codec.decoder(codes)
        for context in (1, 8, 30, FIELD):
            audio = decoder.chunked_decode(codes, chunk_size=25, left_context_size=context)
            assert audio.shape == whole.shape == (1, 1, 125 * 320 - 50)
            errors[context] = rms(audio - whole) / rms(whole)
    assert errors[1] > 2 * errors[8] > 4 * errors[30] > 100 * errors[FIELD] and errors[FIELD] < 1e-5, errors


def test_what_is_encoded_is_as_long_when_decoded_or_up_to_a_frame_longer(codec: SpeechCodec) -> None:
    for samples in (1, 270, 271, 5000):
        audio = 0.1 * torch.randn(samples)
        codes = codec.encode(audio)
        assert codes.dtype == torch.int64 and codes.shape[:2] == (1, 8) and 0 <= int(codes.min()) <= int(codes.max()) < 1024
        assert 0 <= codec.decoder(codes).shape[-1] - samples < 320
        assert torch.equal(codec.encode(audio[None, None]), codes)
    assert codec.encode(torch.randn(3, 1, 640)).shape == (3, 8, 3)


def test_codes_are_those_of_the_nearest_sums(tiny: SpeechCodec) -> None:
    audio = 0.1 * torch.randn(1, 1, 100)
    residual = tiny.latents(audio).mT
    for book, codes in zip(tiny.decoder.codebooks, tiny.encode(audio)[0], strict=True):
        assert torch.equal(torch.cdist(residual[0], book).argmin(-1), codes)
        residual = residual - book[codes]
    assert torch.equal(nearest(torch.tensor([[0.9, 0.2]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])), torch.tensor([1]))


@pytest.mark.parametrize("wrong", [torch.zeros(2, 100), torch.zeros(1, 2, 100), torch.zeros(0), torch.zeros(100, dtype=torch.int16)])
def test_audio_of_another_form_is_refused(tiny: SpeechCodec, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="audio is floating point"):
        tiny.encode(wrong)


def test_random_weights_are_by_seed_and_can_be_heard(codec: SpeechCodec) -> None:
    random = torch.get_rng_state()
    same, other = speech_codec(untrained=True), speech_codec(untrained=True, seed=1)
    assert torch.equal(torch.get_rng_state(), random)
    codes = codes_for(codec, 4, 30)
    audio = codec.decoder(codes)
    assert torch.equal(same.decoder(codes), audio) and not torch.equal(other.decoder(codes), audio)
    assert 0.05 < rms(audio) < 0.3 and rms(audio - audio.mean(0)) > 0.4 * rms(audio)
    assert not any(m.training for m in codec.modules()) and not any(p.requires_grad for p in codec.parameters())
    assert speech_codec(untrained=True, dtype=torch.bfloat16).decoder(codes).dtype == torch.bfloat16
    assert rms(same.double().decoder(codes) - audio) < 1e-4


# -- loading --


def test_weights_come_back_as_they_were_saved(tiny: SpeechCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "models" / "speech_codec"
    save_speech_codec(tiny, folder, {"trained_on": "nothing"})
    loaded = speech_codec(folder)
    assert loaded.config == tiny.config and loaded.about["trained_on"] == "nothing"
    for name, value in tiny.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.half().float())
    codes = codes_for(tiny, 2, 20)
    assert 0 < rms(loaded.decoder(codes) - tiny.decoder(codes)) < 0.01
    assert loaded.decoder(codes).dtype == torch.float32 and speech_codec(folder, dtype=torch.float64).decoder(codes).dtype == torch.float64
    assert not any(p.requires_grad for p in loaded.parameters()) and not loaded.training
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert speech_codec().about == loaded.about


def test_weights_that_are_missing_damaged_or_of_other_sizes(tiny: SpeechCodec, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"weights are not here: .*codec.json is missing.*path=.*untrained=True"):
        speech_codec(tmp_path)
    save_speech_codec(tiny, tmp_path, {})
    content, about = (tmp_path / "codec.safetensors").read_bytes(), (tmp_path / "codec.json").read_text()
    (tmp_path / "codec.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(FileError, match=r"expected the SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        speech_codec(tmp_path)
    (tmp_path / "codec.safetensors").write_bytes(content)
    for before, after in (('"hidden": 32', '"hidden": 64'), ('"hidden"', '"hidder"'), ('"config"', '"sizes"')):
        (tmp_path / "codec.json").write_text(about.replace(before, after))
        with pytest.raises(FileError, match="do not fit"):
            speech_codec(tmp_path)
    (tmp_path / "codec.json").write_text(about.replace("speech_codec/1", "speech_codec/9"))
    with pytest.raises(FileError, match="expected the schema"):
        speech_codec(tmp_path)
    (tmp_path / "codec.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="codec.safetensors is missing"):
        speech_codec(tmp_path)
    with pytest.raises(ValueError, match="config= is for untrained=True"):
        speech_codec(tmp_path, config=TINY)


def test_without_safetensors_the_error_says_what_to_install(tiny: SpeechCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_speech_codec(tiny, tmp_path, {})
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match='pip install "safetensors'):
        speech_codec(tmp_path)


# -- training --


@pytest.fixture(scope="module")
def lab() -> Iterator[SimpleNamespace]:
    """The scripts beside the weights, as modules."""
    names = ("losses", "quantizer", "speech", "trainer", "train", "evaluate", "make_audio")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(WEIGHTS)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield SimpleNamespace(**{name: __import__(name) for name in names})
        for name in names:
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def tones(lab: SimpleNamespace) -> object:
    """Three seconds of a voice that glides."""
    t = torch.arange(48_000) / 16_000
    phase = 2 * math.pi * torch.cumsum(120 + 40 * torch.sin(2 * math.pi * t), 0) / 16_000
    voice = sum(torch.sin(n * phase) / n for n in range(1, 12)) * (0.2 + 0.2 * torch.sin(6 * math.pi * t)).clamp(min=0) / 3
    return lab.speech.Speech(
        (voice * 32767).to(torch.int16), ["tones"], {"seen_voices": [voice[:8000]], "held_out_voices": [voice[8000:16_000]]}
    )


def trainer_of(lab: SimpleNamespace, tones: object, **fields: object):
    few = {"batch": 2, "frames": 300, "steps": 60, "warm": 2, "log_every": 1, "save_every": 20, "evaluate_every": 60}
    few |= {"quantise_from": 2, "adversarial_from": 4, "ramp": 3, "critic_width": 4, "learning_rate": 2e-3, "codec": TINY}
    return lab.trainer.Trainer(lab.trainer.Config(**{**few, **fields}), tones, torch.device("cpu"))


def everything(trainer) -> dict[str, Tensor]:
    return {f"{file} {key}": value.clone() for file, tensors in trainer.files().items() for key, value in tensors.items()}


def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(lab: SimpleNamespace, tones: object, tmp_path: Path) -> None:
    one, other = trainer_of(lab, tones), trainer_of(lab, tones, seed=1)
    for _ in range(6):
        one.advance()
    one.save(tmp_path, {})
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{name}.safetensors" for name in ("weights", "books", "critics", "moments", "critic_moments")),
        "state.json",
    }
    other.config = one.config
    other.load(tmp_path, 6)
    for _ in range(3):
        one.advance()
        other.advance()
    assert one.step == other.step == 9
    mine, resumed = everything(one), everything(other)
    assert all(torch.equal(value, resumed[name]) for name, value in mine.items())
    with pytest.raises(SystemExit, match="is of step 6, state.json of 7"):
        other.load(tmp_path, 7)


def test_training_makes_spectra_alike_and_ends_when_its_steps_are_done(lab: SimpleNamespace, tones: object, tmp_path: Path) -> None:
    lines = list(
        lab.train.run(trainer_of(lab, tones, steps=40, evaluate_every=40, adversarial_from=30), tmp_path, 5.0, time.perf_counter(), {})
    )
    losses = [line["spectral"] for line in lines if "spectral" in line]
    assert len(losses) == 40 and max(losses[-10:]) < 0.7 * losses[0], losses
    assert lines[-1]["event"] == "done" and lines[-1]["step"] == 40 and min(lines[-1]["perplexity"]) > 2
    assert all("critic" in line for line in lines[30:40]) and not any("critic" in line for line in lines[:30])
    assert read_json(tmp_path / "state.json", lab.trainer.SCHEMA)["step"] == 40


def test_training_that_diverges_goes_back_and_on_more_slowly(
    lab: SimpleNamespace, tones: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(lab, tones, steps=18)
    segments, broken = lab.speech.Speech.segments, [14]

    def once_broken(*args: object) -> Tensor:
        return segments(*args) * (math.nan if trainer.step in broken and not broken.clear() else 1)

    monkeypatch.setattr(lab.speech.Speech, "segments", once_broken)
    lines = list(lab.train.run(trainer, tmp_path, 5.0, time.perf_counter(), {}))
    events = [line["event"] for line in lines if "event" in line]
    assert events == ["diverged: back to step 10, the learning rate halved", "done"]
    assert trainer.slower == 0.5 and trainer.step == 18
    assert all(value.isfinite().all() for value in everything(trainer).values())


def test_steps_are_set_by_the_time_that_is_left(lab: SimpleNamespace, tones: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.train, "seconds_a_step", lambda config, *_: 0.04 if config.adversarial_from else 0.1)
    config = lab.trainer.Config()
    planned = lab.train.fit(config, tones, torch.device("cpu"), 0, 1000.0)
    assert (planned.adversarial_from, planned.steps) == (11500, 11500 + 4600)
    later = lab.train.fit(planned, tones, torch.device("cpu"), 14_000, 200.0)
    assert (later.adversarial_from, later.steps) == (11500, 15_800)
    alone = lab.train.fit(lab.trainer.Config(adversarial_from=lab.train.NEVER), tones, torch.device("cpu"), 1000, 200.0)
    assert (alone.adversarial_from, alone.steps) == (lab.train.NEVER, 5600)
    with pytest.raises(ValueError, match="multiples of log_every"):
        lab.trainer.Config(steps=1001)


def test_losses_know_alike_from_unlike(lab: SimpleNamespace) -> None:
    noise = 0.1 * torch.randn(2, 8000)
    for size, bands in lab.losses.SCALES.items():
        triangles = lab.losses.mel_bands(size, bands, torch.device("cpu"))
        assert triangles.shape == (size // 2 + 1, bands) and torch.allclose(triangles.sum(0), torch.ones(bands))
    assert lab.losses.mel_distance(noise, noise) == 0
    assert lab.losses.mel_distance(noise / 2, noise) == pytest.approx(6.02, abs=0.01)
    assert float(lab.losses.spectral_loss(noise, noise)) == 0 < float(lab.losses.spectral_loss(-0.9 * noise, noise)) < 0.3
    tone = 0.5 * torch.sin(2 * math.pi * 1000 * torch.arange(8000) / 16_000)
    assert float(lab.losses.magnitude(tone[None], 1024)[0, 64, 10]) == pytest.approx(0.25, rel=0.01)
    with torch.no_grad():
        features = lab.losses.Critics(width=4)(torch.cat([noise, noise]))
    adversarial, matching, critic = lab.losses.critic_losses(features)
    assert float(matching) < 1e-6 and float(critic) >= 2 - 1e-5 and float(adversarial) > 0
    with torch.no_grad():
        features = lab.losses.Critics(width=4)(torch.cat([noise, 0.1 * tone.expand(2, -1)]))
    assert float(lab.losses.critic_losses(features)[1]) > 0.1


def test_books_follow_what_they_quantise(lab: SimpleNamespace) -> None:
    random, books = torch.Generator().manual_seed(0), torch.zeros(3, 16, 4)
    quantizer = lab.quantizer.Quantizer(books)
    near = torch.randn(2, 4, 200)
    quantizer.start(near.mT.flatten(0, 1), 400 / 16, random)
    error = [float(quantizer(near)[1])]
    assert error[0] < 0.5
    far = near * 2 + 5
    error += [float(quantizer(far)[1])]
    for _ in range(400):
        quantizer(far, random)
    error += [float(quantizer(far)[1])]
    used = [lab.quantizer.perplexity(nearest(x, books[0])[None], 16)[0] for x in (far.mT.flatten(0, 1), near.mT.flatten(0, 1))]
    assert error[1] > 4 * error[2] and used[0] > 8 > used[1], (error, used)
    x = near.clone().requires_grad_()
    quantised, _ = quantizer(x)
    quantised.sum().backward()
    assert lab.quantizer.perplexity(torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1], [3, 3, 3, 3]]), 4) == [4, 2, 1]
    assert torch.equal(x.grad, torch.ones_like(x)) and not torch.equal(quantised, x)


def test_speech_is_read_from_shards(lab: SimpleNamespace, tmp_path: Path) -> None:
    device, audio = torch.device("cpu"), (0.1 * torch.randn(32_000)).clamp(-1, 1).numpy()
    with pytest.raises(SystemExit, match="make it with make_audio.py"):
        lab.speech.Speech.load(tmp_path, device)
    for i in range(2):
        lab.make_audio.write(tmp_path / f"train-{i}.opus", audio[: 16_000 * (i + 1)], format="OGG", subtype="OPUS", compression_level=0.5)
    for name in lab.speech.SETS:
        lab.make_audio.write(tmp_path / f"{name}.flac", audio, subtype="PCM_16")
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": lab.speech.SCHEMA, "utterances": [{"end": 12_000}, {"end": 32_000}]}))
    speech = lab.speech.Speech.load(tmp_path, device)
    assert len(speech.samples) == 48_000 and speech.shards == ["train-0", "train-1"] and speech.hours == 3 / 3600
    assert [len(x) for x in speech.held_out["seen_voices"]] == [12_000, 20_000]
    assert float((speech.held_out["seen_voices"][0] - torch.from_numpy(audio[:12_000])).abs().max()) < 1e-4
    segments = speech.segments(4, 1000, 2.0, torch.Generator().manual_seed(0))
    assert segments.shape == (4, 1000) and 0.04 < rms(segments) < 0.21


# -- the trained weights --


@pytest.fixture(scope="module")
def trained() -> SpeechCodec:
    if not (WEIGHTS / "codec.json").exists():
        pytest.skip("data/models/speech_codec has no trained weights yet")
    return speech_codec(WEIGHTS)


@pytest.fixture(scope="module")
def sentences(trained: SpeechCodec) -> list[dict]:
    from safetensors.torch import load_file

    about, tensors = read_json(CODES / "held_out.json", "omnigraph.speech_codes/1"), load_file(CODES / "held_out.safetensors")
    assert about["weights_sha256"] == trained.about["sha256"]
    kinds = ("codes", "decoded", "original")
    return [
        {**row, **{kind: tensors[f"{kind}.{row['id']}"] for kind in kinds if f"{kind}.{row['id']}" in tensors}}
        for row in about["sentences"]
    ]


def test_trained_weights_are_small_and_fast_and_were_measured(trained: SpeechCodec) -> None:
    quality = read_json(WEIGHTS / "quality.json", "omnigraph.speech_quality/1")
    assert quality["weights_sha256"] == trained.about["sha256"]
    assert (WEIGHTS / "codec.safetensors").stat().st_size <= 10e6 and "synthetic voices" in trained.about["trained_on"]
    for found in quality["sets"].values():
        assert found["trained"]["stoi"] >= 0.8 > found["untrained"]["stoi"]
        assert found["trained"]["mel_db"] < 0.5 * found["untrained"]["mel_db"]
    codes = codes_for(trained, 1, 250)
    started = time.perf_counter()
    trained.decoder(codes)
    assert time.perf_counter() - started < 5


def test_shipped_codes_decode_to_the_shipped_audio(trained: SpeechCodec, sentences: list[dict]) -> None:
    assert len(sentences) == 12 and sum(row["held_out_voice"] for row in sentences) == 6 and sum(row["heard"] for row in sentences) == 4
    for row in sentences:
        codes = row["codes"].long()[None]
        assert codes.shape == (1, trained.config.num_quantizers, row["frames"]) and row["text"]
        if row["heard"]:
            stored = row["decoded"].float() / 32767
            error = trained.decoder(codes)[0, 0] - stored
            assert rms(error) < 1e-3 * rms(stored) + 2**-15


def test_speech_that_was_held_out_comes_back_intelligible(trained: SpeechCodec, sentences: list[dict]) -> None:
    from pystoi import stoi

    heard = [row for row in sentences if row["heard"]]
    for row in heard:
        original = (row["original"].float() / 32767)[: row["samples"]]
        decoded = trained.decoder(trained.encode(original))[0, 0, : len(original)]
        assert stoi(original.numpy(), decoded.numpy(), 16_000) > 0.75
    assert len(heard) == 4


def test_trained_replays_are_eager_and_chunks_are_the_whole(trained: SpeechCodec, sentences: list[dict]) -> None:
    codes = max((row["codes"] for row in sentences), key=lambda codes: codes.shape[-1]).long()[None]
    with og.GraphedDecoder(trained.decoder, og.BucketPlan.grid([1], [25 + FIELD])) as decoder:
        assert not decoder.warmup().failed
        whole = trained.decoder(codes)
        part = codes[..., : 25 + FIELD]
        assert torch.equal(decoder.decode(part), trained.decoder(part)) and decoder.stats.hits == 1
        errors = [rms(decoder.chunked_decode(codes, 25, context) - whole) / rms(whole) for context in (1, FIELD)]
    assert errors[0] > 1e-2 and errors[1] < 1e-5


@pytest.mark.gpu
def test_recorded_on_a_gpu() -> None:
    codec: nn.Module = speech_codec(untrained=True, device="cuda")
    with og.GraphedDecoder(codec.decoder, og.BucketPlan.grid([1, 2], [9, 20])) as decoder:
        assert not decoder.warmup().failed
        result = og.verify(decoder, [(1, 9), (2, 20), (1, 5)])
    assert result.ok and result.rows[0].bitwise and result.rows[1].bitwise
