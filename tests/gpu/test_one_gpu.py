"""Fits on one GPU: they equal the loop by hand on it, wait for it no more often, and place everything on it.

The cases are those of campaigns/gpu, whose scripts also measure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from campaigns.gpu import memory, ranks, resume, smoke
from campaigns.gpu.measuring import Cuda, Host, LeftOut, Report


@pytest.fixture(scope="session")
def gpu() -> Host:
    return Cuda()


def passes(function: Any, *arguments: Any) -> None:
    """The case runs, and finds nothing wrong."""
    try:
        figures = function(*arguments)
    except LeftOut as exc:
        pytest.skip(str(exc))
    assert not figures.get("failed"), figures


@pytest.mark.parametrize("precision", smoke.PRECISIONS)
@pytest.mark.parametrize("variant", [variant for variant in smoke.VARIANTS if variant != "compile"])
def test_a_fit_is_the_loop_by_hand_and_waits_no_more_often(gpu: Host, precision: str, variant: str) -> None:
    passes(smoke.compared, gpu, precision, variant)


def test_compiled_blocks_train_as_those_of_the_loop_by_hand(gpu: Host) -> None:
    passes(smoke.compared, gpu, "bf16", "compile")


def test_evaluation_and_prediction_are_those_by_hand(gpu: Host) -> None:
    passes(smoke.evaluated, gpu)


def test_one_process_of_torchrun_trains(gpu: Host) -> None:
    passes(smoke.under_torchrun, gpu)


@pytest.mark.parametrize("name", smoke.ENDINGS)
def test_what_only_a_device_can_refuse_ends_with_an_error_that_helps(gpu: Host, name: str) -> None:
    passes(smoke.ending, gpu, name)


@pytest.mark.parametrize("count", ranks.STARTS)
def test_every_strategy_trains_as_the_loop_by_hand_on_ranks_of_one_gpu(gpu: Host, count: int, tmp_path: Path) -> None:
    report = Report("ranks", gpu, argparse.Namespace(seconds=600.0, out=tmp_path, only=None))
    ranks.start(report, gpu, count)
    assert {name: case["failed"] for name, case in report.cases.items() if case.get("failed")} == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_of_memory_is_that_of_the_loop_by_hand(gpu: Host, precision: str) -> None:
    passes(memory.beside_hand, gpu, precision)


@pytest.mark.parametrize("name", ["bf16, dropout", "fp16"])
def test_a_resume_is_exact_with_deterministic_algorithms(gpu: Host, name: str) -> None:
    passes(resume.verified, gpu, resume.CHECKS[name])
