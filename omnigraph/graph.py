"""Capture a callable once at fixed addresses, replay it without Python: the one place that knows CUDA graphs.

`capture` is the primitive under both managers. On CUDA it records a CUDA graph, on a CPU the ATen operations (`_record`).
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only

from omnigraph._pool import Backend, Pool, capturing, quiet
from omnigraph._record import Recording
from omnigraph._recorder import refuse_within_a_recording, tensors_of

_ONE_AT_A_TIME = threading.RLock()  # captures in this process


def flush(device: torch.device) -> None:
    """Hand the device back what nobody uses, while nobody captures: torch allows it at no other time."""
    if device.type == "cuda":
        with _ONE_AT_A_TIME:
            torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given, while nobody captures: CUDA ends a capture that this falls into."""
    if device.type == "cuda":
        with _ONE_AT_A_TIME:
            torch.cuda.synchronize(device)


class CaptureError(RuntimeError):
    """A capture that failed. `cause` names the type of what was raised; its traceback is not kept, since it would pin tensors."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(f"{cause}: {text}")
        self.cause = cause


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection during a capture could free device memory or destroy a graph, which CUDA forbids there.

    On a CPU, what a finalizer computes would be recorded.
    """
    was = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was:
            gc.enable()


class _Launcher(Protocol):
    outputs: Any
    baked: int
    retained: int

    def launch(self) -> None: ...


class _CudaGraph:
    """A CUDA graph of `fn(*inputs)`, captured on the pool's stream."""

    baked = 0

    def __init__(self, fn: Callable[..., Any], inputs: Sequence[Any], pool: Pool) -> None:
        self.graph = torch.cuda.CUDAGraph()
        pool.stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(pool.stream):
            try:
                self.graph.capture_begin(pool=pool.handles[-1], capture_error_mode="thread_local")
                before = _requested(pool.device)
                self.outputs = fn(*inputs)
                self.retained = _requested(pool.device) - before - _made(self.outputs, inputs)
            except BaseException:
                with suppress(RuntimeError):  # that the capture is invalid; what made it so is on its way up
                    _end(self.graph, pool.handles[-1], pool.device)
                raise
            try:
                _end(self.graph, pool.handles[-1], pool.device)
            except BaseException:
                if torch.cuda.is_current_stream_capturing():  # an interrupt came first
                    with suppress(RuntimeError):
                        _end(self.graph, pool.handles[-1], pool.device)
                raise
        self.launch = self.graph.replay
        pool.graphs.append(self.graph)


