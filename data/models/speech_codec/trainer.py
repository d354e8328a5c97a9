"""One training step of the speech codec, and its checkpoint; train.py runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from losses import Critics, critic_losses, mel_distance, spectral_loss
from quantizer import Quantizer, perplexity
from safetensors import safe_open
from safetensors.torch import save_file
from speech import Speech
from torch import Tensor, nn

from omnigraph._files import write_json
from omnigraph._subject import seeded
from omnigraph.models._speech_codec import SpeechCodec, speech_codec

SCHEMA = "omnigraph.speech_training/1"


@dataclass(frozen=True)
class Config:
    """What a run is made of, besides the speech.

    Arguments:
        frames: of a segment; `batch` of them make a step.
        steps: in all; `adversarial_from`, `quantise_from`: the steps at which critics and codebooks come in.
        decay: the last part of the steps, in which the learning rate falls to 0.
        adversarial, matching: gradients of the critics' losses at the audio, as a part of the spectral loss's; over `ramp` steps, the first
            half of which the critics learn alone.
        gain: of a segment, at most so many times louder or softer.
    """

    seed: int = 0
    batch: int = 32
    frames: int = 75
    steps: int = 24_000
    learning_rate: float = 6e-4
    critic_rate: float = 3e-4
    warm: int = 300
    decay: float = 0.4
    clip: float = 3.0
    quantise_from: int = 500
    commitment: float = 0.1
    adversarial_from: int = 12_000
    ramp: int = 2000
    adversarial: float = 0.15
    matching: float = 0.4
    critic_width: int = 32
    gain: float = 2.0
    save_every: int = 2000
    evaluate_every: int = 1000
    log_every: int = 50
    codec: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(value % self.log_every for value in (self.steps, self.save_every, self.evaluate_every)):
            raise ValueError(
                f"steps, save_every and evaluate_every are multiples of log_every, {self.log_every}: only then is a loss looked at"
            )


class Trainer:
    """The codec, its critics and their optimisers, at some step."""

    def __init__(self, config: Config, speech: Speech, device: torch.device) -> None:
        self.config, self.speech, self.device = config, speech, device
        self.step, self.slower = 0, 1.0
        self.codec: SpeechCodec = speech_codec(untrained=True, config=config.codec, seed=config.seed, device=device)
        self.codec.requires_grad_(True).train()
        self.codec.decoder.codebooks.requires_grad_(False)
        self.quantizer = Quantizer(self.codec.decoder.codebooks)
        with seeded(config.seed, device), device:
            self.critics = Critics(width=config.critic_width)
        learned = [p for p in self.codec.parameters() if p.requires_grad]
        fused = {"fused": True} if device.type == "cuda" else {}
        self.optimizer = torch.optim.Adam(learned, config.learning_rate, (0.8, 0.99), **fused)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), config.critic_rate, (0.8, 0.99), **fused)
        self.latents: Callable[[Tensor], Tensor] = self.codec.latents
        self.synthesise: Callable[[Tensor], Tensor] = self.codec.decoder.synthesise
        self.judge: Callable[[Tensor], list[list[Tensor]]] = self.critics
        self.random = torch.Generator(device)
        self.sums: dict[str, Tensor] = {}

    @property
    def length(self) -> int:
        c = self.codec.config
        return self.config.frames * c.upsample - c.trim

    def rate(self) -> float:
        """The learning rate's part of its peak at this step."""
        c = self.config
        return self.slower * min((self.step + 1) / c.warm, 1.0, max(c.steps - self.step, 1) / (c.decay * c.steps))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def advance(self) -> None:
        """One step."""
        c = self.config
        self.random.manual_seed(c.seed * 1_000_003 + self.step)
        if self.step == c.quantise_from:
            self.start_books()
        real = self.speech.segments(c.batch, self.length, c.gain, self.random)
        with self.autocast():
            latents = self.latents(real[:, None])
            commitment = latents.new_zeros(())
            if self.step >= c.quantise_from:
                with torch.autocast(self.device.type, enabled=False):
                    latents, commitment = self.quantizer(latents.float(), self.random)
            fake = self.synthesise(latents)[:, 0]
        heard = fake.detach().float().requires_grad_()
        loss = spectral_loss(heard, real)
        (gradient,) = torch.autograd.grad(loss, heard)
        found = {"spectral": loss, "commitment": commitment, "latents": latents.std()}
        if self.step >= c.adversarial_from:
            gradient = gradient + self.criticise(heard, real, gradient.norm(), found)
        self.optimizer.zero_grad()
        ((fake * gradient).sum() + c.commitment * commitment).backward()
        found["norm"] = nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], c.clip)
        self.optimizer.param_groups[0]["lr"] = c.learning_rate * self.rate()
        self.optimizer.step()
        for name, value in found.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach()
        self.step += 1

    def criticise(self, heard: Tensor, real: Tensor, norm: Tensor, found: dict[str, Tensor]) -> Tensor:
        """Teach the critics, and return the gradient of their losses at the audio."""
        c = self.config
        with self.autocast():
            features = self.judge(torch.cat([heard, real]))
        adversarial, matching, critic = critic_losses(features)
        ramp = min(max(2 * (self.step - c.adversarial_from) / c.ramp - 1, 0.0), 1.0)
        gradient = torch.zeros_like(heard)
        for loss, part in ((adversarial, c.adversarial), (matching, c.matching)):
            (one,) = torch.autograd.grad(loss, heard, retain_graph=True)
            gradient += one * (ramp * part * norm / one.norm().clamp(min=1e-12))
        parameters = list(self.critics.parameters())
        for parameter, one in zip(parameters, torch.autograd.grad(critic, parameters), strict=True):
            parameter.grad = one
        nn.utils.clip_grad_norm_(parameters, 10.0)
        self.critic_optimizer.param_groups[0]["lr"] = c.critic_rate * self.rate()
        self.critic_optimizer.step()
        found |= {"adversarial": adversarial, "matching": matching, "critic": critic}
        return gradient

    @torch.no_grad()
    def start_books(self) -> None:
        c, found = self.config, []
        wanted = 20 * self.codec.config.codebook_size
        for _ in range(-(-wanted // (c.batch * c.frames))):
            segments = self.speech.segments(c.batch, self.length, c.gain, self.random)
            with self.autocast():
                found.append(self.codec.latents(segments[:, None]).float().mT.flatten(0, 1))
        self.quantizer.start(torch.cat(found), c.batch * c.frames / self.codec.config.codebook_size, self.random)

    # -- what a run keeps --

    def files(self) -> dict[str, dict[str, Tensor]]:
        """All that a checkpoint holds, by file: views of the live tensors, but for the moments."""
        weights = dict(self.codec.state_dict())
        books = {"codebooks": weights.pop("decoder.codebooks"), "sizes": self.quantizer.sizes, "sums": self.quantizer.sums}
        files: dict[str, dict[str, Tensor]] = {"weights": weights, "books": books, "critics": dict(self.critics.state_dict())}
        for name, optimizer in (("moments", self.optimizer), ("critic_moments", self.critic_optimizer)):
            files[name] = {}
            for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
                state = optimizer.state[parameter]
                if not state:  # as Adam itself begins
                    step = torch.zeros((), device=self.device if optimizer.defaults["fused"] else "cpu")
                    state |= {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                files[name] |= {f"{i}.{key}": value for key, value in state.items()}
        return files

    @torch.no_grad()
    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the checkpoint; the moments are rounded to bfloat16, on the device as well."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.files().items():
            for key, value in tensors.items():
                if key.endswith(("exp_avg", "exp_avg_sq")):
                    value.copy_(value.bfloat16())
                    tensors[key] = value.bfloat16()
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.new", {"step": str(self.step)})
        for name in self.files():
            os.replace(folder / f"{name}.new", folder / f"{name}.safetensors")
        write_json(folder / "state.json", SCHEMA, {"step": self.step, "slower": self.slower, "config": asdict(self.config), **about})

    @torch.no_grad()
    def load(self, folder: Path, step: int) -> None:
        for name, tensors in self.files().items():
            with safe_open(folder / f"{name}.safetensors", "pt") as file:
                if file.metadata()["step"] != str(step):
                    raise SystemExit(f"{folder / name}.safetensors is of step {file.metadata()['step']}, state.json of {step}")
                for key, value in tensors.items():
                    value.copy_(file.get_tensor(key))
        self.step = step

    @torch.no_grad()
    def snapshot(self) -> Callable[[], None]:
        """Keep this step in memory; call the result to go back to it."""
        step = self.step
        kept = {(name, key): value.clone() for name, tensors in self.files().items() for key, value in tensors.items()}

        def restore() -> None:
            with torch.no_grad():
                for name, tensors in self.files().items():
                    for key, value in tensors.items():
                        value.copy_(kept[name, key])
            self.step = step

        return restore

    @torch.no_grad()  # cuDNN's benchmark would try its kernels again for each utterance's length
    def held_out(self) -> dict[str, Any]:
        """Mel distance in dB, STOI where pystoi is at hand, and how many codes are in use, on held-out utterances."""
        try:
            from pystoi import stoi
        except ModuleNotFoundError:
            stoi = None
        result: dict[str, Any] = {}
        codes: list[Tensor] = []
        for name, utterances in self.speech.held_out.items():
            distances, intelligible = [], []
            for i, real in enumerate(utterances[:12]):
                with torch.backends.cudnn.flags(benchmark=False):
                    if self.step > self.config.quantise_from:
                        codes.append(self.codec.encode(real))
                        fake = self.codec.decoder(codes[-1])[0, 0, : len(real)]
                    else:
                        fake = self.codec.decoder.synthesise(self.codec.latents(real[None, None]))[0, 0, : len(real)]
                distances.append(mel_distance(fake[None], real[None]))
                if stoi is not None and i < 8:
                    intelligible.append(float(stoi(real.cpu().numpy(), fake.cpu().numpy(), self.codec.config.sample_rate)))
            result[name] = {"mel_db": round(sum(distances) / len(distances), 3)}
            if intelligible:
                result[name]["stoi"] = round(sum(intelligible) / len(intelligible), 4)
        if codes:
            result["perplexity"] = perplexity(torch.cat(codes, -1)[0], self.codec.config.codebook_size)
        return result
