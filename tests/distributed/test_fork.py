"""Threads and GPUs, which a forked process cannot use. `tests/extras/test_launchers.py` trains in processes that a notebook forked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
import torch

from fabricate import ConfigurationError
from fabricate.distributed.fork import settle_fork

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that multiprocessing forked."""
    monkeypatch.setattr(multiprocessing.current_process(), "_start_method", "fork", raising=False)


@pytest.mark.usefixtures("three_threads")
def test_a_process_that_nobody_forked_keeps_its_threads() -> None:
    assert settle_fork(CPU) == ""
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads", "fork")
def test_a_forked_process_computes_with_one_thread_and_the_plan_says_so() -> None:
    assert settle_fork(CPU).startswith("one thread per rank instead of 3: ")
    assert torch.get_num_threads() == 1
    assert settle_fork(CPU) == ""


@pytest.mark.usefixtures("fork")
def test_gpus_that_the_notebook_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(
        ConfigurationError, match=r"use them\. Restart the notebook's kernel, and call nothing that touches a GPU"
    ):
        settle_fork(GPU)
