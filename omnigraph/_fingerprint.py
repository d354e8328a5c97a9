"""Whether a module is still what it was when its graphs were captured: asked before every replay, in tens of microseconds."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import repeat
from operator import is_not, itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

_REGISTERED = "_parameters", "_buffers", "_modules"
_ADAPTER = "scaling", "_active_adapter", "_disable_adapters", "merged_adapters"  # of peft's layers: numbers and names, baked by a capture


def _layout(value: object) -> str:
    if not isinstance(value, Tensor):
        return "none" if value is None else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"


def _has_address(value: object) -> bool:
    """False for subclasses that wrap other tensors (sharded, quantized): those are known by identity alone."""
    try:
        return isinstance(value, Tensor) and value.data_ptr() != 0
    except RuntimeError:
        return False


def _at(tensors: list[Tensor], addresses: list[int], places: list[int]) -> bool:
    """Are the tensors at these addresses? `places` counts them."""
    return [*map(Tensor.data_ptr, tensors)] == addresses


# A build for CUDA has this loop in C++, for Inductor's CUDA graphs.
_same: Callable[[list[Tensor], list[int], list[int]], bool] = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _at)


def _asks_for_training(kind: type) -> bool:
    """Does a method of this class, or of one that it inherits from, mention `training`?"""
    methods = [value for part in kind.__mro__ if part not in (nn.Module, object) for value in vars(part).values()]
    return any("training" in method.__code__.co_names for method in methods if isinstance(method, FunctionType))


def plain_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that a module's parts hold in plain attributes, and in the lists, tuples and dictionaries there: caches by shape, mostly.

    Also those of modules that stand in a plain list, which torch does not know of.

    A graph that read one reads its address for ever, so whoever captured it keeps the tensor alive.
    """
    found: list[Tensor] = []
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in _REGISTERED:
                inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
                for one in inside:
                    if isinstance(one, Tensor):
                        found.append(one)
                    elif isinstance(one, nn.Module) and one is not part:
                        found += [*one.parameters(), *one.buffers()]
    return found


def _is_adapted(part: nn.Module) -> bool:
    """Is it a layer that peft put around another? By name, so that peft is not imported."""
    return any(kind.__name__ == "BaseTunerLayer" for kind in type(part).__mro__)


