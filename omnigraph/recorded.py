"""Results that were measured on a GPU and kept in `data/bench/`, for those who have none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnigraph import _bars
from omnigraph._files import FileError, read_json
from omnigraph._needs import need
from omnigraph._speed import Recording, SpeedBench, bars, compile_study, kernels, source_of, speed_bench, work

if TYPE_CHECKING:
    import pandas as pd

CAPTURE = "omnigraph.bench.capture/1"
CHUNKS = "omnigraph.bench.chunks/1"

__all__ = [
    "CaptureBench",
    "ChunksBench",
    "Recording",
    "SpeedBench",
    "bars",
    "capture_bench",
    "chunks_bench",
    "compile_study",
    "kernels",
    "rows_of",
    "source_of",
    "speed_bench",
    "work",
]


@dataclass(frozen=True)
class CaptureBench:
    """What `data/bench/measure_capture.py` saved for one dtype.

    `latency` has the columns of `Driven.to_frame()`, so that the same figure draws both.
    """

    content: dict[str, Any]

    @property
    def source(self) -> str:
        return source_of(self.content["provenance"])

    @property
    def latency(self) -> pd.DataFrame:
        rows = []
        for row in self.content["latency"]:
            batch, frames = row["shape"]
            name = f"{batch}x{frames}"
            found = {"shape": name, "batch": batch, "frames": frames, "calls": row["repeats"], "kind": "exact", "bucket": name}
            for column in ("eager_ms", "decode_ms"):
                found |= {column: row[column]["median"], f"{column}_q1": row[column]["q1"], f"{column}_q3": row[column]["q3"]}
            rows.append(found)
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame

    @property
    def compiled(self) -> pd.DataFrame:
        """One bucket, plain and compiled: bucket, bitwise, ok, of_eagers_error (1: as eager), decode_ms, compile_seconds."""
        rows = [
            {
                "bucket": row["bucket"],
                "bitwise": row["bitwise"],
                "ok": row["ok"],
                "of_eagers_error": row["error"] / row["eager_error"],
                "decode_ms": row["decode_ms"]["median"],
                "compile_seconds": row["compile_seconds"],
            }
            for row in self.content["compiled"]
        ]
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame

    @property
    def all_verified(self) -> bool:
        return all(row["ok"] and (row["bitwise"] or row["kind"] != "exact") for row in self.content["verify"])

    @property
    def summary(self) -> str:
        verify, start = self.content["verify"], self.content["startup"]
        exact = [row for row in verify if row["kind"] == "exact"]
        worst = max(row["error"] / row["eager_error"] for row in verify)
        return (
            f"{sum(row['bitwise'] for row in exact)} of {len(exact)} exact replays bitwise equal to eager; "
            f"{len(verify) - len(exact)} padded or split calls with at most {worst:.2f} times eager's own error\n"
            f"{len(start['shapes'])} shapes captured in {start['time_ratio']:.2f} of the time and {start['memory_ratio']:.2f} of the "
            f"memory of a plain loop over torch.cuda.graph"
        )


def capture_bench(path: str | os.PathLike[str], dtype: str) -> CaptureBench:
    """Load the results of `measure_capture.py` for "bfloat16" or "float32".

    Raises:
        FileError: another schema, or no results in that dtype.
    """
    results = read_json(path, CAPTURE)["results"]
    found = [result for result in results if result["provenance"]["dtype"] == dtype]
    if not found:
        raise FileError(f"{path} has results in {', '.join(r['provenance']['dtype'] for r in results)}, none in {dtype}")
    return CaptureBench(found[0])


@dataclass(frozen=True)
class ChunksBench:
    """What `data/bench/measure_chunks.py` saved."""

    content: dict[str, Any]

    @property
    def source(self) -> str:
        return source_of(self.content["provenance"])

    @property
    def contexts(self) -> pd.DataFrame:
        """Error of chunks against a full decode by left context: dtype, context, error, snr_db, reference_error."""
        frame: pd.DataFrame = need("pandas").DataFrame(self.content["contexts"]["rows"])
        return frame

    @property
    def first_audio(self) -> pd.DataFrame:
        """Compute time to a stream's first audio by ramp: ramp, way, calls, first_ms, all_ms and their _q1, _q3."""
        rows = []
        for row in self.content["first_audio"]:
            found = {"ramp": ", ".join(map(str, row["ramp"])) or "none", "way": row["way"], "calls": len(row["windows"])}
            for column in ("first_ms", "all_ms"):
                found |= {column: row[column]["median"], f"{column}_q1": row[column]["q1"], f"{column}_q3": row[column]["q3"]}
            rows.append(found)
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame

    @property
    def all_ok(self) -> bool:
        return all(row["ok"] for row in [*self.content["ragged"]["verify"], *self.content["lengths"]])

    @property
    def summary(self) -> str:
        ragged, lengths = self.content["ragged"], self.content["lengths"]
        packed, loop = ragged["packed"], ragged["loop"]
        worst = max(row["error"] / row["eager_error"] for row in ragged["verify"])
        return (
            f"{len(ragged['lengths'])} requests, {ragged['windows']} windows: packed {packed['replays']} replays, "
            f"{packed['ms']['median']:.0f} ms; equal lengths round by round {loop['replays']} replays, {loop['ms']['median']:.0f} ms, "
            f"{ragged['ratio']['loop']:.2f} times as long\n"
            f"errors at most {worst:.2f} times eager's own; {sum(row['ok'] for row in lengths)} of {len(lengths)} lengths a full decode's"
        )


def chunks_bench(path: str | os.PathLike[str]) -> ChunksBench:
    """Load the results of `measure_chunks.py`.

    Raises:
        FileError: another schema.
    """
    return ChunksBench(read_json(path, CHUNKS)["results"][0])


def rows_of(capture: CaptureBench, chunks: ChunksBench) -> list[dict[str, Any]]:
    """The rows of the project's table (`_bars.BARS`) that these two recordings hold."""
    latency, [_, compiled] = capture.content["latency"], capture.content["compiled"]
    [eager] = [row["eager_ms"] for row in latency if tuple(row["shape"]) == (1, 50)]
    return [
        _bars.compared("compiled", ("eager", "decode"), eager, compiled["decode_ms"]),
        _bars.latency_row("plain", latency, (1, 4)),
        *_bars.host_rows(capture.content["host"]),
        *_bars.capture_rows(capture.content["startup"]),
        _bars.ragged_row(chunks.content["ragged"]),
        _bars.first_audio_row(chunks.content["first_audio"]),
    ]
