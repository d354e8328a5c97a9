"""A GPU with little memory left, for real: allocations fail as they do when it is full."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor


@contextmanager
def little_memory(device: torch.device, left: int = 0) -> Iterator[None]:
    """No more than is reserved now and `left` bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min((torch.cuda.memory_reserved() + left) / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def all_that_is_left(device: torch.device) -> list[Tensor]:
    """What the allocator has free and may still reserve, in pieces from 16 MiB to 512 bytes."""
    hog: list[Tensor] = []
    for elements in (2**22, 2**19, 2**17, 2**7):
        with suppress(torch.OutOfMemoryError):
            while True:
                hog.append(torch.empty(elements, device=device))
    return hog