class Fingerprint:
    """What a captured graph takes for granted about `module`: tensors at their addresses, structure, hooks and training mode.

    Every registered tensor, submodule and forward hook is compared by identity, every tensor by its address as well, in C-level loops
    over flat lists. In-place updates (an optimiser's step, `load_state_dict`) keep both: a graph reads the new values, so nothing has
    changed. Tensors are held until one is seen to have been replaced; from then on the module counts as changed. Where there are any,
    the packed weights of quantized layers are compared by identity, and the scale, choice and merging of peft's adapters by value. Not
    seen: other Python attributes, tensors among them, and `tensor.data` set to a view of itself at its address.

    >>> linear = nn.Linear(2, 2)
    >>> fingerprint = Fingerprint(linear)
    >>> fingerprint.changed() is None
    True
    >>> _ = linear.half()
    >>> fingerprint.changed()
    'weight moved: float32[2, 2] on cpu at the capture, float16[2, 2] on cpu now'

    Raises:
        TypeError: a scripted module, which keeps its tensors where Python cannot watch them.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = dict(module.named_modules())
        registered = [(path, kind, getattr(part, kind)) for path, part in modules.items() for kind in _REGISTERED]
        if not all(isinstance(entries, dict) for _, _, entries in registered):
            raise TypeError(f"cannot watch {type(module).__name__} for changes: pass the nn.Module that it was scripted from")
        self._paths = [(path, kind) for path, kind, entries in registered if entries]
        self._entries: list[dict[str, Any]] = [entries for _, _, entries in registered if entries]
        self._known = [dict(entries) for entries in self._entries]
        named = [(f"{p}.{n}".lstrip("."), t) for (p, _), entries in zip(self._paths, self._known, strict=True) for n, t in entries.items()]
        self._addressed: list[tuple[str, Tensor, str]] = [(name, t, _layout(t)) for name, t in named if _has_address(t)]
        self._tensors = [tensor for _, tensor, _ in self._addressed]
        self._addresses, self._order = [*map(Tensor.data_ptr, self._tensors)], [*range(len(self._tensors))]
        # Two tensors of one element may be equal without being the same.
        places = [(d, n) for d in self._entries for n, v in d.items() if isinstance(v, Tensor) and v.numel() == 1]
        self._single = [(entries, name, entries[name]) for entries, name in places]
        self._hooks = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
        self._hooks += [hooks for part in modules.values() for hooks in (part._forward_pre_hooks, part._forward_hooks)]
        self._known_hooks = [dict(hooks) for hooks in self._hooks]
        self._hooked = [(hooks, dict(hooks)) for hooks in self._hooks if hooks]
        self._hooks_made: int = RemovableHandle.next_id
        self._attributes = [part.__dict__ for part in modules.values()]
        self._forwards = [*map(dict.get, self._attributes, repeat("forward"))]
        self._overridden = any(self._forwards)
        self._counts = [*map(len, self._attributes)]
        asking = {kind for kind in {type(part) for part in modules.values()} if _asks_for_training(kind)}
        self._trainable = [part.__dict__ for part in modules.values() if part is module or type(part) in asking]
        self._training = [*map(itemgetter("training"), self._trainable)]
        packed = [(d, name, value) for d in self._attributes for name, value in d.items() if isinstance(value, torch.ScriptObject)]
        self._packed = [[*column] for column in zip(*packed, strict=True)]  # their dictionaries, names and values; empty where none
        adapted = [vars(part) for part in modules.values() if _is_adapted(part)]
        self._adapters = [(attributes, name) for attributes in adapted for name in _ADAPTER if name in attributes]
        self._adapted = [copy(attributes[name]) for attributes, name in self._adapters]
        self._replaced = ""

    def changed(self) -> str | None:
        """The first difference from the module as it was at construction, in words, or None."""
        if self._replaced:
            return self._replaced
        if not self._registered_as_known():
            self._replaced = self._what_was_replaced()
            self._known, self._tensors, self._addressed, self._single = [], [], [], []
            return self._replaced
        if not _same(self._tensors, self._addresses, self._order):
            moved = zip(self._addressed, self._addresses, strict=True)
            name, tensor, layout = next(one for one, address in moved if one[1].data_ptr() != address)
            return f"{name} moved: {layout} at the capture, {_layout(tensor)} now"
        if self._hooks_changed():
            return "forward hooks were added, removed or replaced"
        if [*map(itemgetter("training"), self._trainable)] != self._training:
            return "the training mode is another one"
        if self._forward_changed():
            return "a forward method was replaced"
        if self._packed and any(map(is_not, map(dict.get, *self._packed[:2]), self._packed[2])):
            return "packed weights were replaced"
        if self._adapters and [attributes.get(name) for attributes, name in self._adapters] != self._adapted:
            return "an adapter was scaled, switched or merged"
        return None

    def _registered_as_known(self) -> bool:
        """Dictionaries compare in C, values by identity first; only where that fails are tensors compared, and bool() of that raises."""
        try:
            same = self._entries == self._known
        except (RuntimeError, TypeError):
            return False
        return same and all(entries[name] is tensor for entries, name, tensor in self._single)

    def _what_was_replaced(self) -> str:
        for (path, kind), now, known in zip(self._paths, self._entries, self._known, strict=True):
            for name in known | now:
                then, there = known.get(name), now.get(name)
                if there is not then or (name in known) != (name in now):
                    if kind == "_modules":
                        return "submodules were added, removed or replaced"
                    if then is None:
                        return "a parameter or buffer that was None was set"
                    return f"{f'{path}.{name}'.lstrip('.')} is another tensor: {_layout(then)} at the capture, {_layout(there)} now"
        return "a parameter, buffer or submodule was added"

    def _hooks_changed(self) -> bool:
        """Each new hook takes a number, so while no number was given out only the hooks that were there can have gone."""
        if RemovableHandle.next_id != self._hooks_made:
            made: int = RemovableHandle.next_id
            if self._hooks != self._known_hooks:
                return True
            self._hooks_made = made
        return any(hooks != known for hooks, known in self._hooked)

    def _forward_changed(self) -> bool:
        """Offloading and caching hooks set `forward` on instances, in place of their class's: an attribute more."""
        counts = [*map(len, self._attributes)]
        if counts == self._counts and not self._overridden:
            return False
        if [*map(dict.get, self._attributes, repeat("forward"))] != self._forwards:
            return True
        self._counts = counts
        return False
