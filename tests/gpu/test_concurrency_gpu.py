"""8 threads, each on its own stream, by 1,000 calls on a GPU, while graphs are captured, kept and closed: every result is eager's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omnigraph.stats import Fallback
from tests.faults.little import Step, whole
from tests.faults.racing import race_on_a_cache, race_on_a_decoder

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def stream() -> torch.cuda.StreamContext:
    return torch.cuda.stream(torch.cuda.Stream())


@pytest.fixture
def exact() -> Iterator[None]:
    """Without cuDNN, whose transforms leave the whole numbers."""
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
        yield


@pytest.mark.parametrize("trim", [0, 3])
def test_a_decoder_that_is_reconfigured_meanwhile(exact: None, trim: int) -> None:
    found = race_on_a_decoder(whole(DEVICE, trim=trim).double(), threads=8, calls=1000, where=stream, pause=0.02)
    print(found)
    assert found["plans"] > 3
    assert min(found[kind] for kind in ("exact", "padded", "split", "fallback")) > 0


def test_a_cache_of_decode_graphs_that_evicts_meanwhile() -> None:
    found = race_on_a_cache(Step().to(DEVICE), threads=8, calls=1000, where=stream, pause=0.05)
    print(found)
    assert found["hits"] > 2000
    assert set(found) <= {"hits", "copies", Fallback.UNKNOWN_KEY, Fallback.CAPTURE_FAILED}
    assert found[Fallback.CAPTURE_FAILED] == 0
    assert found["copies"] > 100


def test_a_thread_that_allocates_and_pins_during_warm_ups(exact: None) -> None:
    """Beside the 8: captures are told apart by thread, so none of this is refused."""
    import threading

    stop, wrong = threading.Event(), list[BaseException]()

    def disturb() -> None:
        try:
            with stream():
                while not stop.is_set():
                    host = torch.randn(2**18).pin_memory()
                    there = host.to(DEVICE, non_blocking=True)
                    assert float(there.sum()) == pytest.approx(float(host.sum()), abs=1.0)
                    del host, there
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        race_on_a_decoder(whole(DEVICE).double(), threads=2, calls=300, where=stream, pause=0.0)
    finally:
        stop.set()
        thread.join()
    assert wrong == []
