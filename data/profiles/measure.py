"""Measure the profiles in this folder: Code2Wav with random weights, in each dtype asked for, on the device at hand.

On a GPU (what a run leaves out, the next one adds, and what looks wrong it measures again):

    python data/profiles/measure.py --size default --dtype bfloat16 float32 --seconds 240

On a CPU, a single thread on a quiet machine:

    OMP_NUM_THREADS=1 python data/profiles/measure.py --size small --dtype float32 --seconds 240
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import omnigraph as og
from omnigraph._points import Point
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


def doubtful(profile: Profile) -> dict[Point, str]:
    """Points that look wrong, and why: a wide spread, slower than a longer call, a replay slower than eager."""
    found: dict[Point, str] = {}
    for p in profile.points:
        longer = [q for q in profile.points if q.how == p.how and q.shape.batch == p.shape.batch and q.shape.frames > p.shape.frames]
        if p.spread > 0.1 * p.ms:
            found[p] = f"a spread of {p.spread:.3f} ms"
        elif longer and p.ms > 1.1 * min(q.ms for q in longer):
            found[p] = "slower than a longer call"
        elif p.how == "plain" and p.ms > 1.05 * profile.eager[p.shape].ms:
            found[p] = f"eager takes {profile.eager[p.shape].ms:.3f} ms"
    return found


def again(profile: Profile, path: Path, measure: Callable[[], Profile]) -> Profile:
    """Measure the doubtful points once more and keep the faster of both: what disturbs a measurement on a shared host slows it."""
    before = {(p.shape, p.how): p for p in doubtful(profile) if p.how != "compiled"}
    replace(profile, points=tuple(p for p in profile.points if (p.shape, p.how) not in before)).save(path)
    after = measure()
    points = before | {(p.shape, p.how): p for p in after.points}
    points |= {key: p for key, p in before.items() if p.ms < points[key].ms}
    settled = replace(after, points=tuple(points.values()))
    settled.save(path)
    return settled


def fill(path: Path, module: torch.nn.Module, grids: list[list[Shape]], compiled: tuple[Shape, ...], seconds: float) -> None:
    """Measure the coarse grid, the compiled shapes and the fine grid into `path`, as far as the seconds go, and tell what is wrong."""
    start, points = time.perf_counter(), 2 * len(grids[-1]) + len(compiled)
    each = min(max(0.3 * (seconds - 25 * len(compiled)) / points, 0.02), 1.0)

    def measure(wanted: list[Shape], some: tuple[Shape, ...] = compiled) -> Profile:
        left = max(seconds - (time.perf_counter() - start), 0.0)
        bar = sys.stderr.isatty()
        return Profile.measure(module, wanted, compiled=some, repeats=40, seconds_each=each, seconds=left, resume=path, progress=bar)

    profile = measure(grids[0], ())
    for wanted in grids:
        profile = measure(wanted)
    for _ in range(4):
        if doubtful(profile) and time.perf_counter() - start < seconds:
            profile = again(profile, path, partial(measure, grids[-1]))
    missing = [s for s in grids[-1] if s not in profile.eager or s not in profile.plain]
    print(f"{path}: {profile!r}, {time.perf_counter() - start:.0f} s, {len(missing)} shapes missing{': run again' * bool(missing)}")
    for bucket, why in profile.failed.items():
        print(f"  no graph of {bucket}: {why}")
    for p, why in doubtful(profile).items():
        print(f"  {p.shape} {p.how}: {p.ms:.3f} ms, {why}")


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
    for dtype in args.dtype:
        path = args.out / f"{slug}_{name}_{SHORT[getattr(torch, dtype)]}.json"
        module = og.models.code2wav(args.size, dtype=getattr(torch, dtype), device=device)
        fill(path, module, [shapes(batches, lengths, largest) for lengths in (FIRST, LENGTHS)], COMPILED if cuda else (), args.seconds)


if __name__ == "__main__":
    main()
