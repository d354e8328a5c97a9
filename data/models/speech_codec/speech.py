"""The speech that make_audio.py made, on the device that trains."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from omnigraph._files import read_json

SCHEMA = "omnigraph.speech/1"
RATE = 16_000
SETS = ("seen_voices", "held_out_voices")


@dataclass(frozen=True)
class Speech:
    """All training speech as int16 `[samples]`, the names of its shards, and held-out utterances by set."""

    samples: Tensor
    shards: Sequence[str]
    held_out: Mapping[str, Sequence[Tensor]]

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Speech:
        """Read whichever shards are there."""
        shards = sorted(folder.glob("train-*.opus"))
        if not shards:
            raise SystemExit(f"no speech in {folder}: make it with make_audio.py")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(lambda path: soundfile.read(path, dtype="int16")[0], shards))
        held_out = {}
        for name in SETS:
            audio, _ = soundfile.read(folder / f"{name}.flac", dtype="float32")
            ends = [row["end"] for row in read_json(folder / f"{name}.json", SCHEMA)["utterances"]]
            held_out[name] = [torch.from_numpy(x.copy()).to(device) for x in np.split(audio, ends[:-1])]
        return cls(torch.from_numpy(np.concatenate(parts)).to(device), [path.stem for path in shards], held_out)

    @property
    def hours(self) -> float:
        return len(self.samples) / RATE / 3600

    def segments(self, count: int, length: int, gain: float, random: torch.Generator) -> Tensor:
        """Random segments `[count, length]`, each up to `gain` times louder or softer."""
        device = self.samples.device
        at = torch.randint(len(self.samples) - length, (count, 1), generator=random, device=device)
        loudness = torch.exp((torch.rand(count, 1, generator=random, device=device) * 2 - 1) * math.log(gain))
        return (self.samples[at + torch.arange(length, device=device)].float() / 32768 * loudness).clamp(-1, 1)
