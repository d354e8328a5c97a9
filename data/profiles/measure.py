"""Measure the profiles in this folder: Code2Wav with random weights, in each dtype asked for, on the device at hand.

On a GPU (four minutes a dtype on an H200; what a run leaves out, the next one adds):

    python data/profiles/measure.py --size default --dtype bfloat16 float32 --seconds 240

On a CPU, a single thread on a quiet machine:

    OMP_NUM_THREADS=1 python data/profiles/measure.py --size small --dtype float32 --seconds 240
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from pathlib import Path

import torch

import omnigraph as og
from omnigraph._provenance import device_name
from omnigraph.profile import Profile
from omnigraph.shapes import Shape

LENGTHS = (1, 2, 4, 8, 12, 16, 20, 25, 32, 40, 50, 64, 72, 80, 97, 112, 128, 160, 192, 224, 256, 288, 325)
FIRST = (1, 4, 8, 16, 25, 50, 80, 97, 160, 325)  # measured for every batch size before the rest is
BATCHES = (1, 2, 4, 8, 16, 32)
COMPILED = (Shape(1, 25), Shape(1, 50), Shape(1, 97))
LARGEST = 8 * 325  # frames of a call, over all rows: from there on a graph saves nothing on an H200
LEAST = 8  # lengths of a batch size that are measured even so
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


def shapes(batches: tuple[int, ...], lengths: tuple[int, ...], largest: int) -> list[Shape]:
    """The grid, without the calls that take long."""
    return [Shape(b, f) for b in batches for i, f in enumerate(lengths) if b * f <= largest or i < LEAST]


def doubts(profile: Profile) -> list[str]:
    """What a reader should know of before using a profile: holes, points that look wrong, wide spreads."""
    found = [f"no graph of {bucket}: {why}" for bucket, why in profile.failed.items()]
    found += [f"{s} was not replayed" for s in profile.eager if s not in profile.plain and str(s) not in profile.failed]
    for p in profile.points:
        if p.spread > 0.1 * p.ms:
            found.append(f"{p.shape} {p.how}: {p.ms:.3f} ms with a spread of {p.spread:.3f}")
        longer = [q for q in profile.points if q.how == p.how and q.shape.batch == p.shape.batch and q.shape.frames > p.shape.frames]
        if longer and p.ms > 1.1 * min(q.ms for q in longer):
            found.append(f"{p.shape} {p.how}: {p.ms:.3f} ms, slower than a longer call")
    found += [
        f"{s}: a replay takes {p.ms:.3f} ms, eager {profile.eager[s].ms:.3f}"
        for s, p in profile.plain.items()
        if p.ms > 1.05 * profile.eager[s].ms
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("default", "small"), default="default")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32", "float16"), default=["bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=240.0, help="for each dtype")
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    warnings.simplefilter("default")
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    batches = tuple(args.batches or (BATCHES if cuda else BATCHES[:4]))
    largest = LARGEST if cuda else 325
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().removeprefix("nvidia ")).strip("-") if cuda else "cpu"
    name = "code2wav" if args.size == "default" else f"code2wav-{args.size}"
    for dtype in (getattr(torch, name) for name in args.dtype):
        start, path = time.perf_counter(), args.out / f"{slug}_{name}_{SHORT[dtype]}.json"
        module = og.models.code2wav(args.size, dtype=dtype, device=device)
        compiled = COMPILED if cuda else ()
        grid = [FIRST, LENGTHS]
        points = 2 * len(shapes(batches, LENGTHS, largest)) + len(compiled)
        each = min(max(0.4 * (args.seconds - 25 * len(compiled)) / points, 0.02), 1.0)
        for lengths, some in ((grid[0], ()), (grid[0], compiled), (grid[1], compiled)):
            left = args.seconds - (time.perf_counter() - start)
            if left > 0:
                wanted = shapes(batches, lengths, largest)
                profile = Profile.measure(module, wanted, compiled=some, repeats=40, seconds_each=each, seconds=left, resume=path)
        missing = [s for s in shapes(batches, LENGTHS, largest) if s not in profile.eager or s not in profile.plain]
        print(f"{path}: {profile!r}, {time.perf_counter() - start:.0f} s, {len(missing)} shapes missing{': run again' * bool(missing)}")
        for doubt in doubts(profile):
            print(f"  {doubt}")


if __name__ == "__main__":
    main()
