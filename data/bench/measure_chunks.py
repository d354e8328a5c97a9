"""Measure chunked decoding of Code2Wav: packed requests against a plain loop, time to first audio, lengths, error against context.

    python data/bench/measure_chunks.py OUT.json [--size small] [--device cpu] [--repeats 20]

Both sides of each ratio are measured in this one process, taken in turn. Exits with 1 where a result is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_timing import spread, wall
from torch import Tensor, nn

import omnigraph as og
from omnigraph._provenance import provenance
from omnigraph.chunks import Chunking
from omnigraph.compare import Reference, relative_error, snr_db, within_rule

RAGGED = [37, 52, 81, 110, 143, 190, 222, 300]
CHUNK = CONTEXT = 25
BUCKETS = og.BucketPlan.grid([1, 2, 4, 8], [25, 32, 50])
RAMPS: list[tuple[int, ...]] = [(), (1,), (5,), (4, 4, 8, 16)]
STREAMED = 100  # frames of a stream
STREAM_BUCKETS = og.BucketPlan.grid([1], [1, 4, 5, 8, 16, 25, 26, 30, 32, 50])
LENGTHS = [1, 2, 24, 25, 26, 49, 50, 51, 74, 75, 76, 299, 300, 301, 324, 325, 326, 599, 600, 601, 625, 626, 699, 700]
CONTEXTS = [0, 1, 5, 10, 25, 50, 72, 100, 150]
METHOD = (
    "one process, what is compared taken in turn; wall-clock times between synchronisations, after warm-up; medians and quartiles; "
    "random codes"
)


def draw(decoder: og.GraphedDecoder, batch: int, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(decoder.codebook_size, (batch, decoder.num_quantizers, frames), generator=generator).to(decoder.device)


def cutting(decoder: og.GraphedDecoder, chunk: int = CHUNK, context: int = CONTEXT, ramp: tuple[int, ...] = ()) -> Chunking:
    return Chunking(chunk, context, decoder.facts.upsample, decoder.facts.trim, ramp)


# -- requests of many lengths --


class Loop:
    """What is compared with: a plain loop that decodes, round by round, the windows of equal length together, by the same graphs.

    A group goes into the next larger batch that was captured; with `exact_batch` only into its own, else it is decoded eagerly.
    """

    def __init__(self, decoder: og.GraphedDecoder, *, exact_batch: bool) -> None:
        assert decoder._live is not None
        self.module, self.facts, self.exact_batch = decoder.module, decoder.facts, exact_batch
        self.graphs = {bucket.shape: graph for bucket, graph in decoder._live.graphs.items()}
        self.replays = self.eager = self.decoded = 0

    def call(self, codes: Tensor) -> Tensor:
        batch, _, frames = codes.shape
        fits = [(f, b) for b, f in self.graphs if f >= frames and (b == batch if self.exact_batch else b >= batch)]
        if not fits:
            self.eager += 1
            self.decoded += batch * frames
            return self.module(codes)
        frames_in, batch_in = min(fits)
        graph = self.graphs[batch_in, frames_in]
        static = graph.inputs[0]
        if (batch, frames) == (batch_in, frames_in):
            static.copy_(codes)
        else:
            static.zero_()
            static[:batch, :, :frames] = codes
        graph.launch()
        self.replays += 1
        self.decoded += batch_in * frames_in
        return graph.outputs[:batch, :, : frames * self.facts.upsample - self.facts.trim]

    @torch.no_grad()
    def __call__(self, codes: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        up, trim = self.facts.upsample, self.facts.trim
        outputs: list[Tensor] = []
        for start in range(0, max(lengths), CHUNK):
            groups: dict[int, list[tuple[int, int, int]]] = {}
            for row, length in enumerate(lengths):
                if start < length:
                    first, last = max(start - CONTEXT, 0), min(start + CHUNK, length)
                    groups.setdefault(last - first, []).append((row, first, last))
            for rows in groups.values():
                audio = self.call(torch.stack([codes[row, :, first:last] for row, first, last in rows]))
                outputs = outputs or [audio.new_empty(audio.shape[1], n * up - trim) for n in lengths]
                at = max(start * up - trim, 0)
                for i, (row, first, last) in enumerate(rows):
                    until = last * up - trim
                    outputs[row][:, at:until].copy_(audio[i, :, at - first * up : until - first * up])
        return outputs


@torch.no_grad()
def chunk_by_chunk(call: Callable[[Tensor], Tensor], codes: Tensor, cut: Chunking) -> Tensor:
    """The chunks of codes `[B, Q, F]` decoded one after the other, eagerly."""
    chunks = cut.schedule(codes.shape[-1])
    return torch.cat([call(codes[..., c.first : c.last])[..., c.skip : c.skip + c.keep] for c in chunks], -1)


def replays_of(decoder: og.GraphedDecoder, call: Callable[[], object]) -> dict[str, int]:
    decoder.stats.reset()
    call()
    replayed = [bucket.shape for (_, outcome), n in decoder.stats.counts().items() for bucket in outcome.buckets * n]
    eager = decoder.stats.calls - decoder.stats.hits
    return {"replays": len(replayed), "eager": eager, "decoded_frames": sum(batch * frames for batch, frames in replayed)}


def ragged_times(decoder: og.GraphedDecoder, repeats: int) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """Milliseconds of the three ways in turn, what they called, and what they returned."""
    device = decoder.device
    codes = draw(decoder, len(RAGGED), max(RAGGED))
    loops = {"loop": Loop(decoder, exact_batch=False), "loop_eager": Loop(decoder, exact_batch=True)}
    packed = partial(decoder.batched_chunked_decode, codes, RAGGED, chunk_size=CHUNK, left_context_size=CONTEXT)
    ways: dict[str, Callable[[], list[Tensor]]] = {"packed": packed} | {name: partial(loop, codes, RAGGED) for name, loop in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    audios: dict[str, list[Tensor]] = {}
    for i in range(repeats + 2):
        for name in [*ways, *ways][i % 3 : i % 3 + 3]:
            ms, audios[name] = wall(device, ways[name])
            if i >= 2:
                times[name].append(ms)
    calls = repeats + 2
    counts = {"packed": replays_of(decoder, packed)} | {
        name: {"replays": loop.replays // calls, "eager": loop.eager // calls, "decoded_frames": loop.decoded // calls}
        for name, loop in loops.items()
    }
    found: dict[str, Any] = {name: {"ms": spread(times[name]), **counts[name]} for name in ways}
    slower = {name: median(a / b for a, b in zip(times[name], times["packed"], strict=True)) for name in loops}
    decoded = [c.last - c.first for n in RAGGED for c in cutting(decoder).schedule(n)]
    return found | {"lengths": RAGGED, "repeats": repeats, "windows": len(decoded), "frames": sum(decoded), "ratio": slower}, audios


def ragged(decoder: og.GraphedDecoder, reference: Reference, repeats: int) -> dict[str, Any]:
    """The same, each result compared with eager decoding and with the reference."""
    found, audios = ragged_times(decoder, repeats)
    facts, codes = decoder.facts, draw(decoder, len(RAGGED), max(RAGGED))
    loops = [name for name in audios if name != "packed"]
    cut, rows = cutting(decoder), []
    parts = [codes[i : i + 1, :, :n] for i, n in enumerate(RAGGED)]
    single = [decoder.chunked_decode(part, CHUNK, CONTEXT)[0] for part in parts]
    eager = [chunk_by_chunk(decoder.module, part, cut)[0] for part in parts]
    exact = [chunk_by_chunk(reference, part, cut)[0] for part in parts]
    whole = [reference(part)[0] for part in parts]
    for name, results in {"packed": audios["packed"], "single": single, **{loop: audios[loop] for loop in loops}}.items():
        for which in ([0, 1], *([i] for i in range(2, len(RAGGED)))):  # an error is taken over at least 64 frames
            a, e, x, w = (torch.cat([audio[i] for i in which], -1) for audio in (results, eager, exact, whole))
            error, eagers = relative_error(a, x), relative_error(e, x)
            in_full, eagers_in_full = relative_error(a, w), relative_error(e, w)
            ok = all(results[i].shape == (facts.channels, facts.samples(RAGGED[i])) for i in which)
            ok &= within_rule(error, eagers, a.dtype) and within_rule(in_full, eagers_in_full, a.dtype)
            row = {"way": name, "requests": [RAGGED[i] for i in which], "error": error, "eager_error": eagers, "ok": ok}
            rows.append(row | {"full_error": in_full, "eager_full_error": eagers_in_full})
    return found | {"verify": rows}


# -- a stream's first audio --


def pieces(cut: Chunking) -> list[tuple[int, int]]:
    """The new frames of each chunk of a stream."""
    bounds = [0]
    while bounds[-1] < STREAMED:
        bounds.append(min(cut.end(bounds[-1]), STREAMED))
    return list(pairwise(bounds))


@torch.no_grad()
def eagerly(module: nn.Module, codes: Tensor, cut: Chunking) -> tuple[list[float], Tensor]:
    times, audio = [], []
    for c in cut.schedule(STREAMED):
        ms, samples = wall(codes.device, lambda c=c: module(codes[..., c.first : c.last])[..., c.skip : c.skip + c.keep])
        times.append(ms)
        audio.append(samples)
    return times, torch.cat(audio, -1)


def through_graphs(decoder: og.GraphedDecoder, codes: Tensor, cut: Chunking) -> tuple[list[float], Tensor]:
    session = decoder.stream(chunk_size=CHUNK, left_context_size=CONTEXT, ramp=cut.ramp)
    times, audio = [], []
    for i, (start, end) in enumerate(parts := pieces(cut)):
        ms, samples = wall(codes.device, lambda new=codes[..., start:end]: session.push(new))
        if i == len(parts) - 1:  # a short last chunk comes with the flush
            more, rest = wall(codes.device, session.flush)
            ms, samples = ms + more, torch.cat([samples, rest], -1)
        times.append(ms)
        audio.append(samples)
    return times, torch.cat(audio, -1)


def first_audio(module: nn.Module, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of compute until a stream's first audio, its codes being there, and for all of its first 100 frames."""
    with og.GraphedDecoder(module, STREAM_BUCKETS) as decoder:
        decoder.warmup(strict=True)
        codes = draw(decoder, 1, STREAMED, seed=1)
        ways = {"eager": partial(eagerly, module), "graphs": partial(through_graphs, decoder)}
        taken: dict[tuple[tuple[int, ...], str], list[list[float]]] = {(ramp, way): [] for ramp in RAMPS for way in ways}
        for i in range(repeats + 2):
            for (ramp, way), runs in taken.items():
                times, audio = ways[way](codes, cutting(decoder, ramp=ramp))
                assert audio.shape[-1] == decoder.facts.samples(STREAMED)
                if i >= 2:
                    runs.append(times)
        return [
            {
                "ramp": ramp,
                "way": way,
                "windows": [c.last - c.first for c in cutting(decoder, ramp=ramp).schedule(STREAMED)],
                "first_frames": (ramp or (CHUNK,))[0],
                "first_ms": spread([times[0] for times in runs]),
                "frames": STREAMED,
                "all_ms": spread([sum(times) for times in runs]),
                "repeats": repeats,
            }
            for (ramp, way), runs in taken.items()
        ]


