"""8 threads by 1,000 calls, while graphs are captured, kept and closed: every result is eager's, to the bit."""

from __future__ import annotations

import pytest
import torch

from omnigraph.stats import Fallback
from tests.faults.little import Step, whole
from tests.faults.racing import race_on_a_cache, race_on_a_decoder


@pytest.mark.parametrize("check_codes", [True, False])  # without the check, shapes seen before take a shorter way
def test_a_decoder_that_is_reconfigured_meanwhile(check_codes: bool) -> None:
    found = race_on_a_decoder(whole(trim=3), threads=8, calls=1000, pause=0.02, check_codes=check_codes)
    print(found)
    assert found["plans"] > 3
    assert min(found[kind] for kind in ("exact", "padded", "split", "fallback")) > 0


def test_a_cache_of_decode_graphs_that_evicts_meanwhile() -> None:
    torch.manual_seed(0)
    found = race_on_a_cache(Step(), threads=8, calls=1000, pause=0.05)
    print(found)
    assert found["hits"] > 2000
    assert set(found) <= {"hits", "copies", Fallback.UNKNOWN_KEY}
    assert found["copies"] > 100
