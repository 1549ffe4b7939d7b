"""Weights that hooks and steps change under zero1, zero2 and zero3, on real ranks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from fabricate_deepspeed.stage3 import ZeRO3

from fabricate import Callback, ConfigurationError, FabricateError, Trainer, TrainModule
from fabricate.testing import run_ranks
from tests.support.by_hand import (
    ROWS,
    TOLERANCE,
    WIDTH,
    Net,
    Recorder,
    by_hand,
    difference,
    fit,
)

STAGES = ("zero1", "zero2", "zero3")


class Changed(Net):
    """Hooks change weights in every way: at the start of the fit, after each update, for evaluations, in a frozen copy."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.teacher = torch.nn.Linear(WIDTH, 7).requires_grad_(False)

    def on_fit_start(self, trainer: Trainer) -> None:
        with trainer.strategy.changing([self.second.bias]):
            torch.nn.init.constant_(self.second.bias, 0.25)

    def on_step(self, trainer: Trainer) -> None:
        with torch.no_grad(), trainer.strategy.changing(self.parameters()):
            self.first.weight.clamp_(-0.1, 0.1)
            self.second.weight.data.mul_(0.5)
            self.gain.data = self.gain.data * 0.9
            self.second.bias.data = torch.linspace(0.0, 1.0, len(self.second.bias))
            torch._foreach_mul_(list(self.norm.parameters()), 0.9)
            for mean, weight in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    def on_eval_start(self, trainer: Trainer) -> None:
        with torch.no_grad(), trainer.strategy.changing(self.parameters()):
            self.kept = self.first.bias.clone()
            self.first.bias.zero_()

    def on_eval_end(self, trainer: Trainer) -> None:
        with torch.no_grad(), trainer.strategy.changing(self.parameters()):
            self.first.bias.copy_(self.kept)


def _without_whole_parameters() -> ZeRO3:
    """DeepSpeed leaves small parameters whole on every rank, unless it is told not to."""
    return ZeRO3(config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})


def _changed(strategy: str) -> dict[str, dict[str, torch.Tensor]]:
    by_precision = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        recorder = Recorder()
        trainer = Trainer(
            strategy=strategy or _without_whole_parameters(),
            precision=precision,
            max_steps=4,
            seed=3,
            validate_every=2,
            progress=False,
            plugins=[recorder],
        )
        result = trainer.fit(Changed(), ROWS, ROWS, batch_size=4, shuffle=False)
        by_precision[precision] = {**recorder.weights, "val_loss": torch.tensor(result.metrics["val_loss"])}
    return by_precision


@pytest.mark.parametrize("strategy", [*STAGES, "", "fsdp"])
def test_weights_that_hooks_change_are_those_of_every_other_strategy(strategy: str) -> None:
    wanted, actual = run_ranks(_changed, 2, "ddp")[0], run_ranks(_changed, 2, strategy)[0]
    for precision, allowed in (("fp32", 1e-6), ("bf16", 2e-2)):
        apart = {n: float((actual[precision][n].float() - w).abs().max()) for n, w in wanted[precision].items()}
        assert {name: difference for name, difference in apart.items() if difference > allowed} == {}, precision
    lent = actual["bf16"]["first.bias"]  # to evaluations, which left its master as exact as it was
    assert bool((lent != lent.bfloat16().float()).any())


class Shrinking(Net):
    """A hook changes a small weight for the evaluation and for what follows, without `changing`."""

    def on_eval_start(self) -> None:
        with torch.no_grad():
            self.second.bias.mul_(0.5)