# -- lengths, and what left context is worth --


@torch.no_grad()
def lengths(decoder: og.GraphedDecoder) -> list[dict[str, Any]]:
    codes = draw(decoder, 1, max(LENGTHS), seed=2)
    rows = []
    for n in LENGTHS:
        full = decoder.module(codes[..., :n]).shape[-1]
        for chunk in (300, 25):
            samples = decoder.chunked_decode(codes[..., :n], chunk, CONTEXT).shape[-1]
            rows.append({"frames": n, "chunk_size": chunk, "samples": samples, "full": full, "ok": samples == full})
    return rows


@torch.no_grad()
def contexts(decoder: og.GraphedDecoder, reference: Reference) -> dict[str, Any]:
    """The error of chunks of 25 against a full decode of the same precision, and against the reference's, by left context."""
    codes = draw(decoder, 2, 300, seed=3)
    exact, eager = reference(codes), decoder.module(codes)
    rows = []
    for context in CONTEXTS:
        cut = cutting(decoder, context=context)
        if context < cut.context_needed:
            continue
        for call, full in ((decoder.module, eager), (reference, exact)):
            dtype = str(eager.dtype if call is decoder.module else reference.dtype).removeprefix("torch.")
            audio = chunk_by_chunk(call, codes, cut)
            row = {"dtype": dtype, "context": context, "error": relative_error(audio, full), "snr_db": snr_db(audio, full)}
            rows.append(row | {"reference_error": relative_error(audio, exact)})
    needed = cutting(decoder).context_needed
    return {"frames": 300, "requests": 2, "chunk_size": CHUNK, "needed": needed, "eager_error": relative_error(eager, exact), "rows": rows}


