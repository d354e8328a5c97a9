"""Measurements of decode graphs on Qwen-Image-2.1, for the notebook and for what is recorded on a GPU (`data/prefix/measure.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from omnigraph._needs import need
from omnigraph.compare import relative_error, within_rule
from omnigraph.models._qwen_adapter import QwenImageAdapter
from omnigraph.models.diffusion import decode, image_request, prefill
from omnigraph.prefix import DecodeGraphCache

if TYPE_CHECKING:
    import pandas as pd

    from omnigraph._prefix_entry import Entry

Row = dict[str, Any]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, and how many runs."""
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high, "runs": len(times)}


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """From launch to end of a call, the device idle before: eager steps are bound by their launches, and show it here."""
    times = []
    event: Any = torch.cuda.Event
    for _ in range(repeats + 3):
        if device.type == "cuda":
            start, end = event(enable_timing=True), event(enable_timing=True)
            torch.cuda.current_stream(device).synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    return spread(times[3:])


class Case:
    """A request of one branch after its prefill, in the middle of its denoising, and a cache for it."""

    def __init__(self, model: nn.Module, cache: DecodeGraphCache, target: int, text: int, *, seed: int = 0, register: bool = True) -> None:
        side = isqrt(target)
        self.model, self.cache = model, cache
        self.request = image_request(model, (side, target // side), text_tokens=text, seed=seed)
        self.device = self.request.latents.device
        self.time = torch.full((1,), 0.5, device=self.device)
        self.prefix = prefill(model, self.request, "conditional", self.request.latents, self.time)[1]
        if register:
            cache.register_prefill(self.prefix)

    def eager(self) -> Tensor:
        """The model's own cached call."""
        return decode(self.model, self.request, self.prefix, self.request.latents, self.time)

    def step(self) -> Tensor:
        """What the graph records, run uncaptured."""
        return self.cache.adapter.step(self.entry().buffers)

    def graph(self) -> Tensor:
        """The same by replay.

        Raises:
            RuntimeError: the cache sent it eager.
        """
        found = self.cache.try_decode(self.prefix, self.request.latents, self.time)
        if found is None:
            raise RuntimeError(f"not served by a graph: {dict(self.cache.stats.fallbacks)}")
        return found

    def either(self) -> Tensor:
        """By replay where the cache has one, else eagerly."""
        found = self.cache.try_decode(self.prefix, self.request.latents, self.time)
        return self.eager() if found is None else found

    def entry(self) -> Entry:
        """The entry that was used last."""
        return self.cache._entries.live[self.cache.keys[-1]]

    def in_precision_of(self, exact: nn.Module) -> Tensor:
        """The step by a copy of the model in another precision, from the same prefix."""
        kind = next(exact.parameters()).dtype
        texts = {name: text.to(kind) for name, text in self.request.texts.items()}
        request = replace(self.request, conditions=self.request.conditions.to(kind), texts=texts)
        prefix = replace(self.prefix, layers=tuple((k.to(kind), v.to(kind)) for k, v in self.prefix.layers))
        return decode(exact, request, prefix, self.request.latents.to(kind), self.time)


@torch.no_grad()
def step_times(
    model: nn.Module,
    targets: Sequence[int],
    *,
    text: int = 64,
    compiled: Collection[int] = (),
    exact: nn.Module | None = None,
    repeats: int = 20,
) -> Iterator[Row]:
    """Yield a row for each number of target tokens: a step's milliseconds by the model's own call, uncaptured, and by graphs.

    Args:
        text: prefix tokens.
        compiled: numbers of target tokens that get compiled blocks as well.
        exact: a copy of the model in higher precision, to judge the compiled ones by the design's rule: at most 1.1 times eager's error.
    """
    for target in targets:
        cache = DecodeGraphCache(QwenImageAdapter(model))
        case = Case(model, cache, target, text)
        row: Row = {"target": target, "prefix": text, "bitwise": torch.equal(case.graph(), case.eager())}
        for name in ("eager", "step", "graph"):
            row[f"{name}_ms"] = milliseconds(getattr(case, name), case.device, repeats)
        entry = case.entry()
        row |= {"capture_s": entry.seconds, "bytes": entry.nbytes, "graph_bytes": entry.nbytes - entry.buffers.nbytes}
        if target in compiled:
            faster = Case(model, DecodeGraphCache(QwenImageAdapter(model, compiled=True)), target, text)
            result = faster.graph()
            row |= {"compiled_ms": milliseconds(faster.graph, case.device, repeats), "compile_s": faster.entry().seconds}
            if exact is not None:
                reference = case.in_precision_of(exact)
                errors = relative_error(result, reference), relative_error(case.eager(), reference)
                row |= {"compiled_error": errors[0], "eager_error": errors[1], "within_rule": within_rule(*errors, result.dtype)}
            faster.cache.clear()
        cache.clear()
        yield row


def _each(cases: Sequence[Case]) -> None:
    for case in cases:
        case.either()


@torch.no_grad()
def contention_times(model: nn.Module, targets: Sequence[int], prefixes: Sequence[int], *, repeats: int = 20) -> Iterator[Row]:
    """Yield a row for each target and prefix length: two live requests on one key, a step of each in turn.

    `contention_refresh_ms` and `contention_eager_ms` are milliseconds of a step under either way, `copy_ms` those of one copy.
    """
    for target in targets:
        for text in prefixes:
            row: Row = {"target": target, "prefix": text}
            for way in ("refresh", "eager"):
                cache = DecodeGraphCache(QwenImageAdapter(model), contention=way)
                cases = [Case(model, cache, target, text, seed=seed) for seed in (1, 2)]
                pair = milliseconds(partial(_each, cases), cases[0].device, repeats)
                row[f"contention_{way}_ms"] = {name: value if name == "runs" else value / 2 for name, value in pair.items()}
                if way == "refresh":
                    case, entry = cases[0], cases[0].entry()
                    row["copy_ms"] = milliseconds(partial(entry.refresh, case.prefix), case.device, repeats)
                    row |= {"graph_ms": milliseconds(case.graph, case.device, repeats), "copy_bytes": case.prefix.nbytes}
                    row["eager_ms"] = milliseconds(case.eager, case.device, repeats)
                cache.clear()
            yield row


def to_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of measurements as a table: a median `x_ms` has its quartiles beside it, `x_ms_q1` and `x_ms_q3`."""
    flat = []
    for row in rows:
        found = {name: value for name, value in row.items() if not isinstance(value, Mapping)}
        for name, value in row.items():
            if isinstance(value, Mapping):
                found |= {name: value["median"], f"{name}_q1": value["q1"], f"{name}_q3": value["q3"]}
        flat.append(found)
    frame: pd.DataFrame = need("pandas").DataFrame(flat)
    return frame
