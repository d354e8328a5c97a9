"""The primitive on a GPU: replays are bitwise eager's, and a failed capture leaves the process able to go on."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from omnigraph._pool import environment
from omnigraph.graph import CaptureError, Pool, capture

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def flush() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    flush()
    yield
    torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, device=DEVICE, dtype=dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.conv = nn.LayerNorm(64), nn.Linear(64, 64), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        x = x + self.conv(F.gelu(self.linear(self.norm(x))))
        return x.cumsum(1).softmax(-1)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def block(request: pytest.FixtureRequest) -> nn.Module:
    return Block().eval().requires_grad_(False).to(DEVICE, request.param)


@torch.no_grad()
def check(fn: Callable[..., Any], graph: Any, *inputs: Tensor) -> None:
    got, expected = tree_flatten(graph.replay(*inputs))[0], tree_flatten(fn(*inputs))[0]
    for a, b in zip(got, expected, strict=True):
        assert (torch.equal(a, b) and a.dtype == b.dtype) if isinstance(b, Tensor) else a == b


def test_replays_are_bitwise_eagers(block: nn.Module) -> None:
    dtype = block.linear.weight.dtype
    graph = capture(block, normal(2, 16, 64, dtype=dtype))
    assert graph.backend == "cuda"
    where = graph.outputs.data_ptr()
    for _ in range(4):
        check(block, graph, normal(2, 16, 64, dtype=dtype))
        assert graph.outputs.data_ptr() == where
    with torch.no_grad():
        block.linear.weight.mul_(1.5)  # in place: the graph reads the new values
    check(block, graph, normal(2, 16, 64, dtype=dtype))


def test_pytrees_views_and_in_place_operations() -> None:
    def fn(d: dict[str, Any], n: int) -> dict[str, Any]:
        y = d["x"] * n
        y[:, 1:].add_(d["more"][0])
        return {"y": y, "parts": y.chunk(2, -1), "x": d["x"], "t": y.mT, "top": y.topk(2), "n": n}

    def inputs() -> dict[str, Any]:
        return {"more": (normal(4, 7),), "x": normal(4, 8)}

    graph = capture(fn, inputs(), 3)
    for _ in range(3):
        check(fn, graph, inputs(), 3)
    with pytest.raises(ValueError, match="was baked as 3, got 2"):
        graph.replay(inputs(), 2)
    with pytest.raises(ValueError, match=r"was captured as \(4, 7\) torch.float32 on cuda:0, got \(4, 7\) torch.float32 on cpu"):
        graph.replay({"more": (torch.zeros(4, 7),), "x": normal(4, 8)}, 3)


def test_several_graphs_share_a_pool() -> None:
    pool, rng = Pool(DEVICE), torch.Generator().manual_seed(0)
    fns = [lambda x, n=n: (x @ x.mT).sin().cumsum(-1) * n + x.sum() for n in range(1, 5)]
    graphs = [capture(fn, normal(64 * n, 64), pool=pool) for n, fn in zip((8, 4, 2, 1), fns, strict=True)]
    for _ in range(40):
        k = int(torch.randint(4, (), generator=rng))
        check(fns[k], graphs[k], normal(64 * (8, 4, 2, 1)[k], 64))


@pytest.mark.parametrize("at_capture", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("at_replay", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_modes_around_capture_and_replay(at_capture: Any, at_replay: Any) -> None:
    linear = nn.Linear(8, 8, device=DEVICE)  # its weights want gradients
    with at_capture():
        graph = capture(linear, normal(4, 8))
    with at_replay():
        x = normal(4, 8)
        out = graph.replay(x).clone()
        graph.launch()
    assert not out.requires_grad
    with torch.no_grad():
        assert torch.equal(out, linear(x.clone()))
    assert not graph.inputs[0].is_inference()


def test_random_numbers_are_new_in_each_replay() -> None:
    graph = capture(lambda x: x + torch.rand_like(x), normal(1000))
    x = torch.zeros(1000, device=DEVICE)
    first = graph.replay(x).clone()
    assert not torch.equal(first, graph.replay(x))


def capturing_only(error: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        y = x.sin() + x.new_empty(2**20).zero_().sum()
        if torch.cuda.is_current_stream_capturing():
            error()
        return y

    return fn


def raise_(error: BaseException) -> None:
    raise error


FAILURES: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x.sum().item(),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "cpu": lambda x: x * x.cpu().sum().to(DEVICE),
    "nonzero": lambda x: x[x > 0],
    "synchronize": capturing_only(torch.cuda.synchronize),
    "an exception": capturing_only(lambda: raise_(ValueError("on purpose"))),
    "out of memory": capturing_only(lambda: torch.empty(2**46, device=DEVICE)),
    "another capture": capturing_only(lambda: capture(torch.sin, normal(3))),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_capture_leaves_the_process_able_to_go_on(name: str) -> None:
    pool = Pool(DEVICE)
    x = normal(1000)
    before = capture(torch.cos, x, pool=pool)
    allocated: list[int] = []
    for _ in range(4):
        with pytest.raises(CaptureError) as caught:
            capture(FAILURES[name], x, pool=pool)
        assert caught.value.__context__ is None
        del caught
        assert not torch.cuda.is_current_stream_capturing()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.equal(x + 1, torch.add(x, 1))  # eager goes on
        check(torch.cos, before, normal(1000))  # other graphs too
        check(torch.tan, capture(torch.tan, x, pool=pool), normal(1000))  # and captures, in this pool
        check(torch.sin, capture(torch.sin, x), normal(1000))  # and in others
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] == allocated[-2]  # nothing is pinned


def test_an_interrupt_in_a_capture() -> None:
    x = normal(100)
    with pytest.raises(KeyboardInterrupt):
        capture(capturing_only(lambda: raise_(KeyboardInterrupt())), x)
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    check(torch.sin, capture(torch.sin, x), normal(100))


def test_graphs_run_on_the_current_stream_and_in_order() -> None:
    pool = Pool(DEVICE)
    fn = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)).to(DEVICE).requires_grad_(False)
    graph = capture(fn, normal(512, 512), pool=pool)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    calls = []
    for i in range(90):
        with torch.cuda.stream(streams[i % 3]):
            x = normal(512, 512)
            with pool.lock, pool:
                calls.append((x, graph.replay(x).clone()))
    torch.cuda.synchronize()
    assert all(torch.equal(fn(x), y) for x, y in calls)


def test_the_copy_into_a_fresh_static_input_does_not_overtake_a_replay_elsewhere() -> None:
    pool, other = Pool(DEVICE), torch.cuda.Stream()
    first = capture(torch.sin, normal(100), pool=pool)
    x, y = normal(100), normal(100)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        first.replay(x)  # the turn before was on the other stream
    torch.cuda._sleep(1_000_000_000)  # half a second of the current one, before the copy of `x` into the static input
    second = capture(torch.cos, x, pool=pool)
    with torch.cuda.stream(other), pool.lock, pool:
        got = second.replay(y).clone()
    torch.cuda.synchronize()
    assert torch.equal(got, torch.cos(y))


def test_threads_with_streams_of_their_own() -> None:
    pool = Pool(DEVICE)
    fns = [lambda x: (x @ x).tanh(), lambda x: (x @ x.mT).cumsum(0).tanh()]
    graphs = [capture(fn, normal(256, 256), pool=pool) for fn in fns]
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator(DEVICE).manual_seed(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(50):
                    x = torch.randn(256, 256, device=DEVICE, generator=generator)
                    with pool.lock, pool:
                        y = graphs[i % 2].replay(x).clone()
                    if not torch.allclose(y, fns[i % 2](x), rtol=1e-3, atol=1e-3):
                        wrong.append((seed, i))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_thread_may_allocate_copy_and_replay_during_captures() -> None:
    pool, x = Pool(DEVICE), normal(100)
    graph, stop, wrong = capture(torch.sin, x, pool=pool), threading.Event(), list[object]()

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    y = torch.randn(2**20).pin_memory().to(DEVICE, non_blocking=True)
                    float(y.sum())
                    with pool.lock, pool:
                        if not torch.equal(graph.replay(x).clone(), x.sin()):
                            wrong.append("a replay")
        except BaseException as error:
            wrong.append(error)

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        graphs = [capture(lambda x, n=n: (x * n).cos(), x, pool=pool) for n in range(30)]
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    for n in (0, 7, 29):
        check(lambda x, n=n: (x * n).cos(), graphs[n], normal(100))


def test_another_thread_that_synchronizes_the_device_breaks_a_capture_at_most() -> None:
    """CUDA may refuse either; neither may give a wrong result or leave the process unable to go on."""
    pool, x, stop, captured = Pool(DEVICE), normal(100), threading.Event(), {}

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize()

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for n in range(20):
            with contextlib.suppress(CaptureError):
                captured[n] = capture(lambda x, n=n: (x * n).cos(), x, pool=pool)
    finally:
        stop.set()
        thread.join()
    print(f"{len(captured)} of 20 captured")
    for n, graph in captured.items():
        check(lambda x, n=n: (x * n).cos(), graph, normal(100))
    check(torch.sin, capture(torch.sin, x, pool=pool), normal(100))


def test_within_somebody_elses_capture_a_replay_is_refused_and_theirs_completes() -> None:
    x = normal(100)
    mine, theirs = capture(torch.sin, x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        with pytest.raises(RuntimeError, match="a replay cannot be captured"):
            mine.replay(x)
        with pytest.raises(CaptureError, match="a capture within a capture"):
            capture(torch.sin, x)
        y = x * 2
    x.fill_(3)
    theirs.replay()
    assert torch.equal(y, x * 2)
    check(torch.sin, mine, normal(100))


def test_memory_is_told_as_it_is_and_comes_back() -> None:
    linear = nn.Linear(1024, 1024, device=DEVICE).requires_grad_(False)
    x = normal(2048, 1024)
    pool = Pool(DEVICE)
    pool.warm(linear, x)  # now its stream has the workspaces that libraries keep
    flush()
    held = torch.cuda.memory_reserved()
    graph = capture(lambda x: linear(linear(x)).sin(), x, pool=pool, warmup=0)
    grown = torch.cuda.memory_reserved() - held
    assert pool.nbytes >= 2 * x.nbytes  # an intermediate and the output, at least
    assert grown >= pool.nbytes
    assert graph.nbytes >= pool.nbytes + x.nbytes
    small = x[:512].clone()
    another = capture(lambda x: linear(x).cos(), small, pool=pool, warmup=0)
    assert another.nbytes < graph.nbytes / 2  # what the first one leaves between its launches is used again
    graph.close()
    another.close()
    assert pool.nbytes <= grown
    del graph, another, pool
    flush()
    assert torch.cuda.memory_reserved() <= held


def test_closed_graphs_die_with_the_last_of_their_pool() -> None:
    pool, x = Pool(DEVICE), normal(1000, 1000)
    first, second = capture(lambda x: x @ x, x, pool=pool), capture(lambda x: (x @ x).sin(), x, pool=pool)
    first.close()
    assert (len(pool.graphs), pool.closed) == (2, 1)
    check(lambda x: (x @ x).sin(), second, normal(1000, 1000))
    second.close()
    assert (len(pool.graphs), pool.closed) == (0, 0)
    flush()
    assert pool.nbytes == 0
    check(torch.cos, capture(torch.cos, x, pool=pool), normal(1000, 1000))  # into fresh memory


def test_pools_capture_on_streams_of_their_own() -> None:
    pools = [Pool(DEVICE) for _ in range(20)]
    assert len({pool.stream.cuda_stream for pool in pools}) == 20


def test_a_dropped_graph_gives_its_memory_back_without_the_collector() -> None:
    x = normal(2**20)
    capture(torch.sin, x).close()
    flush()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        graph = capture(lambda x: x.sin().cos(), x)
        graph.replay(x)
        assert torch.cuda.memory_allocated() > before
        del graph
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_environment_tells_the_switches_apart() -> None:
    usual = environment(DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        assert environment(DEVICE) != usual
    with torch.autocast("cpu", torch.bfloat16):
        assert environment(DEVICE) == usual
    for name in ("allow_tf32", "benchmark", "deterministic"):
        kept = getattr(torch.backends.cudnn, name)
        try:
            setattr(torch.backends.cudnn, name, not kept)
            assert environment(DEVICE) != usual, name
        finally:
            setattr(torch.backends.cudnn, name, kept)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
        assert environment(DEVICE) != usual
    finally:
        torch.set_float32_matmul_precision(precision)
    assert environment(DEVICE) == usual
    kept = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee" if kept == "tf32" else "tf32"
        assert environment(DEVICE) != usual  # and does not raise, as torch's own old getters now do
    finally:
        torch.backends.cudnn.conv.fp32_precision = kept
    assert environment(DEVICE) == usual


def test_inputs_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="a graph on cuda:0 cannot read an input"):
        capture(lambda x, y: x, normal(3), torch.zeros(3))
    with pytest.raises(ValueError, match="a graph on cuda:0 cannot read an input"):
        capture(lambda x: x, torch.zeros(3), pool=Pool(DEVICE))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    other = torch.device("cuda", 1)
    linear = nn.Linear(8, 8, device=other).requires_grad_(False)
    assert torch.cuda.current_device() == 0
    graph = capture(linear, torch.randn(4, 8, device=other))
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        check(linear, graph, torch.randn(4, 8, device=other))
    assert graph.pool.device == other
    graph.close()