def report(found: dict[str, Any]) -> None:
    print(f"{found['provenance']['device']}, {found['provenance']['dtype']}, {found['seconds']:.0f} s")
    ragged, verify = found["ragged"], found["ragged"]["verify"]
    print(f"{len(RAGGED)} ragged requests, {ragged['windows']} windows of {ragged['frames']} frames:")
    for name in ("packed", "loop", "loop_eager"):
        way, ratio = ragged[name], ragged["ratio"].get(name, 1.0)
        calls = f"{way['replays']:2} replays, {way['eager']} eager, {way['decoded_frames']} frames"
        print(f"  {name:10} {way['ms']['median']:8.2f} ms  {calls}  {ratio:.3f} times packed's time")
    print(f"  errors at most {max(row['error'] / row['eager_error'] for row in verify):.3f} of eager's, ok {all(r['ok'] for r in verify)}")
    print("first audio, ms (and the first 100 frames):")
    for row in found["first_audio"]:
        first, everything = row["first_ms"]["median"], row["all_ms"]["median"]
        print(f"  {row['way']:6} ramp {row['ramp']!s:14} {first:7.2f} ({everything:7.2f}, {len(row['windows'])} calls)")
    print(f"lengths: {sum(row['ok'] for row in found['lengths'])} of {len(found['lengths'])} a full decode's")
    print(f"error of chunks of 25 by context; a full decode's own {found['contexts']['eager_error']:.4f}:")
    for row in found["contexts"]["rows"]:
        print(f"  {row['dtype']:8} {row['context']:3} {row['error']:.2e} {row['snr_db']:6.1f} dB  {row['reference_error']:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    start = time.perf_counter()
    module = og.models.code2wav(args.size, dtype=torch.bfloat16, device=args.device)
    reference = Reference(module)
    found: dict[str, Any] = {"provenance": provenance(module, method=METHOD)}
    with og.GraphedDecoder(module, BUCKETS) as decoder:
        decoder.warmup(strict=True)
        found["ragged"] = ragged(decoder, reference, args.repeats)
        found["lengths"] = lengths(decoder)
        found["contexts"] = contexts(decoder, reference)
    found["first_audio"] = first_audio(module, max(args.repeats // 2, 2))
    found["seconds"] = time.perf_counter() - start
    args.out.write_text(json.dumps({"schema": "omnigraph.bench.chunks/1", "results": [found]}) + "\n")
    report(found)
    sys.exit(not all(row["ok"] for row in [*found["ragged"]["verify"], *found["lengths"]]))


if __name__ == "__main__":
    main()
