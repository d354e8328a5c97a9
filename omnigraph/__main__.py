"""The shell's way in: `python -m omnigraph profile | plan | verify`, for machines without a browser."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from omnigraph import models
from omnigraph._export import to_vllm
from omnigraph._files import FileError, write_text
from omnigraph._vllm_omni import to_vllm_omni
from omnigraph.compare import verify
from omnigraph.decoder import GraphedDecoder
from omnigraph.planner import plan_buckets
from omnigraph.profile import Profile
from omnigraph.shapes import BucketPlan, Shape
from omnigraph.trace import Trace, load_calls

BUILT_IN: dict[str, Callable[[], torch.nn.Module]] = {
    "code2wav": lambda: models.code2wav("default"),
    "code2wav-small": lambda: models.code2wav("small"),
    "mimi": models.mimi,
    "encodec": models.encodec,
    "dac": models.dac,
    "tiny": models.tiny,
}
LENGTHS = (1, 2, 4, 8, 12, 16, 20, 25, 32, 40, 50, 64, 80, 97, 128, 160, 200, 256, 300, 325)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _shape(text: str) -> Shape:
    """A shape such as 4x25."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"a shape is BATCHxFRAMES, such as 4x25; got {text!r}")
    return Shape(int(found[1]), int(found[2]))


