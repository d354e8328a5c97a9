"""Make the speech that the codec is trained on: `python data/models/speech_codec/make_audio.py SENTENCES.tsv [--hours 3]`.

Sentences (lines: id, tab, text) spoken by espeak-ng and flite (Debian packages of these names) in several voices, speeds and pitches;
some of flite's are resampled besides, which makes other throats of them. 16 kHz, mono. Training speech comes as Opus in shards of half
an hour, held-out speech as FLAC. Needs soundfile and scipy. The same seed and versions give the same speech; 3 hours take minutes.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
from scipy.signal import resample_poly
from speech import RATE, SCHEMA

from omnigraph._files import write_json

ROOT = Path(__file__).parents[3]
SHARD = 1800  # seconds
COMPRESSION = 0.92  # libsndfile's scale for Opus: about 25 kbit/s
LOUDNESS = 0.08  # RMS
# fmt: off
ESPEAK = (
    "en-us", "en-us+f1", "en-us+f2", "en-us+f3", "en-us+f4", "en-us+m1", "en-us+m2", "en-us+m3", "en-us+m4", "en-us+m7", "en-us+klatt2",
    "en-us+klatt4", "en-us+Annie", "en-us+Michael", "en-us+steph", "en-us+linda", "en-us+max", "en-us-nyc+f2", "en-gb", "en-gb+f2",
    "en-gb+m3", "en-gb+Alicia", "en-gb-x-rp", "en-gb-x-rp+f4", "en-gb-scotland", "en-gb-scotland+f1", "en-gb-x-gbclan+m5", "en-029+f3",
    "en-gb+victor", "en-us+whisperf",
)
# fmt: on
FLITE = {"slt": 170, "rms": 100, "kal16": 105}  # their pitch in Hz
HELD_OUT = {"espeak": ("en-gb+Andrea",), "flite": {"awb": 110}}  # voices
FLITE_SHARE = 0.6  # of the training utterances


@dataclass(frozen=True)
class Utterance:
    """One sentence, and how it is spoken.

    Arguments:
        speed: words a minute (espeak), or how much slower than usual (flite).
        pitch: 0 to 99 (espeak), or Hz (flite).
        warp: resampled to this length, flite only: below 1 the pitch and the formants rise.
    """

    id: str
    engine: str
    voice: str
    speed: float
    pitch: int
    warp: float = 1.0


def choose(ids: Sequence[str], random: np.random.RandomState, *, held_out: bool) -> list[Utterance]:
    """A voice, speed and pitch for each sentence."""
    espeak = HELD_OUT["espeak"] if held_out else ESPEAK
    flite = HELD_OUT["flite"] if held_out else FLITE
    chosen = []
    for name in ids:
        if random.uniform() < (0.5 if held_out else FLITE_SHARE):
            voice = sorted(flite)[random.randint(len(flite))]
            warp = 1.0 if held_out or random.uniform() < 0.4 else random.randint(86, 117) / 100
            speed = round(random.uniform(0.85, 1.2) / warp, 3)
            chosen.append(Utterance(name, "flite", voice, speed, int(flite[voice] * random.uniform(0.85, 1.2)), warp))
        else:
            voice = espeak[random.randint(len(espeak))]
            chosen.append(Utterance(name, "espeak", voice, float(random.randint(130, 191)), int(random.randint(25, 76))))
    return chosen


def speak(utterance: Utterance, text: str) -> npt.NDArray[np.float32]:
    """The samples of a spoken text at 16 kHz, the silence around it cut to 50 ms."""
    u = utterance
    if u.engine == "espeak":
        command = ["espeak-ng", "-v", u.voice, "-s", f"{u.speed:.0f}", "-p", str(u.pitch), "-z", "--stdin", "--stdout"]
        audio, rate = soundfile.read(io.BytesIO(subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout))
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/a.wav"
            settings = [f"duration_stretch={u.speed}", f"int_f0_target_mean={u.pitch}"]
            command = ["flite", "-voice", u.voice, *(word for s in settings for word in ("--setf", s)), "-t", text, "-o", file]
            subprocess.run(command, capture_output=True, check=True)
            audio, rate = soundfile.read(file)
    ratio = Fraction(RATE, rate) * Fraction(u.warp).limit_denominator(100)
    audio = resample_poly(audio, ratio.numerator, ratio.denominator)
    loud = np.flatnonzero(np.abs(audio) > 0.005 * np.abs(audio).max())
    audio = audio[max(loud[0] - RATE // 20, 0) : loud[-1] + RATE // 20]
    gain = min(LOUDNESS / math.sqrt(np.square(audio).mean()), 0.9 / np.abs(audio).max())
    return (audio * gain).astype(np.float32)


def spoken(utterances: Iterable[Utterance], texts: dict[str, str], workers: int) -> Iterator[tuple[Utterance, npt.NDArray[np.float32]]]:
    """Each utterance with its samples, in order, a few ahead of who takes them."""
    todo = list(utterances)
    with ThreadPoolExecutor(workers) as pool:
        for at in range(0, len(todo), 64):
            block = todo[at : at + 64]
            yield from zip(block, pool.map(lambda u: speak(u, texts[u.id]), block), strict=True)


def write(path: Path, audio: npt.NDArray[np.float32], **form: object) -> None:
    """A second at a time: libsndfile holds what one call gives it on the stack."""
    with soundfile.SoundFile(path, "w", RATE, 1, **form) as file:
        for at in range(0, len(audio), RATE):
            file.write(audio[at : at + RATE])


def version(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return re.findall(r"\d+\.\d+\S*", done.stdout + done.stderr)[0]


def main(sentences: Path, out: Path, hours: float, held_out: int, seed: int, workers: int) -> None:
    lines = [line.split("\t") for line in sentences.read_text(encoding="utf-8").splitlines()]
    texts = {name: text for name, text in lines if 25 <= len(text) <= 160}
    random = np.random.RandomState(seed)
    order = [sorted(texts)[i] for i in random.permutation(len(texts))]
    held = [name for name in order if len(texts[name]) <= 75][: 2 * held_out]
    rest = [name for name in order if name not in set(held)]
    out.mkdir(parents=True, exist_ok=True)
    about = {"seed": seed, "rate": RATE, "compression": COMPRESSION, "libsndfile": soundfile.__libsndfile_version__}
    about |= {"espeak-ng": version("espeak-ng", "--version"), "flite": version("flite", "--version")}

    sets = {
        "seen_voices": choose(held[:held_out], random, held_out=False),
        "held_out_voices": choose(held[held_out:], random, held_out=True),
    }
    for name, utterances in sets.items():
        pieces = list(spoken(utterances, texts, workers))
        ends = np.cumsum([len(audio) for _, audio in pieces]).tolist()
        write(out / f"{name}.flac", np.concatenate([audio for _, audio in pieces]), subtype="PCM_16")
        rows = [{**asdict(u), "text": texts[u.id], "end": end} for (u, _), end in zip(pieces, ends, strict=True)]
        write_json(out / f"{name}.json", SCHEMA, {**about, "utterances": rows})
        print(f"{name}: {len(rows)} utterances, {ends[-1] / RATE:.0f} s")

    shard: list[npt.NDArray[np.float32]] = []
    rows, written, seconds = [], 0, 0.0
    pool, writing = ThreadPoolExecutor(workers), []
    for utterance, audio in spoken(choose(rest, random, held_out=False), texts, workers):
        pause = np.zeros(random.randint(RATE // 10, RATE // 3), np.float32)
        shard += [audio, pause]
        seconds += (len(audio) + len(pause)) / RATE
        rows.append(utterance)
        if seconds >= min(SHARD, hours * 3600):
            form = {"format": "OGG", "subtype": "OPUS", "compression_level": COMPRESSION}
            writing.append(pool.submit(write, out / f"train-{written}.opus", np.concatenate(shard), **form))
            shard, written, hours, seconds = [], written + 1, hours - seconds / 3600, 0.0
            if hours <= 0:
                break
    for one in writing:
        one.result()
    voices = sorted({(u.engine, u.voice) for u in rows})
    content = {**about, "shards": written, "utterances": len(rows), "voices": [" ".join(v) for v in voices], "ids": [u.id for u in rows]}
    write_json(out / "train.json", SCHEMA, content)
    size = sum(path.stat().st_size for path in out.glob("train-*.opus"))
    print(f"train: {written} shards, {len(rows)} utterances, {len(voices)} voices, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", type=Path, help="a file of lines: id, tab, text")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "speech")
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--held-out", type=int, default=24, help="sentences held out, for each of two sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = vars(parser.parse_args())
    main(**options)