def _shrunk(strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    recorder = Recorder()
    options: Any = {"strategy": strategy, "precision": "fp32", "progress": False, "plugins": [recorder]}
    trainer = Trainer(max_steps=4, validate_every=2, sanity_batches=0, seed=3, **options)
    metrics = trainer.fit(Shrinking(), ROWS, ROWS, batch_size=4, shuffle=False).metrics
    return {**recorder.weights, "val_loss": torch.tensor(metrics["val_loss"])}


@pytest.mark.parametrize("strategy", STAGES)
def test_a_small_weight_that_is_changed_when_an_evaluation_begins_stays_changed(strategy: str) -> None:
    wanted, actual = (run_ranks(_shrunk, 2, name)[0] for name in ("ddp", strategy))
    apart = {name: float((actual[name] - value).abs().max()) for name, value in wanted.items()}
    assert {name: difference for name, difference in apart.items() if difference > 1e-6} == {}


class Clamping(Net):
    def on_step(self) -> None:
        self.first.weight.data.clamp_(-0.1, 0.1)


def _clamped() -> str:
    with pytest.raises(FabricateError) as caught:
        Trainer(strategy=_without_whole_parameters(), max_steps=1, progress=False).fit(Clamping(), ROWS, batch_size=4)
    return str(caught.value)


class Wide(TrainModule):
    """Layers that DeepSpeed does not keep whole, but leaves whole after a forward that training continues with a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Tanh(), torch.nn.Linear(400, 400))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layers(batch) - batch).square().mean()

    def validation_step(self, batch: torch.Tensor) -> Any:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Halves(Callback):
    """Halves the final weights, as a callback with an average of the weights does, and asks for another evaluation."""

    def on_complete(self, trainer: Trainer, module: TrainModule) -> None:
        for parameter in module.parameters():
            trainer.strategy.local_part(parameter).memory.mul_(0.5)
        trainer.strategy.after_load()
        trainer.request_eval()


class HalvesAtTheEnd(Callback):
    """Halves the weights after the evaluation of each epoch."""

    def on_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        with trainer.strategy.changing(module.parameters()), torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)


class Tokens(TrainModule):
    """A small language model of transformers, of which DeepSpeed gathers the first layers before they are needed: it has a hidden size,
    which lowers the size from which a layer is not kept whole."""

    def configure_model(self) -> None:
        transformers = importlib.import_module("transformers")
        sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: torch.Tensor) -> Any:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _changed_after_an_evaluation(strategy: str) -> float:
    torch.manual_seed(0)
    rows = torch.randint(50, (32, 8), generator=torch.Generator().manual_seed(1))
    options: Any = {"strategy": strategy, "precision": "fp32", "progress": False, "plugins": [HalvesAtTheEnd()]}
    return Trainer(max_epochs=2, seed=1, **options).fit(Tokens(), rows, rows[:7], batch_size=2).metrics["val_loss"]


def test_weights_may_be_changed_right_after_an_evaluation() -> None:
    """DeepSpeed has begun to gather layers then, for the next forward."""
    losses = [run_ranks(_changed_after_an_evaluation, 2, strategy, timeout=120)[0] for strategy in ("ddp", "zero3")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def _evaluated_after_halving(strategy: str) -> tuple[float, float]:
    torch.manual_seed(0)
    module, rows = Wide(), torch.randn(8, 400, generator=torch.Generator().manual_seed(1))
    options: Any = {"strategy": strategy, "precision": "fp32", "progress": False}
    fit = Trainer(max_epochs=2, seed=1, sanity_batches=0, plugins=[Halves()], **options)
    metrics = fit.fit(module, rows, rows, batch_size=2).metrics
    return metrics["val_loss"], Trainer(**options).validate(module, rows, batch_size=2)["val_loss"]


@pytest.mark.parametrize("strategy", STAGES)
def test_an_evaluation_after_new_weights_were_loaded_uses_them_in_every_layer(strategy: str) -> None:
    last, again = run_ranks(_evaluated_after_halving, 2, strategy, timeout=120)[0]
    assert last == pytest.approx(again, rel=1e-5)


def test_a_hook_that_uses_an_empty_parameter_is_refused_by_name() -> None:
    for text in run_ranks(_clamped, 2):
        assert text.startswith(
            "on_step uses the parameter first.weight, which is sharded under strategy='zero3' and empty outside"
        )
        assert "trainer.strategy.changing(" in text


class WritingSteps(Net):
    """Steps move a slow copy and clip a trained weight, as some modules do in their forward."""

    def __init__(self, writes: str) -> None:
        super().__init__("sgd")
        self.writes = writes
        self.teacher = torch.nn.Linear(WIDTH, 7).requires_grad_(False)

    def training_step(self, batch: Any) -> Any:
        with torch.no_grad():
            if self.writes == "frozen":
                for mean in self.teacher.parameters():
                    mean.data = mean.data * 0.9
            else:
                self.first.weight.data.clamp_(-0.1, 0.1)
        return super().training_step(batch)


def _written(writes: str) -> dict[str, str]:
    errors = {}
    for strategy in ("fsdp", "zero1", "zero3"):
        try:
            Trainer(strategy=strategy, max_steps=2, progress=False).fit(WritingSteps(writes), ROWS, batch_size=4)
        except FabricateError as error:
            errors[strategy] = str(error)
    return errors


class Transposed(Net):
    """Weights whose elements do not lie in the order of their indices, as `channels_last` leaves those of a convolution."""

    def __init__(self, kind: str = "adamw") -> None:
        super().__init__(kind)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.data = parameter.data.t().contiguous().t()


def _transposed() -> dict[str, float]:
    hand = by_hand()
    return {strategy: difference(fit(strategy, net=Transposed), hand) for strategy in ("fsdp", "zero1", "zero3")}


def test_weights_in_another_memory_layout_train_as_those_in_the_usual_one() -> None:
    for apart in run_ranks(_transposed, 2):
        assert max(apart.values()) < TOLERANCE, apart


class Bounded(WritingSteps):
    """A layer that rewrites its own weight."""

    def __init__(self) -> None:
        super().__init__("none")
        self.words = torch.nn.Embedding(5, WIDTH, max_norm=0.5)


def _bounded() -> list[str]:
    texts = []
    for strategy in ("ddp", "fsdp", "zero1", "zero3"):
        with pytest.raises(ConfigurationError) as caught:
            Trainer(strategy=strategy, max_steps=2, progress=False).fit(Bounded(), ROWS, batch_size=4)
        texts.append(str(caught.value))
    return texts


def test_an_embedding_with_max_norm_is_refused_by_name_on_several_ranks() -> None:
    for text in run_ranks(_bounded, 2)[0]:
        assert text.startswith("words is Embedding(max_norm=0.5), whose forward rewrites the rows of its weight")
        assert "torch.renorm(weight, 2, 0, 0.5)" in text


@pytest.mark.parametrize(
    ("writes", "name", "lost"),
    [("trained", "first.weight", ["fsdp", "zero1", "zero3"]), ("frozen", "teacher.weight", ["fsdp", "zero3"])],
)
def test_a_step_that_writes_into_copies_of_parameters_is_refused_by_name(
    writes: str, name: str, lost: list[str]
) -> None:
    for errors in run_ranks(_written, 2, writes):
        assert list(errors) == lost
        for strategy, text in errors.items():
            assert text.startswith(
                f"WritingSteps.training_step writes into the parameter {name}, but strategy={strategy!r} computes with a copy of it"
            )
            assert "Change the parameter in on_step(self)" in text
