"""Make the traces of this folder: `python data/traces/make_traces.py [sentences.tsv]`.

assistant.csv is drawn from distributions. utterances.csv, made where a file of sentences (id, tab, text) is given, holds how long
espeak-ng takes to speak each of them. Both come out the same every time, given the same espeak-ng.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from omnigraph._files import write_text
from omnigraph.trace import Trace

HERE = Path(__file__).parent
VOICE = ["-v", "en-us", "-s", "160", "-z"]  # 160 words a minute, no pause after the last word
RATE = 4.0  # utterances a second
SEED = 0


def speak(text: str) -> tuple[int, int]:
    """Samples and sample rate of a spoken text."""
    audio = subprocess.run(["espeak-ng", *VOICE, "--stdin", "--stdout"], input=text.encode(), capture_output=True, check=True).stdout
    channels, rate, width = struct.unpack("<2xHI4x2xH", audio[20:36])
    if audio[36:40] != b"data" or (channels, width) != (1, 16):
        raise RuntimeError("expected a WAV of 16 bits and one channel from espeak-ng")
    return (len(audio) - 44) // 2, rate


def utterances(sentences: Path) -> str:
    """The text of utterances.csv: a trace with the columns id and seconds besides."""
    ids, texts = zip(*(line.split("\t") for line in sentences.read_text(encoding="utf-8").splitlines()), strict=True)
    with ThreadPoolExecutor(2) as pool:
        spoken = list(pool.map(speak, texts))
    version = subprocess.run(["espeak-ng", "--version"], capture_output=True, check=True, text=True).stdout.split()[3]
    trace = Trace(
        arrival=np.cumsum(np.random.RandomState(SEED).exponential(1 / RATE, len(ids))).round(3),
        frames=np.array([-(-samples * 25 // (2 * rate)) for samples, rate in spoken]),
        source=f"{len(ids)} LJ Speech sentences spoken by espeak-ng {version} {' '.join(VOICE)}, frames = ceil(seconds * 12.5); "
        f"arrivals: a Poisson process, {RATE:g} a second, seed {SEED}",
    )
    with tempfile.TemporaryDirectory() as folder:
        lines = trace.save(Path(folder) / "trace.csv").read_text(encoding="utf-8").splitlines()
    head = [line for line in lines if line.startswith("#")]
    columns = ["id,seconds", *(f"{name},{samples / rate:.5f}" for name, (samples, rate) in zip(ids, spoken, strict=True))]
    rows = [f"{more},{row}" for more, row in zip(columns, lines[len(head) :], strict=True)]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sentences", type=Path, nargs="?", help="a file of lines: id, tab, text")
    sentences = parser.parse_args().sentences
    Trace.synthesise(requests=2000, rate=2.0, mean_frames=150.0, sigma=0.8, burstiness=2.0, seed=0, max_frames=750).save(
        HERE / "assistant.csv"
    )
    if sentences:
        write_text(HERE / "utterances.csv", utterances(sentences))
