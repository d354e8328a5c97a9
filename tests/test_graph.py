"""The primitive: captures that fail leave everything usable, replays check what they are given, memory is told and let go."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from omnigraph._pool import capturing, environment, pick_backend
from omnigraph.graph import CapturedGraph, CaptureError, Pool, capture

X = torch.arange(6.0).reshape(2, 3)


def double(x: Tensor) -> Tensor:
    return x * 2 + 1


def test_what_a_graph_says_of_itself() -> None:
    graph = capture(double, X)
    assert (graph.backend, graph.baked) == ("cpu", 0)
    assert graph.seconds > 0
    assert graph.nbytes == graph.pool.nbytes + X.nbytes
    assert graph.pool.nbytes >= X.nbytes
    assert str(graph.nbytes) in repr(graph).replace(",", "")


def test_static_inputs_are_copies_or_the_very_tensors() -> None:
    x = X.clone()
    copied, own = capture(double, x), capture(double, x, copy_inputs=False)
    assert copied.inputs[0].data_ptr() != x.data_ptr()
    assert own.inputs[0] is x
    x.fill_(5)
    own.launch()
    assert own.outputs.eq(11).all()
    assert torch.equal(copied.replay(X), double(X))
    assert own.nbytes == own.pool.nbytes


def test_results_are_static_until_the_next_replay() -> None:
    graph = capture(double, X)
    first = graph.replay(X)
    kept = first.clone()
    assert torch.equal(first, double(X))
    second = graph.replay(-X)
    assert second is first
    assert torch.equal(first, double(-X))
    assert torch.equal(kept, double(X))


def test_inputs_need_not_be_contiguous_and_grads_are_left_outside() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    graph = capture(double, X.T.contiguous().T)
    assert torch.equal(graph.replay(weight), double(weight))
    assert not graph.outputs.requires_grad
    assert torch.equal(graph.replay(X.T.contiguous().T), double(X))
    assert torch.equal(graph.replay(torch.ones(()).expand(2, 3)), double(torch.ones(2, 3)))


def test_a_static_input_given_for_another_is_read_before_it_is_overwritten() -> None:
    graph = capture(lambda a, b: a - 2 * b, X, X + 1)
    a, b = torch.rand(2, 3), torch.rand(2, 3)
    graph.replay(a, b)
    assert torch.equal(graph.replay(graph.inputs[1], graph.inputs[0]), b - 2 * a)
    graph.replay(a, b)
    assert torch.equal(graph.replay(b, graph.inputs[0]), b - 2 * a)
    graph.replay(a, b)
    assert torch.equal(graph.replay(graph.inputs[0], graph.inputs[1]), a - 2 * b)
    rolled = capture(lambda x: x * 1, torch.arange(4.0))
    rolled.replay(torch.arange(4.0))
    assert rolled.replay(rolled.inputs[0].flip(0)).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X,), "captured with inputs of the structure"),
        ((X, {"y": X}), "captured with inputs of the structure"),
        ((X[:1], {"y": X, "n": 2}), r"input 0 was captured as \(2, 3\) torch.float32 on cpu, got \(1, 3\) torch.float32 on cpu"),
        ((X.double(), {"y": X, "n": 2}), r"got \(2, 3\) torch.float64 on cpu"),
        ((X.to("meta"), {"y": X, "n": 2}), r"got \(2, 3\) torch.float32 on meta"),
        ((X, {"y": 3.0, "n": 2}), r"input 2 was captured as .*, got 3.0"),
        ((X, {"y": X, "n": 3}), r"input 1 was baked as 2, got 3: capture again for another value"),
    ],
)
def test_replays_refuse_other_inputs(inputs: tuple[object, ...], message: str) -> None:
    graph = capture(lambda x, d: x * d["n"] + d["y"], X, {"n": 2, "y": X})
    expected = graph.replay(X, {"n": 2, "y": X}).clone()
    inputs = tuple({k: i[k] for k in sorted(i)} if isinstance(i, dict) else i for i in inputs)
    with pytest.raises(ValueError, match=message):
        graph.replay(*inputs)
    assert torch.equal(graph.outputs, expected)  # nothing was done


def test_a_row_does_not_broadcast_into_a_static_input() -> None:
    graph = capture(double, torch.zeros(2, 8, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got \(2, 1, 5\)"):
        graph.replay(torch.zeros(2, 1, 5, dtype=torch.int64))


def test_a_callable_may_return_its_input() -> None:
    graph = capture(lambda x: x, X)
    assert graph.replay(-X) is graph.inputs[0]
    assert torch.equal(graph.outputs, -X)


def test_a_closed_graph_says_so() -> None:
    pool = Pool("cpu")
    graph, other = capture(double, X, pool=pool), capture(double, X, pool=pool)
    held = weakref.ref(graph.inputs[0])
    graph.close()
    graph.close()
    for call in (lambda: graph.replay(X), graph.launch):
        with pytest.raises(RuntimeError, match="this graph is closed: capture again"):
            call()
    assert held() is None  # without the collector
    assert torch.equal(other.replay(X), double(X))


def test_a_dropped_graph_is_freed_without_the_collector() -> None:
    gc.disable()
    try:
        layer = nn.Linear(3, 3)
        graph = capture(layer, X)
        graph.replay(X)
        refs = [weakref.ref(graph), weakref.ref(graph.pool), weakref.ref(layer), weakref.ref(graph.outputs)]
        del graph, layer
        assert [ref() for ref in refs] == [None] * 4
    finally:
        gc.enable()


def failing(kind: str) -> type[Exception] | None:
    return {"key": KeyError, "value": ValueError, "memory": torch.OutOfMemoryError}.get(kind)


@pytest.mark.parametrize("kind", ["key", "value", "memory", "read", "shape"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_capture_leaves_all_else_usable(kind: str, call: int) -> None:
    pool = Pool("cpu")
    before = capture(double, X, pool=pool)
    calls = []

    def bad(x: Tensor) -> Tensor:
        calls.append(1)
        y = x.sin()
        if len(calls) < call:
            return y
        if kind == "read":
            return y * y.sum().item() if len(calls) > 1 else y
        if kind == "shape":
            return y @ y
        raise failing(kind)("on purpose")

    with pytest.raises(CaptureError) as caught:
        capture(bad, X, pool=pool)
    names = {"key": "KeyError", "value": "ValueError", "memory": "OutOfMemoryError", "read": "HostRead", "shape": "RuntimeError"}
    assert caught.value.cause == names[kind]
    assert str(caught.value).startswith(names[kind])
    assert "on purpose" in str(caught.value) or kind in ("read", "shape")
    assert not capturing(pool.device)
    assert torch.equal(bad_free(X), X.sin())
    assert torch.equal(before.replay(X), double(X))
    assert torch.equal(capture(double, X, pool=pool).replay(-X), double(-X))


def bad_free(x: Tensor) -> Tensor:
    return x.sin()


def test_a_capture_error_pins_no_tensors() -> None:
    gc.disable()
    try:
        refs = []

        def bad(x: Tensor) -> Tensor:
            refs.append(weakref.ref(x))
            y = x.sin()
            refs.append(weakref.ref(y))
            raise ValueError("on purpose")

        with pytest.raises(CaptureError) as caught:
            capture(bad, X)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        del caught
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_an_interrupt_goes_through_and_leaves_all_else_usable() -> None:
    pool = Pool("cpu")
    before = capture(double, X, pool=pool)

    def interrupted(x: Tensor) -> Tensor:
        if capturing(x.device):
            raise KeyboardInterrupt
        return x

    with pytest.raises(KeyboardInterrupt):
        capture(interrupted, X, pool=pool)
    assert not capturing(X.device)
    assert torch.is_grad_enabled()
    assert gc.isenabled()
    assert torch.equal(before.replay(X), double(X))


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("mode", [nothing, torch.no_grad, torch.inference_mode])
def test_the_callers_modes_come_back(mode: type) -> None:
    def state() -> tuple[bool, ...]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled(), gc.isenabled()

    seen = []

    def fn(x: Tensor) -> Tensor:
        seen.append(state())
        return x + 1

    with mode():
        before = state()
        graph = capture(fn, X)
        graph.replay(X)
        assert state() == before
    assert {s[:3] for s in seen} == {(False, False, False)}


def test_a_replay_within_a_capture_is_refused() -> None:
    pool = Pool("cpu")
    inner = capture(double, X, pool=pool)
    for call in (lambda x: inner.replay(x) + 1, lambda x: (inner.launch(), x + 1)[1]):
        with pytest.raises(CaptureError, match="a replay cannot be captured"):
            capture(call, X, pool=pool)
    assert torch.equal(inner.replay(X), double(X))


def test_a_capture_within_a_capture_is_refused() -> None:
    def nested(x: Tensor) -> Tensor:
        return capture(double, x).replay(x)

    with pytest.raises(CaptureError, match="a capture within a capture"):
        capture(nested, X)
    assert torch.equal(nested(X), double(X))


def test_one_capture_at_a_time() -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def slow(x: Tensor) -> Tensor:
        nonlocal inside, most
        with lock:
            inside, most = inside + 1, max(most, inside + 1)
        time.sleep(0.01)
        with lock:
            inside -= 1
        return x + 1

    graphs: list[CapturedGraph] = []
    threads = [threading.Thread(target=lambda: graphs.append(capture(slow, X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert all(torch.equal(graph.replay(X), X + 1) for graph in graphs)
    assert len(graphs) == 4


def test_capturing_into_a_pool_does_not_touch_what_others_replay() -> None:
    """While one thread replays and reads its results within its turn, another captures into the same pool."""
    pool = Pool("cpu")
    x = torch.randn(64)
    graph = capture(lambda x: (x.sin() + 1).cumsum(0), x, pool=pool)
    expected, wrong, stop = graph.replay(x).clone(), [], threading.Event()

    def replaying() -> None:
        while not stop.is_set():
            with pool.lock, pool:
                outputs = graph.replay(x)
                time.sleep(0)  # let the other one run, if it does not wait for its turn
                if not torch.equal(outputs, expected):
                    wrong.append(outputs.clone())

    thread = threading.Thread(target=replaying)
    thread.start()
    for _ in range(60):
        capture(lambda x: (x * 3).exp(), x, pool=pool)
    stop.set()
    thread.join()
    assert not wrong


def test_turns_exclude_each_other_and_may_nest() -> None:
    pool, order = Pool("cpu"), []

    def other() -> None:
        with pool.lock, pool:
            order.append("other")

    with pool.lock, pool, pool.lock, pool:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        order.append("mine")
    thread.join()
    assert order == ["mine", "other"]


def test_a_graph_is_not_closed_while_it_replays() -> None:
    pool = Pool("cpu")
    graph = capture(double, X, pool=pool)
    with pool.lock, pool:
        thread = threading.Thread(target=graph.close)
        thread.start()
        thread.join(0.05)
        assert torch.equal(graph.replay(X), double(X))
    thread.join()
    with pytest.raises(RuntimeError, match="closed"):
        graph.replay(X)


def test_warm_ups_come_before_the_recording() -> None:
    for warmup in (0, 1, 3):
        seen = []
        capture(lambda x, seen=seen: seen.append(capturing(x.device)) or x + 1, X, warmup=warmup)
        assert seen == [False] * warmup + [True, True]


def test_inputs_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a graph on cpu cannot read an input \(2, 3\) torch.float32 on meta"):
        capture(lambda x, y: x + 1, X, X.to("meta"))
    with pytest.raises(ValueError, match="graphs run on cuda or cpu, not on meta"):
        capture(double, X.to("meta"))


def test_backends() -> None:
    cpu = torch.device("cpu")
    assert pick_backend("auto", cpu) == pick_backend("cpu", cpu) == "cpu"
    for wrong in ("cuda", "gpu", ""):
        with pytest.raises(ValueError, match="does not run on cpu"):
            pick_backend(wrong, cpu)
    with pytest.raises(ValueError, match="does not run on cpu"):
        capture(double, X, backend="cuda")


def test_environment_tells_the_switches_apart() -> None:
    cpu = torch.device("cpu")
    usual = environment(cpu)
    assert environment(cpu) == usual
    with torch.autocast("cpu", torch.bfloat16):
        assert environment(cpu) != usual
    with torch.autocast("cpu", torch.float16):
        half = environment(cpu)
    with torch.autocast("cpu", torch.bfloat16):
        assert environment(cpu) != half
    with torch.autocast("cpu", enabled=False), torch.inference_mode():
        assert environment(cpu) == usual
    torch.set_default_dtype(torch.float64)
    try:
        assert environment(cpu) != usual
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert environment(cpu) != usual
    finally:
        torch.use_deterministic_algorithms(False)
    assert environment(cpu) == usual


@contextmanager
def precision(backend: str, operation: str, value: str) -> Iterator[None]:
    kept = torch._C._get_fp32_precision_getter(backend, operation)
    torch._C._set_fp32_precision_setter(backend, operation, value)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter(backend, operation, kept)


def test_environment_knows_both_kinds_of_precision_switches() -> None:
    """Torch's old ones raise as soon as one of the new ones was used."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    usual, usual_cuda = environment(cpu), environment(cuda)
    for new in (("mkldnn", "matmul", "bf16"), ("mkldnn", "conv", "bf16")):
        with precision(*new):
            assert environment(cpu) != usual
            assert environment(cuda) == usual_cuda
    for new in (("cuda", "conv", "ieee"), ("cuda", "matmul", "tf32")):
        with precision(*new):
            assert environment(cpu) == usual
            assert environment(cuda) != usual_cuda
    torch.set_float32_matmul_precision("highest")  # as it is
    assert (environment(cpu), environment(cuda)) == (usual, usual_cuda)
    torch.set_float32_matmul_precision("medium")
    try:
        assert environment(cpu) != usual
        assert environment(cuda) != usual_cuda
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert environment(cpu) == usual
        assert environment(cuda) != usual_cuda
    finally:
        torch.backends.cudnn.allow_tf32 = True


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs a C++ compiler (g++), none is here")


@needs_compiler
def test_compiled_code_is_called_into_a_static_output() -> None:
    layer = nn.Linear(3, 2)
    compiled = torch.compile(layer, dynamic=False)
    graph = capture(compiled, X, compiled=True)
    first = graph.replay(X)
    kept = first.clone()
    assert graph.backend == "cpu"
    with torch.no_grad():
        for context in (nothing, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
            with context():
                second = graph.replay(-X)
            assert second is first
            assert not second.requires_grad
            assert second.dtype == torch.float32
            torch.testing.assert_close(second, layer(-X))
    torch.testing.assert_close(kept, layer(X))
    with pytest.raises(CaptureError, match="a replay cannot be captured"):
        capture(lambda x: graph.replay(x), X)
