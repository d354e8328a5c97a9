"""Export the trained codec and measure it: `python data/models/speech_codec/evaluate.py`, after train.py. Needs pystoi and soundfile.

Writes codec.safetensors (float16) with codec.json beside this file, quality.json (mel distance and STOI on sentences and voices that
were held out, beside random weights; one CPU thread's time), the training's log, and data/codes/: codes of a dozen held-out sentences
with the decoded and the original audio of a few. All is measured on the exported weights, on the CPU. Exits with 1 below the bar.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import soundfile
import torch
from losses import mel_distance
from pystoi import stoi
from quantizer import perplexity
from safetensors.torch import load_file, save
from speech import SCHEMA, SETS
from torch import Tensor
from trainer import SCHEMA as TRAINING

from omnigraph._files import read_json, write_json
from omnigraph._provenance import provenance
from omnigraph.models._speech_codec import ABOUT, WEIGHTS, SpeechCodec, save_speech_codec, speech_codec
from omnigraph.models._speech_decoder import SpeechConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
QUALITY, CODES = "omnigraph.speech_quality/1", "omnigraph.speech_codes/1"
STOI = 0.8  # the least that counts as intelligible
HEARD = 2  # sentences of each set whose audio is kept


def trained(checkpoint: Path) -> tuple[SpeechCodec, dict[str, Any]]:
    """The codec of a checkpoint, and what the checkpoint says of itself."""
    state = read_json(checkpoint / "state.json", TRAINING)
    codec = SpeechCodec(SpeechConfig.read(state["config"]["codec"]))
    tensors = load_file(checkpoint / "weights.safetensors")
    codec.load_state_dict(tensors | {"decoder.codebooks": load_file(checkpoint / "books.safetensors")["codebooks"]})
    return codec.eval(), state


def held_out(speech: Path, name: str) -> list[tuple[dict[str, Any], Tensor]]:
    """The utterances of a held-out set, with their audio `[samples]`."""
    rows = read_json(speech / f"{name}.json", SCHEMA)["utterances"]
    audio, _ = soundfile.read(speech / f"{name}.flac", dtype="float32")
    return [(row, torch.from_numpy(x.copy())) for row, x in zip(rows, np.split(audio, [row["end"] for row in rows[:-1]]), strict=True)]


@torch.no_grad()
def compare(codec: SpeechCodec, utterances: list[tuple[dict[str, Any], Tensor]]) -> list[dict[str, Any]]:
    rows = []
    for row, real in utterances:
        fake = codec.decoder(codec.encode(real))[0, 0, : len(real)]
        rows.append(
            {
                "id": row["id"],
                "voice": f"{row['engine']} {row['voice']}",
                "seconds": round(len(real) / codec.config.sample_rate, 3),
                "mel_db": round(mel_distance(fake[None], real[None]), 3),
                "stoi": round(float(stoi(real.numpy(), fake.numpy(), codec.config.sample_rate)), 4),
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    stois = [row["stoi"] for row in rows]
    return {"mel_db": round(mean(row["mel_db"] for row in rows), 3), "stoi": round(mean(stois), 4), "stoi_least": min(stois)}


@torch.no_grad()
def seconds_a_second(codec: SpeechCodec, seconds: float = 10.0) -> float:
    """How long one CPU thread decodes a second of speech."""
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    codes = torch.randint(codec.config.codebook_size, (1, codec.config.num_quantizers, int(seconds * codec.config.frame_rate)))
    for _ in range(5):
        started = time.perf_counter()
        codec.decoder(codes)
        times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return median(times[1:]) / seconds


def pcm(audio: Tensor) -> Tensor:
    return (audio.clamp(-1, 1) * 32767).round().to(torch.int16)


@torch.no_grad()
def save_codes(codec: SpeechCodec, sets: dict[str, list[tuple[dict[str, Any], Tensor]]], out: Path, sha256: str) -> None:
    """Codes of six sentences of each set, and the audio, decoded and original, of the shortest of them."""
    tensors, rows = {}, []
    for name, utterances in sets.items():
        chosen = utterances[:6]
        heard = {row["id"] for row, _ in sorted(chosen, key=lambda pair: len(pair[1]))[:HEARD]}
        for row, audio in chosen:
            codes = codec.encode(audio)
            tensors[f"codes.{row['id']}"] = codes[0].to(torch.int16)
            if row["id"] in heard:
                tensors[f"decoded.{row['id']}"] = pcm(codec.decoder(codes)[0, 0])
                tensors[f"original.{row['id']}"] = pcm(audio)
            voice = f"{row['engine']} {row['voice']}"
            about = {"id": row["id"], "text": row["text"], "voice": voice, "held_out_voice": name == SETS[1]}
            rows.append(about | {"frames": codes.shape[-1], "samples": len(audio), "heard": row["id"] in heard})
    out.mkdir(parents=True, exist_ok=True)
    (out / "held_out.safetensors").write_bytes(save(tensors))
    write_json(out / "held_out.json", CODES, {"weights_sha256": sha256, "sentences": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, default=ROOT / "build" / "speech")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "speech_codec")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--codes", type=Path, default=ROOT / "data" / "codes")
    options = parser.parse_args()
    codec, state = trained(options.checkpoint)
    log = [json.loads(line) for line in (options.checkpoint / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    starts = [line for line in log if line.get("event") == "start"]
    training = {key: state[key] for key in ("step", "config", "device", "torch")} | {"hours": starts[-1]["hours"], "runs": len(starts)}
    voices = "synthetic voices: sentences of LJ Speech (public domain) spoken by espeak-ng and flite"
    save_speech_codec(codec, options.out, {"trained_on": voices, "training": training})
    shutil.copyfile(options.checkpoint / "log.jsonl", options.out / "log.jsonl")

    codec = speech_codec(options.out)
    random = speech_codec(untrained=True, config=codec.config)
    sets = {name: held_out(options.speech, name) for name in SETS}
    codes = [codec.encode(audio) for utterances in sets.values() for _, audio in utterances]
    result: dict[str, Any] = {
        "weights_sha256": codec.about["sha256"],
        "provenance": provenance(
            codec.decoder,
            method="original speech against encoded and decoded speech, each held-out utterance whole; STOI by pystoi (Taal et al., 2011); "
            "mel distance: mean absolute difference in dB of 80 mel bands, 64 ms windows, levels below -80 dB counted as -80 dB; "
            "untrained: the same codec with random weights; time: median of 4 decodes of 10 s on one thread",
        ),
        "bitrate": codec.config.frame_rate * codec.config.num_quantizers * float(np.log2(codec.config.codebook_size)),
        "cpu_seconds_a_second": round(seconds_a_second(codec), 4),
        "perplexity": perplexity(torch.cat(codes, -1)[0], codec.config.codebook_size),
        "sets": {},
    }
    for name, utterances in sets.items():
        rows, untrained = compare(codec, utterances), compare(random, utterances)
        result["sets"][name] = {"trained": summary(rows), "untrained": summary(untrained), "utterances": rows}
        print(name, "trained", summary(rows), "untrained", summary(untrained))
    write_json(options.out / "quality.json", QUALITY, result)
    save_codes(codec, sets, options.codes, codec.about["sha256"])
    size = (options.out / WEIGHTS).stat().st_size
    print(f"{options.out / ABOUT}: {size / 1e6:.2f} MB, {result['cpu_seconds_a_second']} s a second, perplexity {result['perplexity']}")
    if min(one["trained"]["stoi"] for one in result["sets"].values()) < STOI or size > 10e6 or result["cpu_seconds_a_second"] > 1:
        sys.exit("below the bar: do not ship these weights")


if __name__ == "__main__":
    main()
