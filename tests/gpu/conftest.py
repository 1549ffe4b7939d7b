"""`make test-gpu`: tests that need an NVIDIA GPU. `make test` does not collect this folder, and its conftest does not apply here."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """A machine without a GPU cannot pass these tests, so it must not seem to."""
    config.addinivalue_line("markers", "two_gpus: needs a second GPU")
    if not torch.cuda.is_available():
        pytest.exit("make test-gpu needs an NVIDIA GPU; torch sees none here", returncode=2)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("two_gpus") is not None and torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
