"""Optimizers that take turns: each makes its own update on every batch, as for a GAN."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import softplus
from torch.utils.flop_counter import FlopCounterMode

from fabricate import Callback, ConfigurationError, ModelSummary, Throughput, Trainer, TrainModule
from fabricate.cli.main import main
from fabricate.testing import run_ranks

ROWS = list(torch.randn(10, 3, generator=torch.Generator().manual_seed(1)))
KINDS = {"single": ("single", 1), "ddp": ("ddp:find_unused_parameters=true", 2), "fsdp": ("fsdp", 2)}
STEPS, NORM = 6, 0.5
Weights = dict[str, np.ndarray[Any, Any]]


class GAN(TrainModule):
    """The noise is a part of the real rows, so that it does not depend on how they are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.generator = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.calls: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int, optimizer: str) -> torch.Tensor:
        trained = {n.partition(".")[0] for n, p in self.named_parameters() if p.requires_grad}
        self.calls.append((optimizer, batch_idx, trained == {optimizer}))
        return self.loss(batch, optimizer)

    def loss(self, batch: torch.Tensor, optimizer: str) -> torch.Tensor:
        fake = self.generator(batch.flip(1))  # not detached: the generator is frozen meanwhile
        if optimizer == "discriminator":
            return softplus(-self.discriminator(batch)).mean() + softplus(self.discriminator(fake)).mean()
        return softplus(-self.discriminator(fake)).mean()

    def configure_optimizers(self) -> Any:
        one, other = self.optimizers()
        return {"discriminator": (one, "linear"), "generator": (other, "cosine:warmup=2")}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=0.03) for part in (self.discriminator, self.generator)]


class OptimizerFirst(GAN):
    """The arguments of its step are in another order."""

    def training_step(self, batch: torch.Tensor, optimizer: str, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch, batch_idx, optimizer)


class Notes(Callback):
    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self.weights: Weights = {}

    def on_accumulate(self, micro_step: int, is_last: bool) -> None:
        self.hooks.append(("accumulate", micro_step, is_last))

    def on_before_step(self, trainer: Trainer, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
        name = next(name for name, each in trainer.optimizers.items() if each is optimizer)
        self.hooks.append((name, round(float(grad_norm), 4)))

    def on_step(self, step: int, trainer: Trainer) -> None:
        self.hooks.append(("step", step, trainer.progress.samples))

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        whole = {name: trainer.strategy.gather(parameter) for name, parameter in module.named_parameters()}
        self.weights = {name: tensor.detach().clone().numpy() for name, tensor in whole.items()}


class Freezes(Callback):
    """Trains the discriminator alone in the first two steps, and the generator alone after the fourth."""

    def on_fit_start(self, trainer: Trainer, module: GAN) -> None:
        trainer.freeze(module.generator.parameters())

    def on_step(self, step: int, trainer: Trainer, module: GAN) -> None:
        if step == 2:
            trainer.unfreeze(module.generator.parameters())
        if step == 4:
            trainer.freeze(module.discriminator.parameters())


def fit(strategy: str, run_dir: Path | None = None, module: Any = None, **options: Any) -> Notes:
    notes, resume, plugins = Notes(), options.pop("resume", "auto"), options.pop("plugins", [])
    trainer = Trainer(
        strategy=strategy,
        precision="fp32",
        max_grad_norm=NORM,
        **({"max_steps": STEPS, "global_batch_size": 4, "save_every": 2} | options),
        run_dir=run_dir,
        progress=False,
        plugins=[notes, *plugins],
    )
    trainer.fit(module or GAN(), ROWS, batch_size=1, shuffle=False, resume=resume)
    return notes


def job(world_size: int, directory: Path) -> dict[str, Any]:
    """Each strategy: whole, and again from the middle of an epoch."""
    results: dict[str, Any] = {}
    for kind, (strategy, _) in ((kind, value) for kind, value in KINDS.items() if value[1] == world_size):
        try:
            whole = fit(strategy, directory / kind)
            again = fit(strategy, resume=directory / kind / "checkpoints" / "step-00000004")
            frozen = fit(strategy, directory / f"{kind}-frozen", plugins=[Freezes()])
            from_4 = directory / f"{kind}-frozen" / "checkpoints" / "step-00000004"
            frozen_again = fit(strategy, resume=from_4, plugins=[Freezes()])
            results[kind] = (whole.weights, again.weights, whole.hooks, frozen.weights, frozen_again.weights)
        except Exception as exception:
            results[kind] = "".join(traceback.format_exception(exception))
    if world_size > 1:
        with pytest.raises(ConfigurationError) as refused:
            fit("ddp")
        results["plain ddp"] = str(refused.value)
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    directory = tmp_path_factory.mktemp("turns")
    one, two = [job(1, directory)], run_ranks(job, 2, 2, directory)
    needed = {kind: ranks for kind, (_, ranks) in KINDS.items()} | {"plain ddp": 2}
    return directory, {kind: [rank[kind] for rank in (one if ranks == 1 else two)] for kind, ranks in needed.items()}


def by_hand(frozen: tuple[tuple[str, int], ...] = ()) -> tuple[Weights, list[tuple[str, float]]]:
    """The usual loop: for each batch the discriminator's update, then the generator's. `frozen`: turns and steps without an update."""
    from transformers import get_scheduler

    module, norms = GAN(), []
    one, other = module.optimizers()
    schedules = [get_scheduler("linear", one, 0, STEPS), get_scheduler("cosine", other, 2, STEPS)]
    turns = {"discriminator": (module.discriminator, one), "generator": (module.generator, other)}
    for step, start in enumerate(([0, 4, 8] * 2)[:STEPS]):
        for name, (part, optimizer) in turns.items():
            module.zero_grad()
            if (name, step) not in frozen:
                module.loss(torch.stack(ROWS[start : start + 4]), name).backward()
                norms.append((name, float(torch.nn.utils.clip_grad_norm_(part.parameters(), NORM))))
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}, norms


