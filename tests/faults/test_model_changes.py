"""A model that changes after the capture in the ways that layers of others allow: quantized, adapted, given another attribute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omnigraph.decoder import GraphedDecoder
from omnigraph.shapes import BucketPlan
from omnigraph.stats import Fallback

PLAN = BucketPlan.grid([1, 2], [5, 8])
SHAPES = [(1, 5), (1, 3), (2, 8), (3, 5), (1, 20)]


class Layers(nn.Module):
    """A decoder of linear layers, with a number and a table in plain attributes."""

    num_quantizers, codebook_size = 2, 16

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.out = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.gain, self.table = 1.0, torch.ones(8)
        self.requires_grad_(False).eval()

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes).sum(1) * self.table
        audio: Tensor = (self.gain * self.out(x + self.mid(x).tanh())).reshape(len(codes), 1, -1)
        return audio


def codes(*shape: int) -> Tensor:
    return torch.randint(16, (shape[0], 2, shape[1]))


def check(decoder: GraphedDecoder, module: nn.Module, *, changed: bool) -> None:
    """Every call is eager's, and whether the graphs still served says the stats."""
    decoder.stats.reset()
    for shape in SHAPES:
        x = codes(*shape)
        audio, expected = decoder.decode(x), module(x)
        torch.testing.assert_close(audio, expected)
    stats = decoder.stats  # a layer that is quantized by what a call holds mixes it: only exact calls are served then
    assert (stats.fallbacks[Fallback.MODULE_CHANGED], stats.hits > 0) == ((len(SHAPES), False) if changed else (0, True))


@pytest.fixture
def quantized() -> Callable[[nn.Module], None]:
    """`torch.ao`'s dynamic quantization of linear layers, in place."""

    def quantize(module: nn.Module) -> None:
        torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, inplace=True)

    return quantize


@pytest.mark.filterwarnings("ignore:.*quant:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quant:UserWarning")
def test_quantized_layers(quantized: Callable[[nn.Module], None]) -> None:
    module = Layers()
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup(strict=True)
        check(decoder, module, changed=False)
        quantized(module)
        check(decoder, module, changed=True)
        decoder.recapture()
        check(decoder, module, changed=False)
        other = Layers()
        quantized(other)
        module.load_state_dict(other.state_dict())  # packs weights anew, out of sight of parameters and buffers
        check(decoder, module, changed=True)
        check(decoder, other, changed=True)
        decoder.recapture()
        check(decoder, module, changed=False)
        other = Layers()
        quantized(other)
        module.mid.set_weight_bias(*other.mid._packed_params._weight_bias())
        check(decoder, module, changed=True)


@pytest.mark.filterwarnings("ignore:Adapter .* was active:UserWarning", "ignore:All adapters:UserWarning")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_lora_added_scaled_switched_merged_and_removed() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["mid", "out"], init_lora_weights=False)
    module, plain = Layers(), Layers()
    plain.load_state_dict(module.state_dict())
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup(strict=True)
        model = peft.inject_adapter_in_model(config, module).eval()
        check(decoder, module, changed=True)

        def recaptured() -> None:
            decoder.recapture()
            check(decoder, module, changed=False)

        there_and_back: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (lambda: module.mid.set_scale("default", 0.3), lambda: module.mid.set_scale("default", 1.0)),
            (lambda: module.out.scale_layer(2.0), lambda: module.out.unscale_layer(2.0)),
            (lambda: module.mid.enable_adapters(False), lambda: module.mid.enable_adapters(True)),
            (module.mid.merge, module.mid.unmerge),
        ]
        for change, back in there_and_back:
            recaptured()
            change()
            check(decoder, module, changed=True)
            back()
            check(decoder, module, changed=False)
        with torch.no_grad():
            module.mid.lora_B["default"].weight.mul_(0.5)  # in place
        check(decoder, module, changed=False)
        peft.inject_adapter_in_model(config, model, adapter_name="other")
        model.eval()
        check(decoder, module, changed=True)
        recaptured()
        module.out.set_adapter("default" if module.out.active_adapters == ["other"] else "other")
        check(decoder, module, changed=True)
        recaptured()
        for name in ("mid", "out"):
            layer: Any = getattr(module, name)
            layer.delete_adapter("other")
            layer.delete_adapter("default")
        check(decoder, module, changed=True)
        for name in ("mid", "out"):
            setattr(module, name, getattr(module, name).get_base_layer())
        check(decoder, module, changed=True)
        check(decoder, plain, changed=True)
        recaptured()


def gain(module: Layers) -> None:
    module.gain = 2.0


def table(module: Layers) -> None:
    module.table = torch.full((8,), 2.0)


def of_the_class(module: Layers) -> None:
    kind: Any = type(module)
    forward = kind.forward
    kind.forward = lambda self, codes: 2 * forward(self, codes)


@pytest.mark.parametrize("change", [gain, table, of_the_class])
def test_what_no_check_sees_is_kept_until_recapture(change: Callable[[Layers], None]) -> None:
    """As the documentation of `check_stale` says: the graph is that of the capture, whole; nothing in between, and no freed memory."""

    class Own(Layers):
        pass

    module = Own()
    before = copy.deepcopy(module)
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup(strict=True)
        x = codes(1, 5)
        then = before(x)
        change(module)
        junk = [torch.full((8,), torch.nan) for _ in range(100)]  # where a table that nobody holds would have been
        assert torch.equal(decoder.decode(x), then)
        assert not torch.equal(module(x), then)
        decoder.recapture()
        check(decoder, module, changed=False)
        del junk


class Listed(Layers):
    """Its last layer stands in a plain list: torch does not know of it, nor does a fingerprint."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(4, 4).requires_grad_(False)]

    def forward(self, codes: Tensor) -> Tensor:
        return super().forward(codes) + self.more[0](torch.ones(4)).sum()


def test_what_a_graph_reads_from_a_plain_list_stays_alive() -> None:
    module = Listed()
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup(strict=True)
        assert decoder._live is not None
        for graph in decoder._live.graphs.values():
            assert any(kept is module.more[0].weight for kept in graph.keeps)
        x = codes(1, 5)
        then = module(x)
        module.more[0] = nn.Linear(4, 4).requires_grad_(False)
        assert torch.equal(decoder.decode(x), then)  # that of the capture, not what took its place in memory
        decoder.recapture()
        check(decoder, module, changed=False)


def test_a_table_updated_in_place_is_read() -> None:
    module = Layers()
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup(strict=True)
        module.table.mul_(3)
        check(decoder, module, changed=False)
