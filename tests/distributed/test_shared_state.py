"""Objects of Accelerate that user code or a library made before a fit: adopted if they agree with it, otherwise an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DynamoBackend

from fabricate import Callback, ConfigurationError, Trainer
from fabricate.testing import run_ranks
from fabricate.testing.ranks import close_pools
from tests.support.wrong import ROWS, Regression

SHARED = (PartialState, AcceleratorState, GradientState)


def forget() -> None:
    for kind in SHARED:
        kind._shared_state.clear()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    forget()


class During(Callback):
    """What Accelerate says while the fit runs."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_step(self, trainer: Trainer) -> None:
        state = PartialState()
        with state.main_process_first():
            self.values = [state.num_processes, state.process_index, trainer.accelerator.mixed_precision]


def fit(**options: Any) -> list[Any]:
    during = During()
    Trainer(max_steps=1, progress=False, plugins=[during], **options).fit(Regression(), ROWS, batch_size=2)
    return during.values


def test_a_partial_state_from_before_is_adopted_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    state = PartialState(cpu=True)
    before = dict(PartialState._shared_state)
    for _ in range(2):
        with state.main_process_first():
            assert fit() == [1, 0, "no"]
        assert PartialState._shared_state == before
        assert not AcceleratorState._shared_state
    with caplog.at_level(logging.INFO):
        get_logger("mine").info("of accelerate.logging")
    assert "of accelerate.logging" in caplog.text


def test_a_fit_without_a_partial_state_before_it_leaves_none() -> None:
    assert fit() == [1, 0, "no"]
    assert [kind._shared_state for kind in SHARED] == [{}, {}, {}]


def test_the_arguments_of_transformers_may_be_parsed_before(tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu"]
    )
    assert fit() == [1, 0, "no"]
    assert arguments.device == torch.device("cpu")
    assert arguments.distributed_state.num_processes == 1


def test_an_accelerator_from_before_is_adopted_and_is_as_it_was() -> None:
    mine = accelerate.Accelerator(cpu=True)
    assert fit(precision="bf16", gradient_accumulation_steps=2) == [1, 0, "bf16"]
    assert (mine.mixed_precision, mine.gradient_accumulation_steps, mine.num_processes) == ("no", 1, 1)
    model = mine.prepare(torch.nn.Linear(1, 1))
    assert model(torch.ones(1)).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mixed_precision": "bf16"},
            r"Accelerator\(mixed_precision='bf16'\) was built before .* Trainer\(precision='bf16'\)",
        ),
        ({"gradient_accumulation_steps": 4}, r"Trainer\(gradient_accumulation_steps=4\), or forget that Accelerator"),
        ({"dynamo_backend": DynamoBackend.EAGER}, r"Accelerator\(dynamo_plugin=...\) was built before the fit"),
    ],
)
def test_an_accelerator_that_asks_for_something_else_is_an_error(options: Any, message: str) -> None:
    mine = accelerate.Accelerator(cpu=True, **options)
    with pytest.raises(ConfigurationError, match=message):
        fit(precision="fp32")
    assert PartialState._shared_state, "the user's own Accelerator was taken down"
    assert mine.num_processes == 1
    AcceleratorState._reset_state(True)  # the way out that the message names
    assert fit(precision="fp32") == [1, 0, "no"]


def test_an_accelerator_that_asks_for_the_same_is_adopted() -> None:
    mine = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert fit(precision="bf16", gradient_accumulation_steps=2) == [1, 0, "bf16"]
    assert (mine.mixed_precision, mine.gradient_accumulation_steps) == ("bf16", 2)


def test_a_device_that_is_not_that_of_the_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    PartialState()
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    expected = "is on meta, but the fit runs on cpu: to use the CPU, set ACCELERATE_USE_CPU=true"
    with pytest.raises(ConfigurationError, match=expected):
        fit()


def on_two_ranks() -> list[Any]:
    """A PartialState that knows of one process is refused; one that knows of two serves before, during and after fits."""
    rank, answers = int(os.environ["RANK"]), []
    assert not dist.is_initialized(), "the PartialState below has to open the process group"
    PartialState()  # without cpu=True Accelerate takes each CPU process for a training of its own
    try:
        fit(strategy="ddp")
    except ConfigurationError as exc:
        answers.append(str(exc))
    forget()
    state = PartialState(cpu=True)
    with state.main_process_first():
        pass
    answers += [fit(strategy=strategy) for strategy in ("ddp", "fsdp")]
    with state.main_process_first():
        answers.append((state.num_processes, state.process_index == rank, state.distributed_type.value))
    forget()
    answers.append(fit(strategy="ddp"))
    return answers


def test_two_ranks_have_to_know_of_each_other() -> None:
    close_pools()
    for rank, (refused, *fits, after, again) in enumerate(run_ranks(on_two_ranks, 2)):
        assert f"says process 0 of 1, but this is rank {rank} of 2" in refused
        assert "PartialState(cpu=True), Accelerator(cpu=True) or TrainingArguments(use_cpu=True)" in refused
        assert fits == [[2, rank, "no"]] * 2
        assert after == (2, True, "MULTI_CPU")
        assert again == [2, rank, "no"]
