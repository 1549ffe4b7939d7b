"""Plugins with one fault each: the kit finds it, and names the check and the expectation.

The classes are at the top level because every rank imports them from this file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fabricate import DDP, FSDP, Callback, Precision, Strategy, Trainer, TrainModule, hookimpl
from fabricate.testing import KitFailure, check_plugin, check_precision, check_strategy

TIMEOUT = 20.0


def failure(check: Callable[..., None], subject: Any, **arguments: Any) -> str:
    """The kit's words about `subject`."""
    with pytest.raises(KitFailure) as caught:
        check(subject, **arguments)
    message = str(caught.value)
    name = repr(subject) if isinstance(subject, str) else subject.__name__
    assert message.startswith(f"{check.__name__}({name}): ")
    for part in ("expected: ", "found: ", "what to do: "):
        assert part in message
    return message


# ------------------------------------------------------------------------------------------------------------ plugins


class DrawsRandomNumbers(Callback):
    def on_step(self) -> None:
        torch.rand(1)


class EditsWeights(Callback):
    def on_step(self, module: TrainModule, step: int) -> None:
        if step == 3:
            with torch.no_grad():
                next(module.parameters()).mul_(1.0001)


class EditsWeightsOnRankOne(Callback):
    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.is_main:
            with torch.no_grad():
                module.get_parameter("head.bias").add_(1e-6)


class LosesItsState(Callback):
    """Counts, saves the count and never takes it back."""

    count = 0

    def on_step(self) -> None:
        self.count += 1

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state["count"] = self.count


class KeepsItsStateToItself(Callback):
    """Freezes gradients for a while and does not save for how long."""

    left = 4

    def on_before_step(self, module: TrainModule) -> None:
        self.left -= 1
        if self.left > 0:
            for parameter in module.parameters():
                parameter.grad = None


class LogsACountThatIsNotSaved(Callback):
    count = 0

    def on_step(self, module: TrainModule) -> None:
        self.count += 1
        module.log("count", self.count)


class LogsTheTime(Callback):
    """What it logs is never the same, in an uninterrupted run either."""

    def on_step(self, module: TrainModule) -> None:
        module.log("time", time.perf_counter())


class ReducesOnRankZero(Callback):
    def on_step(self, trainer: Trainer) -> None:
        if trainer.is_main and trainer.accelerator.num_processes > 1:
            torch.distributed.all_reduce(torch.zeros(1))


class SleepsOnRankOne(Callback):
    def on_step(self, trainer: Trainer) -> None:
        if not trainer.is_main:
            time.sleep(600)


class SwallowsExceptions(Callback):
    """Goes on after whatever a listener raises."""

    @hookimpl(wrapper=True)
    def on_step(self) -> Any:
        with contextlib.suppress(ValueError):
            return (yield)


class MisspeltArgument(Callback):
    def on_step(self, stpe: int) -> None: ...


def test_random_numbers_drawn_in_a_hook_are_found() -> None:
    message = failure(check_plugin, DrawsRandomNumbers, strategies=["single"])
    assert "neutrality: single on 1 rank" in message
    assert "different random generators on rank 0, first after step 1" in message


def test_weights_edited_in_place_are_found_unless_the_plugin_is_meant_to() -> None:
    message = failure(check_plugin, EditsWeights, strategies=["single"])
    assert "neutrality: single on 1 rank" in message
    assert "different weights on rank 0, first after step 3" in message
    check_plugin(EditsWeights, neutral=False, strategies=["single"])


def test_weights_that_differ_between_ranks_are_found() -> None:
    message = failure(check_plugin, EditsWeightsOnRankOne, neutral=False, strategies=["ddp"])
    assert "one model in a checkpoint: ddp on 2 ranks" in message
    assert "at checkpoint 1 ranks 0 and 1 hold different values of head.bias[0:1]" in message


def test_state_that_is_saved_and_not_restored_is_found() -> None:
    message = failure(check_plugin, LosesItsState, strategies=["single"])
    assert "state round trip: single on 1 rank" in message
    assert '{"LosesItsState": {"count": 4}} instead of {"LosesItsState": {"count": 6}}' in message


