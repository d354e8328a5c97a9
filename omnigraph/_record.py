"""The CPU's graph: the ATen operations that a callable dispatched, run again on the same memory.

Like a CUDA graph a recording knows addresses, not names: static inputs, weights and constants are read where they were, results
are written where they were, and Python does not run again. A host read of a value that depends on the inputs cannot be recorded.
Intermediate tensors share blocks of an arena, which the recordings of one owner share in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from omnigraph._recorder import Recorder, Step, refuse_within_a_recording, settle, storage_of, tensors_of


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
        self.blocks.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        return self.blocks[-1]


class Recording:
    """A callable's operations on fixed memory. `launch` runs them; `outputs` is where the results are, from the first launch on.

    The callable runs twice, or a third time where it filled caches, until two calls find the same constants. The state that it changes
    is known in the second one, and must not be read on the host either.

    Raises:
        HostRead: the callable reads on the host what depends on `inputs`.
        RuntimeError: it works on memory that each call makes out of the recorder's sight.
    """

    def __init__(self, fn: Callable[..., Any], inputs: Sequence[Any], arena: Arena) -> None:
        recorder, outputs = settle(fn, inputs)
        placed = _place(recorder, tensors_of(outputs), arena)
        moved: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            block = placed.get(storage_of(tensor))
            if block is None:
                return tensor
            if id(tensor) not in moved:
                there = torch.empty(0, dtype=tensor.dtype, device="cpu")
                there.set_(block.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
                there = there.conj() if tensor.is_conj() else there
                moved[id(tensor)] = torch._neg_view(there) if tensor.is_neg() else there
            return moved[id(tensor)]

        self.baked, self.retained = recorder.baked, 0
        self.steps = [Step(s.run, *tree_map_only(torch.Tensor, move, (s.args, s.kwargs, s.made))) for s in recorder.steps]
        self.outputs = tree_map_only(torch.Tensor, move, outputs)
        made = {storage_of(t): recorder.fresh[storage_of(t)] for t in tensors_of(outputs) if storage_of(t) in recorder.fresh}
        memory = {**made, **{storage: block.untyped_storage() for storage, block in placed.items()}}
        self._proof = (tensors_of(outputs), list(memory.values())) if recorder.repeats else None

    def proves(self) -> bool:
        """Does a launch on poisoned memory give what the recorded call gave? Asked once, within a turn. Whoever keeps state passes."""
        proof, self._proof = self._proof, None
        if proof is None:
            return True
        expected = [_bytes(tensor).clone() for tensor in proof[0]]
        memory = [torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage) for storage in proof[1]]
        kept = [block.clone() for block in memory]  # results of other graphs are valid until one replays
        for block in memory:
            block.fill_(255)
        self.launch()
        same = all(torch.equal(_bytes(now), then) for now, then in zip(tensors_of(self.outputs), expected, strict=True))
        for block, content in zip(memory, kept, strict=True):
            block.copy_(content)
        return same

    def launch(self) -> None:
        """Run the operations again.

        Raises:
            RuntimeError: within another recording.
        """
        refuse_within_a_recording()
        with torch.no_grad():  # kernels look at it, not gradients alone
            if torch.is_autocast_enabled("cpu"):  # the recorded operations are those that autocast, or none, had chosen
                with torch.autocast("cpu", enabled=False):
                    self._run()
            else:
                self._run()

    def _run(self) -> None:
        for run, args, kwargs, made in self.steps:
            result = run(*args, **kwargs)
            for i, there in made:
                now = result[i] if isinstance(result, (tuple, list)) else result
                if now.shape != there.shape:
                    raise RuntimeError(f"{run} gave the shape {tuple(there.shape)} at the capture and {tuple(now.shape)} now")
                there.copy_(now)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _place(recorder: Recorder, outputs: Sequence[torch.Tensor], arena: Arena) -> dict[int, torch.Tensor]:
    """A block of the arena for each storage that the recording makes; storages that do not live at the same time may share one."""
    seen = [{storage_of(t) for t in tensors_of((s.args, s.kwargs, s.made))} for s in recorder.steps]
    steps = [storages & recorder.fresh.keys() for storages in seen]
    last = {storage: i for i, used in enumerate(steps) for storage in used}
    last.update((storage_of(t), len(steps)) for t in outputs if storage_of(t) in recorder.fresh)
    taken = recorder.inputs.union(map(storage_of, outputs), *seen)  # blocks that hold an input or a constant: results of another graph
    free, placed = [block for block in arena.blocks if storage_of(block) not in taken], dict[int, torch.Tensor]()
    for i, used in enumerate(steps):
        for storage in sorted(used - placed.keys(), key=lambda s: -recorder.fresh[s].nbytes()):
            placed[storage] = arena.take(recorder.fresh[storage].nbytes(), free)
        free += [placed[storage] for storage in used if last[storage] == i]
    return placed
