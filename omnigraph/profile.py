"""What each shape takes on one device, eagerly and by replay: measured, saved, and interpolated between the measured shapes."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from omnigraph._files import FileError, read_json, write_json
from omnigraph._html import table
from omnigraph._measure import measure_points
from omnigraph._needs import need
from omnigraph._points import Point, Surface
from omnigraph._provenance import differences, identity, provenance
from omnigraph._warmup import Progress
from omnigraph.shapes import Bucket, How, Shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from pandas import DataFrame

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

SCHEMA = "omnigraph.profile/1"
Measured = Literal["ms", "bytes_alone", "bytes_marginal", "seconds"]


@dataclass(frozen=True)
class Profile:
    """Measured points of one model on one device.

    `made_for` says which model, config, dtype and device; `failed` holds the graphs that could not be made, and why.

    Raises:
        ValueError: there is no point, a time is not positive, or a shape is listed twice for the same way of running it.
    """

    points: tuple[Point, ...]
    made_for: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    _memo: dict[tuple[Shape, How], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not any(point.how == "eager" for point in self.points):
            raise ValueError("a profile needs at least one shape measured eagerly")
        seen: set[tuple[Shape, How]] = set()
        for p in self.points:
            numbers = (p.ms, p.spread, p.bytes_alone, p.bytes_marginal, p.seconds)
            if not all(math.isfinite(n) and n >= 0 for n in numbers) or not p.ms or p.repeats < 1 or min(p.shape) < 1:
                raise ValueError(f"{p.shape} {p.how}: times, bytes and counts are finite and not negative, and ms is above 0; got {p}")
            if (p.shape, p.how) in seen:
                raise ValueError(f"{p.shape} {p.how} is listed more than once")
            seen.add((p.shape, p.how))
        object.__setattr__(self, "points", tuple(sorted(self.points, key=lambda p: (p.shape, get_args(How).index(p.how)))))

    @classmethod
    def measure(
        cls,
        module: torch.nn.Module,
        shapes: Iterable[Sequence[int]],
        *,
        compiled: Iterable[Sequence[int]] = (),
        num_quantizers: int | None = None,
        codebook_size: int | None = None,
        repeats: int = 30,
        seconds_each: float = 0.5,
        seconds: float | None = None,
        resume: str | os.PathLike[str] | None = None,
        progress: bool | Progress = True,
        backend: str = "auto",
    ) -> Profile:
        """Time `module` at `shapes`, eagerly and by replay, and by compiled replay at those in `compiled`.

        Times are those of a whole call on fresh random codes: a replay is copy in, launch, copy out. CUDA events time a GPU, the
        clock a CPU. `repeats` is the most that are taken of each; fewer where they would take longer than `seconds_each`, at
        least 5. Shapes go from the largest to the smallest, so that marginal bytes are those of a warm-up.

        `resume` names a file: what it holds is not measured again, and it is saved after every shape. An interrupt (the
        stop button, Ctrl-C) or the end of `seconds` keeps what there is. A progress bar says what is being measured; or `progress`
        is a function, as of `GraphedDecoder.warmup`, that is told so and may raise to stop.

        Raises:
            FileError: the file to resume is another model's, dtype's or device's.
            ValueError: a shape or limit is out of range, or nobody says how many quantizers or codes there are.
        """
        made_for = identity(module)
        known: tuple[Point, ...] = ()
        failed: dict[str, str] = {}
        if resume is not None and Path(resume).exists():
            before = cls.load(resume)
            differing = differences(dict(before.made_for), module)
            if differing:
                raise FileError(f"{resume}: cannot be resumed, it was measured with {'; '.join(differing)}")
            known, failed = before.points, dict(before.failed)
        points: dict[tuple[Shape, How], Point] = {(p.shape, p.how): p for p in known}
        method = f"median of up to {repeats} calls on random codes, spread is the interquartile range"
        about = provenance(module, method=method)

        def so_far() -> Profile:
            return cls(tuple(points.values()), made_for, about, failed)

        work = measure_points(
            module,
            [Shape(*s) for s in shapes],
            [Shape(*s) for s in compiled],
            skip=frozenset(points),
            num_quantizers=num_quantizers,
            codebook_size=codebook_size,
            repeats=repeats,
            seconds_each=seconds_each,
            seconds=seconds,
            progress=progress,
            backend=backend,
        )
        try:
            for found in work:
                if isinstance(found, Point):
                    points[found.shape, found.how] = found
                    failed.pop(str(Bucket(found.shape, found.how == "compiled")), None)
                else:
                    failed[str(found[0])] = found[1]
                if resume is not None and points:
                    so_far().save(resume)
        except KeyboardInterrupt:
            if not points:
                raise
            warnings.warn(f"interrupted: the profile holds the {len(points)} points measured so far", stacklevel=2)
        finally:
            work.close()
        return so_far()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile as JSON (schema omnigraph.profile/1)."""
        about = {name: dict(getattr(self, name)) for name in ("made_for", "provenance", "failed")}
        return write_json(path, SCHEMA, {**about, "points": [asdict(p) for p in self.points]})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what `save` wrote.

        Raises:
            FileError: another schema, or points that cannot have been measured.
        """
        content = read_json(path, SCHEMA)
        try:
            points = [Point(**{**p, "shape": Shape(*map(index, p["shape"]))}) for p in content["points"]]
            strange = [p.how for p in points if p.how not in get_args(How)]
            if strange:
                raise ValueError(f"expected eager, plain or compiled, got {strange[0]!r}")
            if any(isinstance(n, bool) for p in content["points"] for n in (*p["shape"], *p.values())):
                raise ValueError("expected numbers, got true or false")
            about = ({str(k): str(v) for k, v in content[name].items()} for name in ("made_for", "provenance", "failed"))
            return cls(tuple(points), *about)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise FileError(f"{path}: not a profile: {error}") from error

    def check(self, module: torch.nn.Module) -> list[str]:
        """Warn where `module` differs in model, config, dtype or device from what was measured; returns what differs."""
        differing = differences(dict(self.made_for), module)
        if differing:
            warnings.warn(f"this profile was measured with {'; '.join(differing)}", stacklevel=2)
        return differing

    def _of(self, how: How) -> dict[Shape, Point]:
        return {p.shape: p for p in self.points if p.how == how}

    @cached_property
    def eager(self) -> dict[Shape, Point]:
        return self._of("eager")

    @cached_property
    def plain(self) -> dict[Shape, Point]:
        return self._of("plain")

    @cached_property
    def compiled(self) -> dict[Shape, Point]:
        return self._of("compiled")

    @cached_property
    def _surfaces(self) -> dict[tuple[How, Measured], Surface]:
        ways: tuple[tuple[How, dict[Shape, Point]], ...] = (("eager", self.eager), ("plain", self.plain), ("compiled", self.compiled))
        return {
            (how, what): Surface({s: float(getattr(p, what)) for s, p in points.items()})
            for how, points in ways
            for what in get_args(Measured)
            if points
        }

    def at(self, shapes: Sequence[Shape], how: How, what: Measured = "ms") -> tuple[Floats, Bools]:
        """A measured quantity at each of `shapes`, interpolated where need be, and which of them are extrapolated.

        Raises:
            ValueError: nothing was measured that way.
        """
        np = need("numpy")
        if (how, what) not in self._surfaces:
            raise ValueError(f"this profile has no {how} times: measure it with shapes for {how}")
        batch, frames = np.array(shapes, dtype=float).reshape(-1, 2).T
        return self._surfaces[how, what].at(batch, frames)

    def costs(self, shapes: Sequence[Shape], how: How) -> Floats:
        """Milliseconds of one call of each of `shapes`; warns, once, where it extrapolates."""
        values, outside = self.at(shapes, how)
        if outside.any() and not self.__dict__.get("_warned"):
            object.__setattr__(self, "_warned", True)
            first = next(s for s, out in zip(shapes, outside, strict=True) if out)
            warnings.warn(f"{first} {how} lies outside the measured shapes: its time is extrapolated, others may be too", stacklevel=2)
        return values

    def cost(self, shape: Shape, how: How) -> float:
        """Milliseconds of one call: as measured, or interpolated (see `Surface`); the cost function that `route` takes."""
        known = self._memo.get((shape, how))
        if known is None:
            known = self._memo[shape, how] = float(self.costs([shape], how)[0])
        return known

    def extrapolates(self, shape: Shape, how: How = "eager") -> bool:
        """Whether the time of `shape` lies outside what was measured."""
        return bool(self.at([shape], how)[1][0])

    def nbytes(self, shape: Shape, compiled: bool = False, *, alone: bool = False) -> int:
        """Bytes that a graph adds to a pool that holds larger ones; `alone`: that it takes in a pool of its own."""
        return round(float(self.at([shape], "compiled" if compiled else "plain", "bytes_alone" if alone else "bytes_marginal")[0][0]))

    def seconds(self, shape: Shape, compiled: bool = False) -> float:
        """Seconds that the warm-up of a graph takes: first run, compilation, capture."""
        return float(self.at([shape], "compiled" if compiled else "plain", "seconds")[0][0])

    def each(self, buckets: Sequence[Bucket], what: Measured = "ms") -> Floats:
        """A measured quantity of the graph of each of `buckets`, interpolated where need be."""
        np = need("numpy")
        values: Floats = np.zeros(len(buckets))
        ways: tuple[How, How] = ("plain", "compiled")
        for how in ways:
            these = [i for i, bucket in enumerate(buckets) if bucket.compiled == (how == "compiled")]
            if these:
                values[these] = self.at([buckets[i].shape for i in these], how, what)[0]
        return values

    def pool_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Bytes of the pool that `buckets` share: one stands for all the scratch memory, the others add what is their own.

        That one is whichever makes the sum largest; in practice the largest bucket.
        """
        own, alone = self.each(buckets, "bytes_marginal"), self.each(buckets, "bytes_alone")
        return round(float(own.sum() + (alone - own).max(initial=0.0)))

    def warmup_seconds(self, buckets: Sequence[Bucket]) -> float:
        """Seconds to warm up all of `buckets`, one after the other."""
        return float(self.each(buckets, "seconds").sum())

    def to_frame(self) -> DataFrame:
        """One row a point: batch, frames, how, ms, spread, repeats, mib_alone, mib_marginal, seconds, speedup over eager."""
        rows: list[dict[str, Any]] = [
            {
                "batch": p.shape.batch,
                "frames": p.shape.frames,
                "how": p.how,
                "ms": p.ms,
                "spread": p.spread,
                "repeats": p.repeats,
                "mib_alone": p.bytes_alone / 2**20,
                "mib_marginal": p.bytes_marginal / 2**20,
                "seconds": p.seconds,
                "speedup": self.eager[p.shape].ms / p.ms if p.shape in self.eager else float("nan"),
            }
            for p in self.points
        ]
        frame: DataFrame = need("pandas").DataFrame(rows)
        return frame

    def __repr__(self) -> str:
        about = ", ".join(self.made_for.values()) or "unnamed"
        return f"<Profile of {about}: {len(self.eager)} shapes eager, {len(self.plain)} plain, {len(self.compiled)} compiled>"

    def _repr_html_(self) -> str:
        ways = (self.eager, self.plain, self.compiled)
        rows = [
            [shape, *(points[shape].ms if shape in points else "" for points in ways)] for shape in sorted({p.shape for p in self.points})
        ]
        about = ", ".join(f"{name} {self.provenance[name]}" for name in ("device", "torch", "date") if name in self.provenance)
        failed = [f"no graph of {bucket}: {why}" for bucket, why in [*self.failed.items()][:5]]
        return table(repr(self)[1:-1], ["call", "eager ms", "replay ms", "compiled ms"], rows, [about, *failed])