def test_state_that_is_not_saved_and_changes_the_updates_is_found() -> None:
    message = failure(check_plugin, KeepsItsStateToItself, neutral=False, strategies=["single"])
    assert "exact resume: single on 1 rank" in message
    assert "different tensors in the last checkpoint: model/" in message


@pytest.mark.parametrize("plugin", [ReducesOnRankZero, SleepsOnRankOne])
def test_a_rank_that_leaves_the_others_waiting_is_an_error_and_not_a_stuck_suite(plugin: type[Callback]) -> None:
    message = failure(check_plugin, plugin, strategies=["ddp"], timeout=TIMEOUT)
    assert "ranks out of step: saving, ddp on 2 ranks" in message
    assert "every rank has to call every collective, in the same order" in message
    if plugin is SleepsOnRankOne:  # of two that wait in different collectives one may be ended by gloo, and sooner
        assert f"did not finish in {TIMEOUT:g} s" in message


def test_a_metric_that_depends_on_what_is_not_saved_is_found() -> None:
    message = failure(check_plugin, LogsACountThatIsNotSaved, strategies=["single"])
    assert "logged metrics: single on 1 rank" in message
    assert "other values of count" in message
    check_plugin(LogsTheTime, strategies=["single"])


def test_a_swallowed_exception_is_found() -> None:
    message = failure(check_plugin, SwallowsExceptions, strategies=["single"])
    assert "a failing rank, 1 rank" in message
    assert "every rank finished as if nothing had happened" in message


def test_a_hook_argument_that_does_not_exist_is_found() -> None:
    message = failure(check_plugin, MisspeltArgument, strategies=["single"])
    assert "hook arguments: saving, single on 1 rank" in message
    assert "did you mean 'step'?" in message


SIDE_EFFECTS = """
import os, random, torch
from fabricate import Callback

print("hello")
os.environ["LEFT_BY_AN_IMPORT"] = "1"
random.random()
torch.set_num_threads(2)

class Noisy(Callback):
    pass
"""


def test_side_effects_of_an_import_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy_plugin.py").write_text(SIDE_EFFECTS)
    package = tmp_path / "noisy_plugin-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy-plugin\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[fabricate]\nnoisy = noisy_plugin:Noisy\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = failure(check_plugin, "noisy")
    assert "check_plugin('noisy'): 4 checks failed" in message
    for what in ("environment variables", "the random generators", "torch's number of threads"):
        assert f"leave {what} alone" in message
    assert "expected: importing and building print nothing\n  found: 'hello\\n'" in message


# ------------------------------------------------------------------------------------------------------------ strategies


class ForgetsToAverage(Strategy):
    """What the base class does: no wrapper, so every rank follows its own gradients."""

    name = "forgets-to-average"
    min_world_size = 2


class AveragesTwice(DDP):
    name: ClassVar[str] = "averages-twice"

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / torch.distributed.get_world_size())


class Rounds(DDP):
    """Rounds gradients to bfloat16, as a strategy that exchanges them in few bits."""

    name: ClassVar[str] = "rounds"

    def prepare(self, accelerator: Any, root: Any, module: TrainModule) -> torch.nn.Module:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._round)
        return super().prepare(accelerator, root, module)

    @staticmethod
    def _round(parameter: torch.nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.bfloat16())


class IgnoresAccumulation(DDP):
    """Only the last micro-batch of a window counts."""

    name: ClassVar[str] = "ignores-accumulation"

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        return self._dropped(model)

    @contextlib.contextmanager
    def _dropped(self, model: torch.nn.Module) -> Iterator[None]:
        yield
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


class SaysItShards(DDP):
    name: ClassVar[str] = "says-it-shards"
    shards_parameters: ClassVar[bool] = True


