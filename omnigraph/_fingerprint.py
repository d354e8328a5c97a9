"""Whether a module is still what it was when its graphs were captured: asked before every replay, in tens of microseconds."""

from __future__ import annotations

from itertools import chain, compress, repeat, starmap
from operator import call, is_
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_SAME_IN_TRAINING = {nn.Linear, nn.Conv1d, nn.ConvTranspose1d, nn.LayerNorm, nn.Embedding, nn.ModuleList, nn.Sequential, nn.SiLU, nn.GELU}


def _layout(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _has_address(tensor: Tensor) -> bool:
    """False for subclasses that wrap other tensors (sharded, quantized): those are known by identity alone."""
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


class Fingerprint:
    """What a captured graph takes for granted about `module`: tensors at their addresses, structure, hooks and training mode.

    Every registered tensor, submodule and forward hook is compared by identity, every tensor by its address as well, in C-level loops
    over flat lists. In-place updates (an optimiser's step, `load_state_dict`) keep both: a graph reads the new values, so nothing has
    changed. Tensors are held weakly. Not seen: tensors in plain attributes, and `tensor.data` set to a view of itself at its address.

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
        if not all(isinstance(part._parameters, dict) and isinstance(part._modules, dict) for part in modules.values()):
            raise TypeError(f"cannot watch {type(module).__name__} for changes: pass the nn.Module that it was scripted from")
        kinds: list[tuple[str, dict[str, Any]]] = [(p, d) for p, part in modules.items() for d in (part._parameters, part._buffers)]
        found = [(f"{path}.{name}".lstrip("."), name, kind) for path, kind in kinds for name in kind]
        self._names = [path for path, key, kind in found if kind[key] is not None]
        self._places = [(kind, key) for _, key, kind in found if kind[key] is not None]
        self._absent = [(kind, key) for _, key, kind in found if kind[key] is None]
        tensors = self._tensors()
        self._refs, self._layouts = [*map(ref, tensors)], [*map(_layout, tensors)]
        self._addressed = [*map(_has_address, tensors)]
        self._addresses = self._addresses_of(tensors)
        self._child_dicts = [part._modules for part in modules.values() if part._modules]
        self._children = self._children_now()
        hooks: list[dict[int, Any]] = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
        hooks += [kind for part in modules.values() for kind in (part._forward_pre_hooks, part._forward_hooks)]
        self._bare, self._hooked = [kind for kind in hooks if not kind], [kind for kind in hooks if kind]
        self._hooks = self._hooks_now()
        self._attributes = [part.__dict__ for part in modules.values()]
        self._overridden = self._overrides_now()
        self._trainable = [part.__dict__ for part in modules.values() if type(part) not in _SAME_IN_TRAINING]
        self._training = self._training_now()

    def changed(self) -> str | None:
        """The first difference from the module as it was at construction, in words, or None."""
        tensors = self._tensors()
        if not all(map(is_, tensors, map(call, self._refs))) or any(map(is_, tensors, repeat(None))):
            for name, tensor, known, layout in zip(self._names, tensors, self._refs, self._layouts, strict=True):
                if tensor is None or tensor is not known():
                    return f"{name} is another tensor: {layout} at the capture, {'none' if tensor is None else _layout(tensor)} now"
        if self._addresses_of(tensors) != self._addresses:
            addressed = compress(zip(self._names, tensors, self._layouts, strict=True), self._addressed)
            name, tensor, layout = next(one for one, old in zip(addressed, self._addresses, strict=True) if one[1].data_ptr() != old)
            return f"{name} moved: {layout} at the capture, {_layout(tensor)} now"
        if not all(map(is_, starmap(dict.get, self._absent), repeat(None))):
            return "a parameter or buffer that was None was set"
        if self._children_now() != self._children:
            return "submodules were added, removed or replaced"
        if any(self._bare) or self._hooks_now() != self._hooks:
            return "forward hooks were added, removed or replaced"
        if self._training_now() != self._training:
            return "the training mode is another one"
        if self._overrides_now() != self._overridden:
            return "a forward method was replaced"
        return None

    def _tensors(self) -> list[Any]:
        return [*starmap(dict.get, self._places)]

    def _addresses_of(self, tensors: list[Any]) -> list[int]:
        return [*map(Tensor.data_ptr, compress(tensors, self._addressed))]

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._child_dicts))]

    def _hooks_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._hooked))]

    def _training_now(self) -> list[bool | None]:
        return [*map(dict.get, self._trainable, repeat("training"))]

    def _overrides_now(self) -> list[Any]:
        """The forward methods set on instances, as offloading and caching hooks do, in place of their classes'."""
        return [*filter(None, map(dict.get, self._attributes, repeat("forward")))]
