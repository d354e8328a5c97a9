"""Count what a call of Code2Wav has to do: operations, and bytes of memory read and written, for each shape.

    python data/bench/count_work.py [data/bench/work_code2wav.json] [--size small]

Nothing is computed: the module is on torch's meta device, so that the full-size one takes no memory and seconds. Operations are twice
the multiplications of matrix products, convolutions and attention, by `torch.utils.flop_counter`'s formulas. Bytes are counted
op by op, as eager runs them: what each reads and writes, views for nothing, broadcast inputs and gathered rows once. Attention is
taken for one kernel, as on CUDA. Caches between kernels can spare a real run some of it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

import omnigraph as og
from omnigraph._files import write_json
from omnigraph._provenance import provenance

SCHEMA = "omnigraph.bench.work/1"
METHOD = "on the meta device; operations by torch.utils.flop_counter's formulas; bytes read and written op by op, as eager runs them"
SHAPES = [(b, f) for b in (1, 8) for f in (4, 25, 50, 97, 325)]
aten = torch.ops.aten
FREE = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten._unsafe_view, aten.lift_fresh, aten.detach, aten.alias}
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}


def touched(tensor: Tensor) -> int:
    """Bytes of the elements behind a tensor: those of a broadcast one are there once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


class Work(TorchDispatchMode):
    """Sums ops, operations and bytes of what is dispatched under it, by kind: "convolution", "product", "attention", "other"."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"ops": 0, "flops": 0, "bytes": 0})
        self.audio = torch.empty(0)

    def count(self, kind: str, tensors: Sequence[Any], flops: int) -> None:
        of = self.kinds[kind]
        of["ops"] += 1
        of["flops"] += flops
        of["bytes"] += sum(map(touched, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs, op = kwargs or {}, func.overloadpacket
        if op is aten._local_scalar_dense and args[0].is_meta:
            return True  # the one host read there is: whether the positions are those of one sequence, which they are
        result = func(*args, **kwargs)
        if func.is_view or op in FREE:
            return result
        given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if op is aten.embedding:
            given = {id(args[1]): args[1], 0: result}  # the rows that it gathers
        if op in (aten.copy_, aten.fill_, aten.zero_):
            given.pop(id(args[0]))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        flops = flop_registry[op](*args, **kwargs, out_val=result) if op in flop_registry else 0
        kind = "convolution" if op is aten.convolution else "product" if op in PRODUCTS else "other"
        self.count(kind, [*given.values(), *made], flops)
        return result


class FusedAttention(TorchFunctionMode):
    """Counts attention as one kernel that reads queries, keys, values and mask, and writes the output."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        result = torch.empty_like(query)
        tensors = [query, key, value, result, *([] if mask is None else [mask])]
        self.work.count("attention", tensors, sdpa_flop_count(query.shape, key.shape, value.shape))
        return result


@torch.no_grad()
def work_of(module: torch.nn.Module, shape: Sequence[int], num_quantizers: int, attention: bool = True) -> Work:
    """What one call does; with `attention` as one kernel."""
    device = next(module.parameters()).device
    codes = torch.zeros((shape[0], num_quantizers, shape[1]), dtype=torch.int64, device=device)
    work = Work()
    with FusedAttention(work) if attention else torch.no_grad(), work:
        work.audio = module(codes)
    return work


def row_of(module: torch.nn.Module, shape: Sequence[int], num_quantizers: int) -> dict[str, Any]:
    """A shape's work: `bytes` as eager runs it, `bytes_fused` with all else fused into convolutions, products and attention, and
    `bytes_least` if nothing but weights, codes and audio were moved.
    """
    work = work_of(module, shape, num_quantizers)
    kinds = {kind: dict(of) for kind, of in sorted(work.kinds.items())}
    total = {what: sum(of[what] for of in kinds.values()) for what in ("ops", "flops", "bytes")}
    embedding = module.get_submodule("code_embedding").weight
    weights = sum(p.nbytes for p in module.parameters()) - embedding.nbytes
    codes = shape[0] * shape[1] * num_quantizers
    least = weights + codes * (8 + embedding[0].nbytes) + work.audio.nbytes
    fused = sum(of["bytes"] for kind, of in kinds.items() if kind != "other")
    return {"shape": list(shape), **total, "bytes_fused": fused, "bytes_least": least, "kinds": kinds}


def on_meta(size: str, dtype: torch.dtype, make: Callable[..., torch.nn.Module] = og.models.code2wav) -> torch.nn.Module:
    """Code2Wav of one of the library's sizes without memory: its class and config, no weights."""
    small = make("small") if size == "small" else None
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe, modeling_qwen3_omni_moe

    config = small.config if small is not None else configuration_qwen3_omni_moe.Qwen3OmniMoeCode2WavConfig()
    with torch.device("meta"):
        return modeling_qwen3_omni_moe.Qwen3OmniMoeCode2Wav(config).requires_grad_(False).eval().to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent / "work_code2wav.json")
    parser.add_argument("--size", choices=("default", "small"), default="default")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    module = on_meta(args.size, getattr(torch, args.dtype))
    rows = [row_of(module, shape, module.config.num_quantizers) for shape in SHAPES]
    for row in rows:
        sizes = ", ".join(f"{row[name] / 2**20:,.0f} MiB {name}" for name in ("bytes", "bytes_fused", "bytes_least"))
        print(f"{'x'.join(map(str, row['shape'])):>6}: {row['ops']} ops, {row['flops'] / 1e9:,.1f} GFLOP, {sizes}")
    print(write_json(args.out, SCHEMA, {"provenance": provenance(module, method=METHOD), "rows": rows}))


if __name__ == "__main__":
    main()
