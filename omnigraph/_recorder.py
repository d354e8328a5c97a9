"""Watches a callable's ATen operations and host reads on a CPU: what a recording keeps, and what it must refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
# Methods that hand a CPU tensor's memory to Python; not all dispatch an operation, and some not when a constructor calls them.
_CONVERSIONS = ("tolist", "numpy", "cpu", "__array__", "__dlpack__", "__repr__", "__reduce_ex__", "__deepcopy__")
_NUMBERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__")
_HOST_READS = {getattr(torch.Tensor, name) for name in _CONVERSIONS + _NUMBERS}
# What reads tensors on the host only if they stand in a list of numbers, or as the second argument.
_CONSTRUCTORS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.Tensor.new}
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}
_BY_MASK = {aten.index.Tensor, aten.masked_select.default}  # the shape of the result depends on masks alone
_FACTORIES = {f"aten::{name}" for name in ("empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided")}
_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, type(None))

_active = threading.local()


def recording() -> bool:
    """Does this thread's work go into a recording now?"""
    return getattr(_active, "yes", False)


def refuse_within_a_recording() -> None:
    """A launch would write to memory that the recording takes for its own, or for constants."""
    if recording():
        raise RuntimeError("a replay cannot be captured: call the function that the graph was captured from")


class HostRead(RuntimeError):
    """The callable reads on the host what depends on its inputs; the first call's value would be baked in."""


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
    packet = getattr(aten, func._schema.name.removeprefix("aten::"), None)
    one = [str(r.type) for r in func._schema.returns] == ["Tensor"]
    for name in packet.overloads() if packet is not None and one else ():
        found = getattr(packet, name)
        arguments = found._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        if outs == ["out"] and [(a.name, str(a.type)) for a in arguments if not a.is_out] == taken:
            return found
    return None


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Reads(TorchFunctionMode):
    """Notices host reads that dispatch no operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read: object = ()
        if func in _HOST_READS:
            read = args[:1]
        elif func in _CONSTRUCTORS:
            read = [a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor)]
        elif func in _SPLITS:
            read = (args[1:], kwargs)
        if not (tensors := tensors_of(read)):
            return func(*args, **kwargs)
        baked = self.recorder.baked
        self.recorder.host_read(f"Tensor.{func.__name__}", tensors)
        result = func(*args, **kwargs)
        self.recorder.baked = baked + 1  # once, also where the operation that it dispatched counted too
        return result


class Recorder(TorchDispatchMode):
    """Runs a callable once and keeps its operations.

    `depends` holds the storages whose content depends on the inputs or on `state`; `baked` counts host reads of other ones;
    `changed` holds those written to that were there before.
    """

    def __init__(self, inputs: Iterable[torch.Tensor], state: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.steps: list[Step] = []
        self.baked = 0
        self.refused = ""
        self.fresh: dict[int, torch.UntypedStorage] = {}  # storages made by an operation
        self.inputs = {storage_of(t) for t in inputs}
        self.depends = self.inputs.union(state)
        self.changed: set[int] = set()
        self.lifted: set[int] = set()  # constants that each call makes anew, of Python data
        self.repeats = True  # another call on the same inputs gives the same
        self.keep: list[Any] = []  # every tensor seen: no storage may die, or its address would be given out again

    def host_read(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse a read of what depends on the inputs; count one of a constant.

        Raises:
            HostRead: the value depends on the inputs.
        """
        for tensor in tensors:
            if storage_of(tensor) in self.depends:
                self.refused = (
                    f"{what} reads a {tuple(tensor.shape)} {tensor.dtype} tensor that depends on the inputs, or on state that calls "
                    "change; a graph would bake this call's value into every later one. Keep the value in a tensor (torch.where, masks), "
                    "or read it outside"
                )
                raise HostRead(self.refused)
        self.baked += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default:  # what writes to such a constant must not change it
            self.lifted.add(storage_of(args[0]))
            func = aten.clone.default
        schema, given = func._schema, tensors_of((args, kwargs))
        read: Collection[torch.Tensor] = ()
        if torch.Tag.data_dependent_output in func.tags:
            read = given
        elif func in _BY_MASK:
            read = [t for t in tensors_of(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
        elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
            read = given
        if read:
            self.host_read(str(func), read)
        result = func(*args, **kwargs)
        self.keep.append((args, kwargs, result))
        if torch.Tag.inplace_view in func.tags:
            return result  # it changed what a tensor shows; steps hold tensors as they were when it ran
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        before = {storage_of(t) for t in given}
        made = tuple((i, t) for i, t in enumerate(results) if isinstance(t, torch.Tensor) and storage_of(t) not in before)
        written = {
            storage_of(value)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in tensors_of(kwargs.get(argument.name) if i >= len(args) or argument.kwarg_only else args[i])
        }
        if before & self.depends:
            self.depends.update(written, (storage_of(t) for _, t in made))
        self.changed |= written - self.fresh.keys() - self.inputs
        self.repeats &= torch.Tag.nondeterministic_seeded not in func.tags and written <= self.fresh.keys()
        self.fresh.update((storage_of(t), t.untyped_storage()) for _, t in made)
        if schema.name in _FACTORIES:
            return result
        if made or written:
            args, kwargs, made = tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), kwargs, made))
            into = _into(func) if made and not written else None
            if into is not None:
                self.steps.append(Step(into, args, {**kwargs, "out": made[0][1]}, ()))
            else:
                self.steps.append(Step(func, args, kwargs, made))
        return result

    def constants(self, outputs: object) -> dict[int, torch.UntypedStorage]:
        """The storages that were there before and are read, written to or returned."""
        seen = [t.untyped_storage() for t in tensors_of((outputs, [(s.args, s.kwargs, s.made) for s in self.steps]))]
        own = self.fresh.keys() | self.inputs | self.lifted
        return {int(storage._cdata): storage for storage in seen if storage._cdata not in own}


def _record(fn: Callable[..., Any], inputs: Sequence[Any], state: Iterable[int] = ()) -> tuple[Recorder, Any]:
    recorder = Recorder(tensors_of(inputs), state)
    outer, _active.yes = recording(), True
    try:
        with _Reads(recorder), recorder:
            outputs = fn(*inputs)
    finally:
        _active.yes = outer
    if recorder.refused:
        raise HostRead(recorder.refused)  # the callable caught it, and went another way than it does outside
    for leaf in tree_flatten(outputs)[0]:
        if not isinstance(leaf, _PLAIN):
            raise TypeError(
                f"the callable returned a {type(leaf).__name__}, in which no replay finds tensors: return tuples, lists or dicts"
            )
    return recorder, outputs


def settle(fn: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Recorder, Any]:
    known, state = _constants(fn, inputs)
    for _ in range(2):
        recorder, outputs = _record(fn, inputs, state)
        found = recorder.constants(outputs)
        if found.keys() == known.keys():
            return recorder, outputs
        known, state = found, recorder.changed
    raise RuntimeError("each call works on a tensor that no recorded operation made (deepcopy?): clone an existing one instead")


def _constants(fn: Callable[..., Any], inputs: Sequence[Any]) -> tuple[dict[int, torch.UntypedStorage], set[int]]:
    """A first look, of which nothing else is kept: all intermediate tensors of two calls at once could be too much."""
    recorder, outputs = _record(fn, inputs)
    return recorder.constants(outputs), recorder.changed
