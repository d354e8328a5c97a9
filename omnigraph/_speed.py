"""What was measured of speed and kept in `data/bench/`: the project's bars, single costs, work, compilers, kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnigraph import _bars
from omnigraph._files import read_json
from omnigraph._needs import need

if TYPE_CHECKING:
    import pandas as pd

SPEED = "omnigraph.bench.speed/1"
WORK = "omnigraph.bench.work/1"
COMPILE = "omnigraph.bench.compile/1"
KERNELS = "omnigraph.bench.kernels/1"


def source_of(provenance: dict[str, str]) -> str:
    """Where recorded numbers are from, in a line for a figure."""
    p = provenance
    return f"recorded on {p['device']}, {p['date'][:10]}, torch {p['torch']}, {p['model']} in {p['dtype']}, commit {p['commit']}"


def bars(rows: Sequence[_bars.Row], cuda: bool = True) -> pd.DataFrame:
    """The project's table: a row for each bar with measured, spread, target, predicted, verdict, how; not measured where no row is."""
    frame: pd.DataFrame = need("pandas").DataFrame(_bars.table(rows, cuda))
    return frame


@dataclass(frozen=True)
class SpeedBench:
    """What `make bench` saved on one device."""

    content: dict[str, Any]

    @property
    def source(self) -> str:
        return source_of(self.content["provenance"])

    @property
    def cuda(self) -> bool:
        return bool(self.content["provenance"]["driver"] != "none")

    @property
    def bars(self) -> pd.DataFrame:
        return bars(self.content["rows"], self.cuda)

    @property
    def host(self) -> pd.DataFrame:
        """Microseconds of host time of single costs: group, name, us, q1, q3; `beyond` is for each unit, over the group's bare replay."""
        bare = {row["group"]: row["us"]["median"] for row in self.content["host"] if row["name"] == "bare"}
        rows = [
            {
                "group": row["group"],
                "name": row["name"],
                "us": row["us"]["median"],
                "q1": row["us"]["q1"],
                "q3": row["us"]["q3"],
                "beyond": (row["us"]["median"] - bare.get(row["group"], float("nan"))) / row["per"],
            }
            for row in self.content["host"]
        ]
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame

    @property
    def beside(self) -> pd.DataFrame:
        """What one would otherwise use: shape, way, ms, q1, q3, start_s, bitwise, and how omnigraph stands: ahead, level or behind.

        A plain way is compared with the plain graph, a compiled one with the compiled graph; level is within 2 % or the quartiles.
        """
        own = {
            (*row["shape"], row["way"].endswith("compiled")): row["ms"]
            for row in self.content["raw"]["beside"]["calls"]
            if row["way"].startswith("omnigraph")
        }
        rows = []
        for row in self.content["raw"]["beside"]["calls"]:
            ms = row["ms"]
            ours = own[(*row["shape"], "compile" in row["way"])]
            times = {"ms": ms["median"], "q1": ms["q1"], "q3": ms["q3"], "start_s": row["start_s"], "bitwise": row["bitwise"]}
            rows.append({"shape": "x".join(map(str, row["shape"])), "way": row["way"], **times, "omnigraph": _bars.standing(ours, ms)})
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame

    @property
    def plans(self) -> pd.DataFrame:
        """What the planner expected of a trace's calls and what they took, a row a trace and way: the plan, the heuristic, eager.

        Columns: trace, calls, way, graphs, hit_rate, mib of the pool, expected_ms and measured_ms a call, ratio of the two.
        """
        rows = [
            {
                "trace": found["trace"],
                "calls": found["calls"],
                "way": way,
                "graphs": len(found[way].get("buckets", ())),
                "hit_rate": found[way].get("hit_rate", 0.0),
                "mib": found[way].get("pool_bytes", 0) / 2**20,
                "expected_ms": found[way]["predicted_ms"],
                "measured_ms": found[way]["ms"],
                "ratio": found[way]["ms"] / found[way]["predicted_ms"],
            }
            for found in self.content["raw"]["plans"]
            for way in ("plan", "heuristic", "eager")
        ]
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame


def speed_bench(path: str | os.PathLike[str]) -> SpeedBench:
    """Load what `make bench` saved.

    Raises:
        FileError: another schema.
    """
    return SpeedBench(read_json(path, SPEED))


@dataclass(frozen=True)
class Recording:
    """A file of `data/bench` and its rows as a table."""

    source: str
    frame: pd.DataFrame


def work(path: str | os.PathLike[str]) -> Recording:
    """Load what `count_work.py` counted: shape, batch, frames, ops, flops, bytes, bytes_fused, bytes_least.

    The first three are there for each kind of operation too, as in `convolution_bytes`.

    Raises:
        FileError: another schema.
    """
    content, rows = read_json(path, WORK), []
    for row in content["rows"]:
        kinds = {f"{kind}_{what}": of[what] for kind, of in row["kinds"].items() for what in ("ops", "flops", "bytes")}
        batch, frames = row["shape"]
        totals = {name: row[name] for name in ("ops", "flops", "bytes", "bytes_fused", "bytes_least")}
        rows.append({"shape": f"{batch}x{frames}", "batch": batch, "frames": frames, **totals, **kinds})
    about = content["provenance"]
    source = f"counted on the meta device, {about['date'][:10]}, torch {about['torch']}, {about['model']} in {about['dtype']}"
    return Recording(source, need("pandas").DataFrame(rows))


def compile_study(path: str | os.PathLike[str]) -> Recording:
    """Load what `study_compile.py` found: a row a variant and length, or one without a length where it never had a result.

    Columns: variant, shape, seconds (None: stopped before), graphs, replay_ms, eager_ms, error, eager_error, ok, finished, stopped_after_s,
    hits and misses (of Inductor's cache), characters and ceilings (of the output's length as an expression of the input's).

    Raises:
        FileError: another schema.
    """
    content, rows = read_json(path, COMPILE), []
    for variant in content["variants"]:
        about = {"variant": variant["variant"], "finished": variant["finished"], "stopped_after_s": variant.get("stopped_after_s")}
        counters = variant.get("counters", {})
        about |= {"hits": counters.get("fxgraph_cache_hit"), "misses": counters.get("fxgraph_cache_miss")}
        for name in ("characters", "ceilings"):
            about[name] = max((one[name] for one in variant.get("expressions", ())), default=None)
        for row in variant["rows"] or [{}]:
            found = {name: row.get(name) for name in ("seconds", "graphs", "error", "eager_error", "ok")}
            found |= {name: row[name]["median"] if name in row else None for name in ("replay_ms", "eager_ms")}
            rows.append(about | {"shape": "x".join(map(str, row["shape"])) if row else None} | found)
    return Recording(source_of(content["provenance"]), need("pandas").DataFrame(rows))


def kernels(path: str | os.PathLike[str]) -> Recording:
    """Load what `profile_kernels.py` saved: bucket, kernel, kind, count, us (of a replay), replay_us.

    Raises:
        FileError: another schema.
    """
    content = read_json(path, KERNELS)
    rows = [
        {"bucket": result["bucket"], "kernel": row["name"], **{name: row[name] for name in ("kind", "count", "us")}}
        | {"replay_us": result["replay_us"]["median"]}
        for result in content["results"]
        for row in result["rows"]
    ]
    return Recording(source_of(content["provenance"]), need("pandas").DataFrame(rows))