def _end(graph: torch.cuda.CUDAGraph, memory: Any, device: torch.device, spares: int = 3) -> None:
    """End a capture. Of an invalid one torch 2.11 leaves behind an allocator and a random generator that still capture.

    The first is told by hand. A capture that works ends the second's; while another thread breaks each one, the generator gets a copy
    of its state. Otherwise the next random number of the process would fail.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # that the allocator's part was ended already
            torch._C._cuda_endAllocateToPool(device.index, memory)
            torch._C._cuda_releasePool(device.index, memory)
        if spares:
            with suppress(RuntimeError):
                _spare_capture(device, spares - 1)
        else:
            generator = torch.cuda.default_generators[device.index]
            generator.graphsafe_set_state(generator.clone_state())
        raise


def _spare_capture(device: torch.device, spares: int) -> None:
    graph, memory, work = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.zeros(1, device=device)
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    try:
        work.zero_()
    finally:
        _end(graph, memory, device, spares)


def _requested(device: torch.device) -> int:
    """Bytes asked of the allocator and in use now, before it rounds them."""
    requested: int = torch.cuda.memory_stats_as_nested_dict(device)["requested_bytes"]["all"]["current"]
    return requested


def _made(outputs: Any, inputs: Any) -> int:
    """Bytes of the storages of `outputs` that are not those of `inputs`."""
    given = {t.untyped_storage().data_ptr() for t in tensors_of(inputs)}
    new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(outputs)}
    return sum(nbytes for address, nbytes in new.items() if address not in given)


class _CompiledCall:
    """Compiled code on a CPU dispatches no operations to record: call it, into the same static output."""

    baked = retained = 0

    def __init__(self, fn: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.fn, self.inputs = fn, inputs
        self.autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        self.outputs = tree_map_only(torch.Tensor, torch.clone, fn(*inputs))
        self._static = tensors_of(self.outputs)

    def launch(self) -> None:
        refuse_within_a_recording()
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", *self.autocast, cache_enabled=False):
            for there, now in zip(self._static, tensors_of(self.fn(*self.inputs)), strict=True):
                there.copy_(now)


class CapturedGraph:
    """A callable recorded at fixed addresses.

    `inputs` and `outputs` are its static tensors, `nbytes` what its capture added to the pool and its own static inputs hold,
    `seconds` what the capture took, `baked` the host reads of constants that were recorded as their values (CPU), `retained` the bytes
    that the callable kept beyond its outputs, less what it let go (CUDA): something remembers a tensor that other graphs will overwrite.
    `keeps` is for whoever captured: tensors that the recording reads and nobody else may hold for as long.
    """

    def __init__(self, launcher: _Launcher, inputs: tuple[Any, ...], pool: Pool, nbytes: int, seconds: float) -> None:
        self.inputs, self.outputs, self.pool = inputs, launcher.outputs, pool
        self.nbytes, self.seconds, self.baked, self.retained = nbytes, seconds, launcher.baked, max(launcher.retained, 0)
        self.keeps: list[torch.Tensor] = []
        self._launcher: _Launcher | None = launcher
        self._leaves, self._spec = tree_flatten(inputs)
        self._own = {t.untyped_storage().data_ptr() for t in tensors_of(inputs)}
        self.launch = launcher.launch
        pool.open.add(self)

    @property
    def backend(self) -> Backend:
        return self.pool.backend

    def replay(self, *inputs: Any) -> Any:
        """Copy `inputs` into the static ones and launch.

        Returns the static outputs: valid until any graph of the same pool replays; clone what must last.

        Raises:
            ValueError: the inputs differ from the captured ones in structure, shape, dtype or device.
            RuntimeError: the graph is closed, or somebody is capturing what this thread does.
        """
        if capturing(self.pool.device):
            raise RuntimeError("a replay cannot be captured: call the function that the graph was captured from")
        leaves, spec = tree_flatten(inputs)
        with self.pool.lock, self.pool, torch.no_grad():
            if self._launcher is None:
                raise RuntimeError("this graph is closed: capture again")
            self._check(leaves, spec)
            new = [(there, now) for there, now in zip(self._leaves, leaves, strict=True) if there is not now]
            # A static input given for another one: cloned before the first copy overwrites it.
            new = [(there, now.clone() if self._is_own(now) else now) for there, now in new]
            for there, now in new:
                if isinstance(there, torch.Tensor):
                    there.copy_(now)
            self.launch()
            return self.outputs

    def _check(self, leaves: list[Any], spec: TreeSpec) -> None:
        if spec != self._spec:
            raise ValueError(f"captured with inputs of the structure {self._spec}, got {spec}")
        for i, (there, now) in enumerate(zip(self._leaves, leaves, strict=True)):
            if not isinstance(there, torch.Tensor):
                if there != now:
                    raise ValueError(f"input {i} was baked as {there!r}, got {now!r}: capture again for another value")
            elif not isinstance(now, torch.Tensor) or (now.shape, now.dtype, now.device) != (there.shape, there.dtype, there.device):
                raise ValueError(f"input {i} was captured as {_describe(there)}, got {_describe(now)}")

    def _is_own(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._own

    def close(self) -> None:
        """Let go of the recording and its static tensors, once the device is done with them."""
        with self.pool.lock:  # no replay is in the middle of them
            if self._launcher is not None:
                self.pool.wait()
                self._launcher = None
                self.launch = _closed
                self.inputs, self.outputs, self._leaves, self.keeps = (), None, [], []
                self.pool.let_go(self)

    def __repr__(self) -> str:
        return f"<CapturedGraph on {self.backend}: {self.nbytes:,} bytes, captured in {self.seconds:.3f} s>"


def _closed() -> None:
    raise RuntimeError("this graph is closed: capture again")


def _describe(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)


def _static(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())


def capture(
    fn: Callable[..., Any],
    *inputs: Any,
    backend: str = "auto",
    pool: Pool | None = None,
    warmup: int = 1,
    compiled: bool = False,
    copy_inputs: bool = True,
) -> CapturedGraph:
    """Record `fn(*inputs)` at fixed addresses.

    Args:
        fn: any callable on tensors that does the same work each time; a host read of an input's value cannot be recorded.
        inputs: pytrees of example tensors. The graph reads copies of them, or with `copy_inputs=False` these very tensors.
        backend: "auto" (the device's own), "cuda" or "cpu".
        pool: memory to share with other graphs; a pool of its own where left out.
        warmup: calls of `fn` before the recording, so that lazy initialisation happens outside it.
        compiled: `fn` is compiled code, which a CPU cannot record and calls instead.

    Raises:
        CaptureError: `fn` failed, alone or under capture. The pool's other graphs stay as they were.
        ValueError: the inputs are not all on the pool's device, or the backend does not run there.

    >>> graph = capture(lambda x: x * 2 + 1, torch.zeros(3))
    >>> graph.replay(torch.tensor([1.0, 2.0, 3.0]))
    tensor([3., 5., 7.])
    """
    tensors = tensors_of(inputs)
    if pool is None:
        pool = Pool(tensors[0].device if tensors else "cuda" if backend == "cuda" else "cpu", backend)
    for tensor in tensors:
        if tensor.device != pool.device:
            raise ValueError(f"a graph on {pool.device} cannot read an input {_describe(tensor)}: move it with .to({str(pool.device)!r})")
    if capturing(pool.device):
        raise CaptureError("RuntimeError", "a capture within a capture: make the inner graph outside of the callable")
    with _ONE_AT_A_TIME, quiet(pool.device):
        failed: tuple[str, str] | None = None
        try:
            if copy_inputs:
                inputs = tree_map(lambda leaf: _static(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs)
            pool.warm(fn, *inputs, times=warmup)
            held, start = _held(pool), time.perf_counter()
            launcher: _Launcher
            with _no_collection():
                if pool.backend == "cuda":
                    launcher = _CudaGraph(fn, inputs, pool)
                elif compiled:
                    launcher = _CompiledCall(fn, inputs)
                else:
                    launcher = Recording(fn, inputs, pool.arena)
            seconds = time.perf_counter() - start
        except BaseException as error:
            pool.abandon()
            if not isinstance(error, Exception):
                raise
            failed = type(error).__name__, str(error)
        if failed:  # raised here, where the caught error and the tensors of its frames are gone
            raise CaptureError(*failed)
        own = sum(t.nbytes for t in tensors_of(inputs)) if copy_inputs else 0
        graph = CapturedGraph(launcher, inputs, pool, _held(pool) - held + own, seconds)
    with pool.lock, pool:  # the next turn, on whatever stream, comes after the copies into the static inputs
        if isinstance(launcher, Recording) and not launcher.proves():
            raise CaptureError("RuntimeError", "a replay gave other results than the call that it repeats: work was done out of sight")
        return graph


def _held(pool: Pool) -> int:
    """Bytes on the device before and after a capture: the difference is what it added."""
    return torch.cuda.memory_reserved(pool.device) if pool.backend == "cuda" else pool.arena.nbytes
