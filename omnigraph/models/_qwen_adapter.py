"""What decode graphs need to know of Qwen-Image-2.1: its cached step on the target tokens alone, and what forbids capturing it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from omnigraph._needs import need
from omnigraph._warmup import RECOMPILE_LIMIT
from omnigraph.prefix import DecodeBuffers, DecodeGraphKey, Prefix
from omnigraph.stats import Fallback

_MODEL = "diffusers.models.transformers.transformer_qwenimage21"
# Classes of peft and vLLM, and torch's parametrizations: layers whose arithmetic is changed at run time. By name, so that none is imported.
_WRAPPERS = {"BaseTunerLayer", "BaseLayerWithLoRA", "ParametrizationList"}
_SHARDED = {"FSDPModule", "FullyShardedDataParallel"}
_processor, _parallel, _backend = attrgetter("processor"), attrgetter("_parallel_config"), attrgetter("_attention_backend")


class QwenImageAdapter:
    """Decode steps of diffusers' `QwenImage21Transformer2DModel` for a `DecodeGraphCache`.

    Args:
        model: the transformer.
        compiled: compile the blocks (regionally: one compilation serves all of them), the rest stays as it is. Inductor's own graphs
            are off. The first step of each key then takes the time to compile.
        persistent_staging: the offload hooks on the model itself bring weights back to the same addresses. Holds the hooks to it: the
            addresses are checked at each step.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False, persistent_staging: bool = False) -> None:
        self.module, self.compiled, self.persistent_staging = model, compiled, persistent_staging
        self._model: Any = model
        self._layer_cache = need(_MODEL).QwenImage21KVLayerCache
        self._registry = need("diffusers.models.attention_dispatch")._AttentionBackendRegistry
        self._forward: Any = need(_MODEL).QwenImage21TransformerBlock.forward  # not the class: torch.compile would not look inside
        if compiled:
            self._forward = torch.compile(self._forward, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False})
        self._named: tuple[list[Any], Any, str] = [], None, ""
        self._look()

    def _look(self) -> None:
        self._attentions = [block.attn for block in self._model.transformer_blocks]
        self._attributes = [vars(attention) for attention in self._attentions]

    def attention(self) -> str:
        """The backend of all blocks, or each block's where they differ."""
        chosen, active = [*map(_backend, map(_processor, self._attentions))], self._registry._active_backend
        if (chosen, active) != self._named[:2]:
            names = [str(getattr(one or active, "value", one or active)) for one in chosen]
            self._named = chosen, active, names[0] if len({*names}) == 1 else " ".join(names)
        return self._named[2]

    def state(self) -> object:
        """Parallelism, caching, the attention processors, quantization of the K/V cache."""
        quantized = map(dict.get, self._attributes, repeat("_kv_cache_dtype"))
        return [self._model._parallel_config, self._model._cache_config, *map(_processor, self._attentions), *quantized]

    def obstacle(self) -> Fallback | None:
        """Parallelism, quantization, wrapped layers and hooks, of the model or any part of it."""
        self._look()
        names = [{kind.__name__ for kind in type(part).__mro__} for part in self.module.modules()]
        parallel = [one for one in (self._model._parallel_config, *map(_parallel, map(_processor, self._attentions))) if one is not None]
        context = [one.context_parallel_config for one in parallel if one.context_parallel_config is not None]
        if any(one.ring_degree > 1 for one in context):
            return Fallback.RING_PARALLEL
        if context:
            return Fallback.SEQUENCE_PARALLEL
        if any(_SHARDED & kinds for kinds in names):
            return Fallback.SHARDED_PARAMETERS
        if parallel or any(type(parameter.data).__name__ == "DTensor" for parameter in self.module.parameters()):
            return Fallback.TENSOR_PARALLEL
        if any(attributes.get("_kv_cache_dtype") is not None for attributes in self._attributes):
            return Fallback.QUANTIZED_CACHE
        if any(_WRAPPERS & kinds for kinds in names):
            return Fallback.DYNAMIC_WRAPPERS
        return self._hooks()

    def _hooks(self) -> Fallback | None:
        """Hooks of diffusers, kept in a registry on the module, of accelerate, on `_hf_hook` (both replace `forward`), and of torch."""
        found = {Fallback.CACHE_HOOKS} if self._model._cache_config is not None else set()
        for part in self.module.modules():
            attributes = vars(part)
            registry = attributes.get("_diffusers_hook")
            names = list(registry.hooks) if registry is not None else []
            offloading = "_hf_hook" in attributes or any("offload" in name for name in names)
            if offloading and self.persistent_staging and part is self.module and len(names) <= 1:
                continue
            forward = attributes.get("forward")  # after removing hooks, both put the class's own method here
            replaced = forward is not None and getattr(forward, "__func__", None) is not type(part).forward
            if offloading:
                found.add(Fallback.OFFLOAD_HOOKS)
            elif names and not any("cast" in name for name in names):
                found.add(Fallback.CACHE_HOOKS)
            elif part._forward_hooks or part._forward_pre_hooks or replaced:
                found.add(Fallback.FORWARD_HOOKS)
        return next((reason for reason in (Fallback.OFFLOAD_HOOKS, Fallback.CACHE_HOOKS, Fallback.FORWARD_HOOKS) if reason in found), None)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Each key compiles anew, however many there are; the rotary product is complex, which Inductor leaves to torch's kernel."""
        limits = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT)
        with warnings.catch_warnings(), limits:
            warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex operators")
            yield

    def buffers(self, key: DecodeGraphKey, prefix: Prefix) -> DecodeBuffers:
        target: Any = key.layout[-1]
        return DecodeBuffers.like(prefix, tokens=prod(target), channels=self._model.img_in.in_features, dtype=key.dtype)

    def step(self, buffers: DecodeBuffers) -> Tensor:
        """The model's cached call without its host reads: its own submodules, on the target tokens `[batch, tokens, channels]`.

        A row at time 0 is carried along, as the model does, since a product of other shape may round otherwise. Target tokens all read
        their own sample's row of the modulation, so no mask chooses.
        """
        model = self._model
        hidden = model.img_in(buffers.hidden)
        timestep = torch.cat([buffers.timestep, buffers.timestep.new_zeros(1)])
        embedding = model.time_text_embed(timestep, hidden)
        modulation = model.modulation(embedding)[:-1]
        (freqs,) = buffers.freqs
        with self._compiling() if self.compiled else nullcontext():
            for block, (key, value) in zip(model.transformer_blocks, buffers.layers, strict=True):
                cache = self._layer_cache()
                cache.store(key, value)
                hidden = self._forward(block, hidden, modulation, freqs, layer_cache=cache, kv_cache_mode="cached")
        everywhere = torch.ones(hidden.shape[1], dtype=torch.bool, device=hidden.device)
        velocity: Tensor = model.proj_out(model.norm_out(hidden, embedding, everywhere))
        return velocity
