"""What all tests share: a seed each, and which tests need what this machine may lack."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("omnigraph", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("omnigraph")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for code under test that uses the global generator
    torch.manual_seed(0)