class HidesGradients(DDP):
    """Takes the gradients away before others see them, and says that they can be seen."""

    name: ClassVar[str] = "hides-gradients"

    def on_before_step(self, module: TrainModule) -> None:
        self._taken = [parameter.grad for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.grad = None

    @hookimpl
    def optimizer_step(self, module: TrainModule) -> None:
        for parameter, gradient in zip(module.parameters(), self._taken, strict=True):
            parameter.grad = gradient


class SaysForwardsAreLocal(FSDP):
    name: ClassVar[str] = "says-forwards-are-local"
    lockstep: ClassVar[bool] = False


class ClipsNothing(DDP):
    name: ClassVar[str] = "clips-nothing"

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None: ...


class ClipsNoValue(DDP):
    name: ClassVar[str] = "clips-no-value"

    def clip_by_value(self, parameters: Sequence[torch.nn.Parameter], max_value: float) -> None: ...


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            ForgetsToAverage,
            [
                "equal replicas: whole batches, 2 ranks",
                "after update 1 ranks 0 and 1 hold different values of blocks.0.bias[0:32]",
            ],
        ),
        (AveragesTwice, ["agreement with one process: whole batches, 2 ranks", "is 0.5 times as large"]),
        (
            Rounds,
            [
                "agreement with one process: whole batches, 2 ranks",
                "differs by up to 0.00",
                "rounds or compresses gradients",
            ],
        ),
        (IgnoresAccumulation, ["agreement with one process: accumulation, 2 ranks"]),
        (ClipsNothing, ["agreement with one process: clipping, 2 ranks"]),
        (ClipsNoValue, ["agreement with one process: clipping by value, 2 ranks"]),
        (SaysItShards, ["shards_parameters = True: 2 ranks", "elements by rank [1089, 1089]"]),
        (HidesGradients, ["exposes_gradients: whole batches, 2 ranks", "None on rank 0 for blocks.0.bias"]),
    ],
)
def test_a_strategy_that_does_not_do_what_it_says_is_found(strategy: type[Strategy], words: list[str]) -> None:
    message = failure(check_strategy, strategy, world_sizes=[2])
    for each in words:
        assert each in message


def test_a_strategy_whose_forward_needs_all_ranks_and_says_it_does_not_is_found() -> None:
    message = failure(check_strategy, SaysForwardsAreLocal, world_sizes=[2], timeout=30)
    assert "ranks out of step: saving, 2 ranks" in message


# ------------------------------------------------------------------------------------------------------------ precisions


class DeclaresAnotherDtype(Precision):
    name = "declares-another-dtype"
    compute_dtype = "float16"

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16)


class StaysInFloat32(Precision):
    """Enters autocast, as it should, and converts layers so that nothing comes of it."""

    name = "stays-in-float32"
    mixed_precision = "bf16"
    compute_dtype = "bfloat16"

    def convert(self, module: torch.nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.forward = torch.autocast("cpu", enabled=False)(layer.forward)

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16)


class TellsAccelerateOtherwise(Precision):
    name = "tells-accelerate-otherwise"
    mixed_precision = "bf16"


class RenamesParameters(Precision):
    name = "renames-parameters"

    def convert(self, module: Any) -> None:
        module.head = torch.nn.Sequential(module.head)


class RoundsTooMuch(Precision):
    name = "rounds-too-much"

    def on_before_step(self, module: TrainModule) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.sign_().mul_(0.05)


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (DeclaresAnotherDtype, ["computes in float16, but autocast computes in bfloat16 on cpu"]),
        (
            StaysInFloat32,
            ["compute dtype: single on 1 rank", "layers compute in bfloat16", "in training_step is float32"],
        ),
        (TellsAccelerateOtherwise, ["as Accelerate is told (mixed_precision='bf16')", "in training_step is float32"]),
        (RenamesParameters, ["checkpoint names: single", "missing model/head.bias", "unknown model/head.0.bias"]),
        (RoundsTooMuch, ["close to fp32: single on 1 rank"]),
    ],
)
def test_a_precision_that_is_not_what_it_says_is_found(precision: type[Precision], words: list[str]) -> None:
    message = failure(check_precision, precision, strategies=["single"])
    for each in words:
        assert each in message
