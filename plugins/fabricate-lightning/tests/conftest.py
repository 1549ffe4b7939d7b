"""Puts this folder on the import path, for the modules that tests and ranks share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for GPUs

import pytest
import torch

from fabricate.testing import close_pools

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _session() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_pools()
