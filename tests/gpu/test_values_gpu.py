"""Codes out of range on a GPU: what the check says, what it costs, and that it is off unless asked for."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from omnigraph.decoder import GraphedDecoder
from omnigraph.models import code2wav, tiny
from omnigraph.shapes import BucketPlan

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_out_of_range_is_named_where_it_is_asked_for() -> None:
    module = tiny(device=DEVICE)
    codes = torch.randint(32, (2, 4, 8), device=DEVICE)
    codes[1, 2, 4] = 32
    with GraphedDecoder(module, BucketPlan.grid([1, 2], [8]), check_codes=True) as decoder:
        decoder.warmup(strict=True)
        decoder.decode(codes.clamp(max=31))
        with pytest.raises(ValueError, match="codes go from 0 to 31; got 0 to 32, the first 32 in row 1, quantizer 2, frame 4"):
            decoder.decode(codes)
        assert decoder.stats.calls == 1
    with GraphedDecoder(module, BucketPlan.grid([1, 2], [8])) as decoder:
        decoder.warmup(strict=True)
        assert torch.equal(decoder.decode(codes), module(codes))  # row 0 of the next quantizer, as eager reads it


@pytest.mark.parametrize("frames", [4, 25])
def test_what_the_check_costs(frames: int) -> None:
    """Microseconds of the host for calls in a row, with the check and without; a call with it waits for the one before."""
    module = code2wav(dtype=torch.bfloat16, device=DEVICE)
    codes = torch.randint(module.config.codebook_size, (1, module.config.num_quantizers, frames), device=DEVICE)
    taken: dict[bool, tuple[float, float]] = {}
    for checked in (False, True):
        with GraphedDecoder(module, BucketPlan.grid([1], [frames]), check_codes=checked) as decoder:
            decoder.warmup(strict=True)
            host, whole = [], []
            for _ in range(60):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(8):
                    decoder.decode(codes)
                host.append((time.perf_counter() - start) * 1e6 / 8)
                torch.cuda.synchronize()
                whole.append((time.perf_counter() - start) * 1e6 / 8)
            taken[checked] = median(host[10:]), median(whole[10:])
    (host, whole), (host_checked, whole_checked) = taken[False], taken[True]
    print(
        f"1x{frames}, 8 calls in a row, us a call: host {host:.0f}, with the check {host_checked:.0f}; "
        f"until the device is done {whole:.0f} and {whole_checked:.0f}, {whole_checked - whole:.0f} more"
    )
    assert host_checked > host