@pytest.mark.parametrize("kind", KINDS)
def test_turns_train_as_a_loop_by_hand_and_resume_to_the_last_bit(
    runs: tuple[Path, dict[str, list[Any]]], kind: str
) -> None:
    wanted, norms = by_hand()
    for answer in runs[1][kind]:
        assert not isinstance(answer, str), answer
        whole, again, hooks, *_ = answer
        steps = [hook for hook in hooks if hook[0] in ("discriminator", "generator")]
        assert [name for name, _ in steps] == ["discriminator", "generator"] * STEPS
        np.testing.assert_allclose([norm for _, norm in steps], [norm for _, norm in norms], atol=2e-4)
        for name, value in wanted.items():
            np.testing.assert_allclose(whole[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(again[name], whole[name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_whose_parameters_are_all_frozen_changes_nothing(
    runs: tuple[Path, dict[str, list[Any]]], kind: str
) -> None:
    alone = ("generator", 0), ("generator", 1), ("discriminator", 4), ("discriminator", 5)
    wanted, _ = by_hand(alone)
    for answer in runs[1][kind]:
        assert not isinstance(answer, str), answer
        *_, frozen, again = answer
        for name, value in wanted.items():
            np.testing.assert_allclose(frozen[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(again[name], frozen[name], err_msg=name)


def test_under_fp16_a_turn_whose_parameters_are_all_frozen_is_no_error() -> None:
    module = GAN()
    before = [parameter.detach().clone() for parameter in module.generator.parameters()]
    trainer = Trainer(max_steps=2, precision="fp16:init_scale=1024", progress=False, plugins=[Freezes()])
    assert trainer.fit(module, ROWS, batch_size=4).steps == 2
    assert all(map(torch.equal, module.generator.parameters(), before))
    assert not torch.equal(module.discriminator[0].weight, GAN().discriminator[0].weight)


def test_replicas_that_do_not_look_for_unused_parameters_are_refused_before_the_first_step(
    runs: tuple[Path, dict[str, list[Any]]],
) -> None:
    for message in runs[1]["plain ddp"]:
        assert "no gradient reached generator.0.weight" in message
        assert "use strategy='ddp:find_unused_parameters=true'" in message


def test_a_step_is_a_turn_of_each_on_the_same_batches() -> None:
    module = GAN()
    hooks = fit("single", None, module, max_steps=2, global_batch_size=2).hooks
    turn = [("accumulate", 0, False), ("accumulate", 1, True)]
    one_step = [*turn, "discriminator", *turn, "generator"]
    kinds = [hook if hook[0] in ("accumulate", "step") else hook[0] for hook in hooks]
    assert kinds == [*one_step, ("step", 1, 2), *one_step, ("step", 2, 4)]
    numbers = [0, 1, 0, 1, 2, 3, 2, 3]
    names = ["discriminator", "discriminator", "generator", "generator"] * 2
    assert module.calls == [(name, number, True) for name, number in zip(names, numbers, strict=True)]
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_checkpoints_and_the_plan_count_steps_and_each_schedule_runs_over_all_of_them(
    runs: tuple[Path, dict[str, list[Any]]],
) -> None:
    settings = json.loads((runs[0] / "ddp" / "plan.json").read_text())
    assert settings["settings"]["schedule generator"]["value"] == f"cosine:warmup=2 over {STEPS} updates"
    assert "each step is an update of discriminator, then one of generator, on the same rows" in settings["notes"]
    names = sorted(path.name for path in (runs[0] / "fsdp" / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006"]


def test_after_a_failure_in_a_turn_everything_is_trainable_again() -> None:
    class Fails(GAN):
        def training_step(self, batch: torch.Tensor, optimizer: str) -> torch.Tensor:  # type: ignore[override]
            if optimizer == "generator":
                raise ValueError("the generator's turn")
            return self.loss(batch, optimizer)

    module = Fails()
    with pytest.raises(ValueError, match="the generator's turn"):
        fit("single", None, module)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_turn_that_is_skipped_leaves_the_others() -> None:
    class Overflows(GAN):
        def loss(self, batch: torch.Tensor, optimizer: str) -> torch.Tensor:
            loss = super().loss(batch, optimizer)
            return loss * float("nan") if optimizer == "discriminator" and self.trainer.step == 1 else loss

    skipped: list[int] = []

    class Watches(Callback):
        def on_step_skipped(self, step: int) -> None:
            skipped.append(step)

    module = Overflows()
    trainer = Trainer(max_steps=3, nonfinite="skip", progress=False, plugins=[Watches()])
    assert trainer.fit(module, ROWS, batch_size=4, shuffle=False).steps == 3
    assert skipped == [1]
    assert [name for name, *_ in module.calls] == ["discriminator", "generator"] * 3


@pytest.mark.parametrize("kind", ["discriminator", "generator"])
def test_a_skipped_turn_moves_neither_the_shares_of_an_epoch_nor_the_rows_of_a_step(kind: str, tmp_path: Path) -> None:
    evaluated_at: list[int] = []

    class Overflows(GAN):
        def training_step(self, batch: torch.Tensor, batch_idx: int, optimizer: str) -> torch.Tensor:
            loss = self.loss(batch[:, :3], optimizer)
            self.batch = batch[:, 3].int().tolist()
            return loss * float("nan") if optimizer == kind and self.trainer.progress.samples == 2 else loss

        def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.loss(batch[:, :3], "generator")}

        def on_eval_end(self) -> None:
            evaluated_at.append(self.trainer.progress.samples)

        def on_step(self, step: int) -> None:
            trained[step] = sorted(self.batch)

    trained: dict[int, list[int]] = {}
    rows = torch.cat([torch.stack(ROWS[:8]), torch.arange(8.0)[:, None]], 1)
    options: dict[str, Any] = {"nonfinite": "skip", "validate_every": 0.5, "sanity_batches": 0, "progress": False}
    trainer = Trainer(max_epochs=2, run_dir=tmp_path, seed=0, **options)
    result = trainer.fit(Overflows(), rows, rows, batch_size=2)
    assert evaluated_at == [4, 8, 12, 16]
    assert result.steps == (8 if kind == "discriminator" else 7)  # the last turn makes the step
    for step, expected in trained.items():
        shown = CliRunner().invoke(main, ["rows", str(tmp_path), "--step", str(step), "--json"])
        (part,) = json.loads(shown.stdout)["parts"]
        assert sorted(part["rows"]) == expected


@pytest.mark.parametrize(
    ("returned", "options", "message"),
    [
        (
            {"optimizer": "generator"},
            {},
            "returned optimizer='generator' when it was called for 'discriminator'. Do not return 'optimizer'",
        ),
        ({}, {"strategy": "zero1"}, "trains with one optimizer, but there are 2"),
    ],
)
def test_what_does_not_fit_turns_is_refused(returned: dict[str, str], options: Any, message: str) -> None:
    class Wrong(GAN):
        def training_step(self, batch: torch.Tensor, optimizer: str) -> Any:  # type: ignore[override]
            return {"loss": self.loss(batch, optimizer), **returned}

    with pytest.raises(ConfigurationError, match=message):
        Trainer(precision="fp32", max_steps=1, progress=False, **options).fit(Wrong(), ROWS, batch_size=4)


def test_what_a_hook_freezes_stays_frozen_in_the_turns() -> None:
    class Freezes(GAN):
        def on_epoch_start(self) -> None:
            self.trainer.freeze(self.generator[0].parameters())

    module = Freezes()
    before = [parameter.detach().clone() for parameter in module.generator.parameters()]
    fit("single", None, module, max_steps=2)
    unchanged = [torch.equal(*pair) for pair in zip(before, module.generator.parameters(), strict=True)]
    assert unchanged == [True, True, False, False]


def test_a_list_of_optimizers_has_no_turns() -> None:
    class Listed(GAN):
        def configure_optimizers(self) -> Any:
            return list(self.optimizers())

    with pytest.raises(
        ConfigurationError, match="the optimizers in a list step together, so it would always be 'main'"
    ):
        Trainer(max_steps=1, progress=False).fit(Listed(), ROWS, batch_size=4)


def test_a_step_may_take_its_arguments_in_any_order() -> None:
    modules = GAN(), OptimizerFirst()
    one, two = (fit("single", module=module) for module in modules)
    assert modules[0].calls == modules[1].calls
    assert all(np.array_equal(one.weights[name], two.weights[name]) for name in one.weights)


@pytest.mark.parametrize("skipped", [(), ("discriminator",)])
def test_flops_of_all_turns_are_counted(skipped: tuple[str, ...]) -> None:
    class Skipping(GAN):
        def loss(self, batch: torch.Tensor, optimizer: str) -> torch.Tensor:
            bad = optimizer in skipped and self.trainer.progress.samples == 0
            return super().loss(batch, optimizer) * (float("nan") if bad else 1.0)

    by_hand, module = 0, Skipping()
    for name, frozen in (("discriminator", module.generator), ("generator", module.discriminator)):
        module.requires_grad_(True)
        frozen.requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            GAN.loss(module, torch.stack(ROWS[:2]), name).backward()
        by_hand += counter.get_total_flops()
    for throughput_first in (True, False):
        speed, summary = Throughput(), ModelSummary()
        plugins = [speed, summary] if throughput_first else [summary, speed]
        trainer = Trainer(max_steps=2, progress=False, gradient_accumulation_steps=2, nonfinite="skip", plugins=plugins)
        trainer.fit(Skipping(), ROWS, batch_size=2)
        assert (summary.micro_batch_flops, summary.step_flops) == (by_hand, by_hand * 2)
        assert speed.flops_per_row == by_hand / 2