def _bytes(text: str) -> float:
    """Bytes such as 2GiB, 500MB or 1e9."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*(ki|mi|gi|k|m|g|)b?", text.lower())
    if not found:
        raise argparse.ArgumentTypeError(f"bytes are a number, with MiB, GiB, MB or GB if need be; got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def _compiled(text: str) -> str | Shape:
    return text if text == "all" else _shape(text)


def _load(args: argparse.Namespace) -> torch.nn.Module:
    """The module that the command line names, on its device.

    Raises:
        ValueError: no such name, or its factory fails or makes no module.
    """
    name: str = args.model
    try:
        if name in BUILT_IN:
            module: Any = BUILT_IN[name]()
        elif ":" in name:
            package, _, factory = name.partition(":")
            module = getattr(import_module(package), factory)()
        else:
            raise ValueError(f"a model is one of {', '.join(BUILT_IN)} or package.module:factory; got {name!r}")
    except Exception as error:
        raise error if isinstance(error, ValueError) else ValueError(f"{name}: {type(error).__name__}: {error}") from error
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"{name} must make a torch.nn.Module, it made {type(module).__name__}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    return module.to(device=torch.device(device), dtype=dtype).eval()


def _profile(args: argparse.Namespace) -> int:
    shapes = args.shapes or [Shape(b, f) for b in args.batches for f in args.lengths]
    found = Profile.measure(
        _load(args),
        shapes,
        compiled=args.compiled,
        num_quantizers=args.num_quantizers,
        codebook_size=args.codebook_size,
        repeats=args.repeats,
        seconds=args.seconds,
        resume=args.out,
    )
    print(found.to_frame().to_string(index=False, float_format="%.3f"))
    print(f"{found.save(args.out)}: {found!r}")
    for bucket, why in found.failed.items():
        print(f"no graph of {bucket}: {why}", file=sys.stderr)
    return 0


def _plan(args: argparse.Namespace) -> int:
    profile = Profile.load(args.profile)
    try:
        calls = load_calls(args.calls)
    except FileError as no_counts:
        try:
            calls = Trace.load(args.calls).calls(args.chunk_size, args.left_context_size, args.ramp)
        except FileError as no_trace:
            raise FileError(f"neither shape counts ({no_counts}) nor a trace ({no_trace})") from no_trace
    compiled: Literal["all"] | list[Shape] | None = "all" if "all" in args.compiled else args.compiled or None
    report = plan_buckets(calls, profile, args.max_graphs, args.max_bytes, args.max_seconds, compiled)
    print(report)
    if report.plan is None:
        asked = [path for path in (args.out, args.vllm, args.vllm_omni) if path]
        for path in asked:
            print(f"no plan: {path} is not written", file=sys.stderr)
        return 1 if asked else 0
    if args.out:
        print(f"plan: {report.plan.save(args.out)}")
    exports = [(args.vllm, to_vllm(report.plan))] if args.vllm else []
    if args.vllm_omni:
        chunks = {"chunk_size": args.chunk_size, "left_context_size": args.left_context_size, "ramp": args.ramp}
        exports.append((args.vllm_omni, to_vllm_omni(report.plan, **chunks)))
    for path, exported in exports:
        print(f"settings: {write_text(path, exported.text.rstrip() + chr(10))}")
        print("".join(f"  lost: {loss}\n" for loss in exported.losses), end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    plan = BucketPlan.load(args.plan)
    cost = Profile.load(args.profile).cost if args.profile else None
    buckets = sorted({b.shape for b in plan.buckets})
    shapes = args.shapes or sorted({*buckets, *(Shape(s.batch, s.frames - 1) for s in buckets if s.frames > 1)})
    with GraphedDecoder(_load(args), plan, num_quantizers=args.num_quantizers, codebook_size=args.codebook_size, cost=cost) as decoder:
        report = decoder.warmup()
        print(report)
        compared = verify(decoder, shapes)
    print(compared.to_frame().to_string(index=False))
    print(compared)
    return 0 if compared.ok and compared.replayed and not report.failed and not report.note else 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m omnigraph", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="profile | plan | verify")

    def command(name: str, work: Any, what: str, example: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=what,
            description=what,
            epilog=f"example: python -m omnigraph {name} {example}",
            formatter_class=argparse.RawTextHelpFormatter,
        )
        made.set_defaults(work=work)
        return made

    def model(to: argparse.ArgumentParser) -> None:
        to.add_argument("model", help=f"{', '.join(BUILT_IN)} or package.module:factory")
        to.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of the weights")
        to.add_argument("--device", help="such as cuda:1 (default: a GPU where there is one)")
        to.add_argument("--num-quantizers", type=int, help="where the module does not say")
        to.add_argument("--codebook-size", type=int, help="where the module does not say")

    measured = command(
        "profile",
        _profile,
        "Measure what each shape takes, eagerly and by replay.",
        "code2wav --dtype bfloat16 --batches 1 4 8 --compiled 1x25 --out h200.json",
    )
    model(measured)
    measured.add_argument("--out", type=Path, required=True, help="the profile; a file that exists is resumed")
    measured.add_argument("--shapes", type=_shape, nargs="+", help="BATCHxFRAMES, instead of batches by lengths")
    measured.add_argument("--batches", type=int, nargs="+", default=[1], help="batch sizes (default: 1)")
    measured.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="frames (default: 20 from 1 to 325)")
    measured.add_argument("--compiled", type=_shape, nargs="+", default=[], help="shapes to compile as well")
    measured.add_argument("--repeats", type=int, default=30, help="runs of each, at most (default: 30)")
    measured.add_argument("--seconds", type=float, help="stop after so long")

    planned = command(
        "plan",
        _plan,
        "Choose the buckets for a trace or a CSV of shape counts.",
        "trace.csv h200.json --max-graphs 5 --max-bytes 2GiB --out plan.json",
    )
    planned.add_argument("calls", type=Path, help="a trace (arrival, frames) or shape counts (batch, frames, count)")
    planned.add_argument("profile", type=Path, help="what `profile` wrote")
    planned.add_argument("--chunk-size", type=int, default=25, help="frames; how a trace is streamed (default: 25)")
    planned.add_argument("--left-context-size", type=int, default=25, help="frames (default: 25)")
    planned.add_argument("--ramp", type=int, nargs="+", default=[], help="frames of the first chunks")
    planned.add_argument("--max-graphs", type=int)
    planned.add_argument("--max-bytes", type=_bytes, help="of the pool, such as 2GiB")
    planned.add_argument("--max-seconds", type=float, help="of the warm-up")
    planned.add_argument("--compiled", type=_compiled, nargs="+", default=[], help='"all", or shapes that may be compiled')
    planned.add_argument("--out", type=Path, help="the plan, as JSON")
    planned.add_argument("--vllm-omni", type=Path, help="the plan as a YAML fragment for vLLM-Omni")
    planned.add_argument("--vllm", type=Path, help="the plan as vLLM's compilation_config")

    verified = command(
        "verify",
        _verify,
        "Compare replays with eager; exits with 1 where they differ, or where nothing was replayed.",
        "code2wav plan.json --dtype bfloat16",
    )
    model(verified)
    verified.add_argument("plan", type=Path, help="what `plan` wrote")
    verified.add_argument("--shapes", type=_shape, nargs="+", help="calls to compare (default: each bucket's, and one frame less)")
    verified.add_argument("--profile", type=Path, help="route by its times")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 where `verify` finds a difference or `plan` no plan to write, 2 for bad input."""
    args = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        try:
            code: int = args.work(args)
            return code
        except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
            print(f"omnigraph: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("omnigraph: interrupted", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
