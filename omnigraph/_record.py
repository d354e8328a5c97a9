"""The CPU's graph: the ATen operations that a callable dispatched, run again on the same memory.

Like a CUDA graph a recording knows addresses, not names: static inputs, weights and constants are read where they were, results
are written where they were, and Python does not run again. A host read of a value that depends on the inputs cannot be recorded.
Intermediate tensors share blocks of an arena, which the recordings of one owner share in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

_HOST_READS = {  # methods that hand a CPU tensor's memory to Python without dispatching an operation
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "cpu", "__array__", "__dlpack__", "__repr__", "__reduce_ex__")
}
_FACTORIES = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}


_active = threading.local()


def recording() -> bool:
    """Does this thread's work go into a recording now?"""
    return getattr(_active, "yes", False)


class HostRead(RuntimeError):
    """The callable reads on the host what depends on its inputs; the first call's value would be baked in."""


class Arena:
    """Blocks of memory that recordings use in turn: what one replay leaves there, the next may overwrite."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def take(self, nbytes: int, free: list[torch.Tensor]) -> torch.Tensor:
        """The smallest of the `free` blocks that holds `nbytes`, or a new block."""
        fits = [i for i, block in enumerate(free) if block.nbytes >= nbytes]
        if fits:
            return free.pop(min(fits, key=lambda i: free[i].nbytes))
        self.blocks.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.blocks[-1]


class Step(NamedTuple):
    """One operation, and the tensors that its newly made results are copied into."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, torch.Tensor], ...]


@cache
def _into(func: Any) -> Any:
    """The overload of an operation that writes its one result into `out`, or None.

    >>> _into(torch.ops.aten.add.Tensor)
    <OpOverload(op='aten.add', overload='out')>
    """
    taken = [(a.name, str(a.type)) for a in func._schema.arguments]
    packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::"), None)
    for name in packet.overloads() if packet is not None and len(func._schema.returns) == 1 else ():
        found = getattr(packet, name)
        arguments = found._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        if outs == ["out"] and [(a.name, str(a.type)) for a in arguments if not a.is_out] == taken:
            return found
    return None


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Reads(TorchFunctionMode):
    """Notices host reads that dispatch no operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            self.recorder.host_read(f"Tensor.{func.__name__}", args[:1])
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Runs a callable once and keeps its operations.

    `depends` holds the storages whose content depends on the inputs; `baked` counts host reads of other ones.
    """

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.baked = 0
        self.fresh: dict[int, int] = {}  # storages made by an operation, and their bytes
        self.depends = {_storage(t) for t in inputs}
        self.keep: list[Any] = []  # every tensor seen: no storage may die, or its address would be given out again

    def host_read(self, what: str, args: object) -> None:
        """Refuse a read of what depends on the inputs; count one of a constant.

        Raises:
            HostRead: the value depends on the inputs.
        """
        for tensor in tensors_of(args):
            if _storage(tensor) in self.depends:
                raise HostRead(
                    f"{what} reads a {tuple(tensor.shape)} {tensor.dtype} tensor that depends on the inputs; a graph would bake "
                    "this call's value into every later one. Keep the value in a tensor (torch.where, masks), or read it outside"
                )
        self.baked += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if torch.Tag.data_dependent_output in func.tags:
            self.host_read(str(func), given)
        elif torch.Tag.dynamic_output_shape in func.tags:
            masks = [t for t in tensors_of(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
            if func is not torch.ops.aten.index.Tensor or masks:
                self.host_read(f"{func} (a shape that depends on values)", given)
        result = func(*args, **kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        before = {_storage(t) for t in given}
        made = tuple((i, t) for i, t in enumerate(results) if isinstance(t, torch.Tensor) and _storage(t) not in before)
        schema = func._schema
        written = [
            _storage(value)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in tensors_of(kwargs.get(argument.name) if i >= len(args) or argument.kwarg_only else args[i])
        ]
        if before & self.depends:
            self.depends.update(_storage(t) for _, t in made)
            self.depends.update(written)
        self.fresh.update((_storage(t), t.untyped_storage().nbytes()) for _, t in made)
        self.keep.append((args, kwargs, result))
        if (made and schema.name not in _FACTORIES) or written:
            into = _into(func) if made and not written else None
            if into is not None:
                self.steps.append(Step(into, tuple(args), {**kwargs, "out": made[0][1]}, ()))
            else:
                self.steps.append(Step(func, tuple(args), kwargs, made if schema.name not in _FACTORIES else ()))
        return result


class Recording:
    """A callable's operations on fixed memory. `launch` runs them; `outputs` is where the results are.

    Raises:
        HostRead: the callable reads on the host what depends on `inputs`.
    """

    def __init__(self, fn: Callable[..., Any], inputs: Sequence[Any], arena: Arena) -> None:
        recorder = Recorder(tensors_of(inputs))
        outer, _active.yes = recording(), True
        try:
            with _Reads(recorder), recorder:
                outputs = fn(*inputs)
        finally:
            _active.yes = outer
        placed = _place(recorder, tensors_of(outputs), arena)
        moved: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            block = placed.get(_storage(tensor))
            if block is None:
                return tensor
            if id(tensor) not in moved:
                there = torch.empty(0, dtype=tensor.dtype)
                moved[id(tensor)] = there.set_(block.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            return moved[id(tensor)]

        self.baked = recorder.baked
        self.steps = [Step(s.run, *tree_map_only(torch.Tensor, move, (s.args, s.kwargs, s.made))) for s in recorder.steps]
        results = tensors_of(outputs)
        self.outputs = tree_map_only(torch.Tensor, move, outputs)
        for now, then in zip(tensors_of(self.outputs), results, strict=True):
            now.copy_(then)

    def launch(self) -> None:
        """Run the operations again."""
        for run, args, kwargs, made in self.steps:
            result = run(*args, **kwargs)
            for i, there in made:
                there.copy_(result[i] if isinstance(result, (tuple, list)) else result)


def _place(recorder: Recorder, outputs: Sequence[torch.Tensor], arena: Arena) -> dict[int, torch.Tensor]:
    """A block of the arena for each storage that the recording makes; storages that do not live at the same time may share one."""
    steps = [{_storage(t) for t in tensors_of((s.args, s.kwargs, s.made))} & recorder.fresh.keys() for s in recorder.steps]
    last = {storage: i for i, used in enumerate(steps) for storage in used}
    last.update((_storage(t), len(steps)) for t in outputs if _storage(t) in recorder.fresh)
    free, placed = list(arena.blocks), dict[int, torch.Tensor]()
    for i, used in enumerate(steps):
        for storage in sorted(used - placed.keys(), key=lambda s: -recorder.fresh[s]):
            placed[storage] = arena.take(recorder.fresh[storage], free)
        free += [placed[storage] for storage in used if last[storage] == i]
    return placed
