from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import nn

from omnigraph._fingerprint import Fingerprint


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bare = nn.Linear(4, 4, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.dropout(self.bare(self.linear(x)))


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), nn.Sequential(Residual())).eval()


def assign(module: nn.Module) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def replace(module: nn.Module) -> None:
    module[1][0].linear = nn.Linear(4, 4)


def set_bias(module: nn.Module) -> None:
    module[0].bare.bias = nn.Parameter(torch.ones(4))


def prune(module: nn.Module) -> None:
    module[0].linear.weight = nn.Parameter(module[0].linear.weight.data.t())  # the same address


def shadow_forward(module: nn.Module) -> None:
    module[0].linear.forward = lambda x: x


CHANGES: list[tuple[Callable[[nn.Module], object], str]] = [
    (assign, "0.scale is another tensor"),
    (prune, "0.linear.weight is another tensor"),
    (lambda m: m.double(), r"0.scale is another tensor: float32\[4\] on cpu at the capture, float64\[4\] on cpu now"),
    (lambda m: setattr(m[1][0].linear.weight, "data", torch.zeros(4, 4)), "1.0.linear.weight moved"),
    (lambda m: m[0].register_buffer("scale", torch.zeros(4)), "0.scale is another tensor"),
    (lambda m: m[0].linear.register_parameter("bias", None), "0.linear.bias is another tensor: .* none now"),
    (set_bias, "None was set"),
    (replace, "submodules"),
    (lambda m: m.append(nn.Tanh()), "submodules"),
    (lambda m: m.pop(1), "submodules"),
    (lambda m: m[0].dropout.register_forward_hook(lambda *_: None), "hooks"),
    (lambda m: m.register_forward_pre_hook(lambda *_: None), "hooks"),
    (lambda m: m[0].dropout.train(), "training mode"),
    (lambda m: m.train(), "training mode"),
    (shadow_forward, "forward method"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_every_change_is_seen_and_named(module: nn.Module, change: Callable[[nn.Module], object], text: str) -> None:
    fingerprint = Fingerprint(module)
    assert fingerprint.changed() is None
    change(module)
    found = fingerprint.changed()
    assert found is not None
    assert re.search(text, found), found
    assert fingerprint.changed() == found  # and again
    assert Fingerprint(module).changed() is None


def test_in_place_updates_are_no_change(module: nn.Module) -> None:
    fingerprint = Fingerprint(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    module.load_state_dict({name: torch.zeros_like(value) for name, value in module.state_dict().items()})
    module.to("cpu", torch.float32)
    assert fingerprint.changed() is None


def test_hooks_that_were_there_may_stay(module: nn.Module) -> None:
    first = module[0].register_forward_hook(lambda *_: None)
    fingerprint = Fingerprint(module)
    assert fingerprint.changed() is None
    first.remove()
    module[0].register_forward_hook(lambda *_: None)
    assert "hooks" in (fingerprint.changed() or "")


def test_a_hook_on_all_modules_of_the_process(module: nn.Module) -> None:
    fingerprint = Fingerprint(module)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "hooks" in (fingerprint.changed() or "")
    handle.remove()
    assert fingerprint.changed() is None


def test_replaced_tensors_are_not_kept_alive_once_seen(module: nn.Module) -> None:
    fingerprint = Fingerprint(module)
    old = ref(module[0].linear.weight)
    assign(module)
    assert fingerprint.changed() is not None
    gc.collect()
    assert old() is None
    assert fingerprint.changed() is not None


def test_an_equal_scalar_is_another_tensor(module: nn.Module) -> None:
    module[0].register_buffer("gain", torch.ones(()))
    fingerprint = Fingerprint(module)
    module[0].gain = torch.ones(())
    assert "0.gain is another tensor" in (fingerprint.changed() or "")


def test_wrapper_subclasses_are_known_by_identity() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    fingerprint = Fingerprint(module)
    assert fingerprint.changed() is None
    module.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    assert "weight is another tensor" in (fingerprint.changed() or "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused(module: nn.Module) -> None:
    with pytest.raises(TypeError, match="scripted"):
        Fingerprint(torch.jit.script(nn.Linear(2, 2)))


def test_six_hundred_tensors_cost_tens_of_microseconds() -> None:
    fingerprint = Fingerprint(nn.Sequential(*(nn.Linear(2, 2) for _ in range(300))).eval())
    times = []
    for _ in range(300):
        start = time.perf_counter()
        fingerprint.changed()
        times.append(time.perf_counter() - start)
    assert min(times) < 300e-6, f"{min(times) * 1e6:.0f} microseconds"  # measured: 90 on a slow core
