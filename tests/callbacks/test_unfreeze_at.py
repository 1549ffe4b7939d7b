"""Staged fine-tuning in one fit: `UnfreezeAt`, `trainer.freeze` and `trainer.unfreeze`."""

from __future__ import annotations

import itertools
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabricate import Callback, CheckpointError, ConfigurationError, FabricateError, Trainer, TrainModule, UnfreezeAt
from fabricate.testing import run_ranks

ROWS = [(each, each.sum()) for each in torch.randn(12, 4, generator=torch.Generator().manual_seed(1))]
KINDS = {
    "single": ("single", "fp32", 1),
    "ddp": ("ddp", "fp32", 2),
    "fsdp": ("fsdp", "fp32", 2),
    "bf16": ("fsdp", "bf16", 2),
}
STAGES = {"backbone": 5, "backbone.1": "1 epoch"}
FROZEN = [{"backbone.0", "backbone.1"}] * 3 + [{"backbone.0"}] * 2 + [set[str]()] * 3
"""What is frozen in each update; an epoch has three."""
SAVED = (2, 3, 5, 6)
Weights = dict[str, np.ndarray[Any, Any]]


class Net(TrainModule):
    """A backbone of two blocks, the first with a normalisation in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
        first[1].eval()
        self.backbone = torch.nn.ModuleList([first, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())])
        self.head = torch.nn.Linear(4, 1)
        self.modes: set[bool] = set()

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.modes.add(self.backbone[0][1].training)
        return torch.nn.functional.mse_loss(self.head(self.backbone[1](self.backbone[0](x)))[:, 0], y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameter_groups({"^backbone": {"lr": 0.02}}), lr=0.01, weight_decay=0.5)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(FROZEN))


class Watches(Callback):
    def __init__(self) -> None:
        self.weights: list[Weights] = []
        self.groups: list[int] = []

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        whole = {name: trainer.strategy.gather(parameter) for name, parameter in module.named_parameters()}
        self.weights.append({name: tensor.detach().clone().numpy() for name, tensor in whole.items()})
        (optimizer,) = trainer.optimizers.values()
        self.groups.append(sum(len(group["params"]) for group in optimizer.param_groups))


def fit(kind: str, run_dir: Path | None = None, stages: Any = STAGES, module: Any = None, **options: Any) -> Watches:
    strategy, precision, ranks = KINDS[kind]
    watches, resume = Watches(), options.pop("resume", "auto")
    trainer = Trainer(
        strategy=strategy,
        precision=precision,
        **({"max_steps": len(FROZEN), "save_every": 1, "keep": "all"} | options),
        run_dir=run_dir,
        progress=False,
        plugins=[UnfreezeAt(stages), watches],
    )
    trainer.fit(module or Net(), ROWS, batch_size=4 // ranks, shuffle=False, resume=resume)
    return watches


def job(world_size: int, directory: Path) -> dict[str, Any]:
    """Each kind: whole, and again from checkpoints on both sides of the moments."""
    results: dict[str, Any] = {}
    for kind in (kind for kind, (_, _, ranks) in KINDS.items() if ranks == world_size):
        try:
            whole = fit(kind, directory / kind)
            checkpoints = directory / kind / "checkpoints"
            again = [fit(kind, resume=checkpoints / f"step-{step:08d}").weights[-1] for step in SAVED]
            results[kind] = (whole.weights, again, whole.groups)
        except Exception as exception:
            results[kind] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    directory = tmp_path_factory.mktemp("staged")
    one, two = [job(1, directory)], run_ranks(job, 2, 2, directory)
    return {kind: [rank[kind] for rank in (one if ranks == 1 else two)] for kind, (_, _, ranks) in KINDS.items()}


def by_hand() -> list[Weights]:
    """The usual loop, with `requires_grad_` at each moment."""
    module, snapshots = Net(), []
    optimizer, schedule = module.configure_optimizers()
    for update, frozen in enumerate(FROZEN):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(".".join(name.split(".")[:2]) not in frozen)
        start = update % 3 * 4
        module.training_step(torch.utils.data.default_collate(ROWS[start : start + 4])).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        snapshots.append({name: parameter.detach().clone().numpy() for name, parameter in module.named_parameters()})
    return snapshots


@pytest.mark.parametrize("kind", KINDS)
def test_stages_train_as_a_loop_by_hand_and_resume_to_the_last_bit_on_both_sides(
    runs: dict[str, list[Any]], kind: str
) -> None:
    wanted = by_hand()
    initial = {name: parameter.detach().numpy() for name, parameter in Net().named_parameters()}
    close = {"rtol": 1e-4, "atol": 1e-5} if kind != "bf16" else {"rtol": 0.1, "atol": 0.05}
    for answer in runs[kind]:
        assert not isinstance(answer, str), answer
        snapshots, again, groups = answer
        assert groups == [8] * len(FROZEN), "all parameters are in the groups throughout"
        for update, (weights, frozen) in enumerate(zip(snapshots, FROZEN, strict=True)):
            for name, value in wanted[update].items():
                np.testing.assert_allclose(weights[name], value, err_msg=f"{update} {name}", **close)
                if ".".join(name.split(".")[:2]) in frozen:
                    np.testing.assert_array_equal(weights[name], initial[name], err_msg=f"{update} {name}")
        for resumed in again:
            for name, value in snapshots[-1].items():
                np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def test_layers_stay_in_their_mode_and_everything_is_trainable_again_afterwards() -> None:
    module = Net()
    before = [buffer.clone() for buffer in module.buffers()]
    fit("single", module=module, max_steps=6)
    assert module.modes == {False}
    assert all(map(torch.equal, before, module.buffers()))
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_resume_with_other_stages_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    before = fit("single", tmp_path, max_steps=6, save_every=3)
    with pytest.raises(
        CheckpointError, match=r"saved with the stages \{.*'5 steps'.*this run has \{'backbone': '7 steps'\}"
    ):
        fit("single", tmp_path, {"backbone": 7})
    first = tmp_path / "checkpoints" / "step-00000003"
    again = fit("single", tmp_path, {"backbone": 7}, accept_changes=("plugins",))
    name = "backbone.0.0.weight"
    np.testing.assert_array_equal(
        again.weights[0][name], before.weights[-1][name], err_msg="frozen again until update 8"
    )
    assert not np.array_equal(again.weights[1][name], before.weights[-1][name])
    shrunk = fit("single", None, {"backbone.1": 7}, resume=first, accept_changes=("plugins",))
    np.testing.assert_array_equal(shrunk.weights[0]["backbone.1.0.weight"], before.weights[2]["backbone.1.0.weight"])
    assert not np.array_equal(shrunk.weights[0][name], before.weights[2][name]), "of a stage that is gone"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({}, "name what to unfreeze"),
        ({"backbone": "10 minutes"}, "'backbone': '10 minutes'.*give a number of steps or of whole epochs"),
        ({"backbone": 0.5}, "'0.5 epochs'.*give a number of steps or of whole epochs"),
        ({"backbnoe": 3}, "no parameter is left for this name.*Give the name of .*: backbone, backbone.0"),
        ({"back": 3}, r"UnfreezeAt\('back'\): no parameter is left for this name"),
        ({"backbone": 8}, "'8 steps'.* is never reached: the fit ends after 8 steps"),
        ({"backbone": 3, "head": 3}, "after step 0 everything is frozen, so there is nothing to train"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_the_first_step(stages: Any, message: str) -> None:
    module = Net()
    with pytest.raises(ConfigurationError, match=message):
        fit("single", None, stages, module)
    assert not module.modes


def test_what_was_frozen_before_the_fit_is_refused_with_the_way_to_do_it() -> None:
    module = Net()
    module.backbone.requires_grad_(False)
    with pytest.raises(
        ConfigurationError,
        match=r"backbone\.1'\): backbone.*was already frozen before the fit.*UnfreezeAt freezes the parameter itself",
    ):
        fit("single", None, {"backbone.1": 3}, module)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, when DeepSpeed is imported
def test_deepspeed_refuses_unfreezing_by_name_before_the_first_step() -> None:
    module = Net()
    trainer = Trainer(strategy="zero1", precision="fp32", max_steps=8, progress=False, plugins=[UnfreezeAt(STAGES)])
    with pytest.raises(ConfigurationError, match="strategy='zero1' cannot freeze or unfreeze parameters during a fit"):
        trainer.fit(module, ROWS, batch_size=4)
    assert not module.modes


def test_a_hook_freezes_and_unfreezes_what_an_optimizer_holds() -> None:
    class Alternates(Net):
        def on_step(self, step: int) -> None:
            change = self.trainer.freeze if step % 2 else self.trainer.unfreeze
            change(self.backbone.parameters())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.backbone.parameters(), self.head.weight], lr=0.1)

    class Wrong(Alternates):
        def on_step(self, step: int) -> None:
            self.trainer.freeze([self.head.bias])

    module, weights = Alternates(), []

    class Looks(Callback):
        def on_step(self, module: TrainModule) -> None:
            weights.append(module.backbone[1][0].weight.detach().clone())

    Trainer(max_steps=4, progress=False, plugins=[Looks()]).fit(module, ROWS, batch_size=4)
    changed = [not torch.equal(one, other) for one, other in itertools.pairwise(weights)]
    assert changed == [False, True, False]
    with pytest.raises(ConfigurationError, match=r"trainer.freeze: no optimizer holds head\.bias"):
        Trainer(max_steps=4, progress=False).fit(Wrong(), ROWS, batch_size=4)
    with pytest.raises(
        FabricateError, match="this attribute or method of the trainer is available only while fit, validate,"
    ):
        Trainer(max_steps=4).freeze([])


class Once(Callback):
    """Freezes when something happens, not as a function of the step."""

    def on_step(self, trainer: Trainer, module: TrainModule, step: int) -> None:
        if step == 2:
            trainer.freeze(module.backbone.parameters())
        if step == 5:
            trainer.unfreeze(module.backbone.parameters())


class FromTheStart(Callback):
    """When a fit begins, a checkpoint is not loaded yet, so that the step is 0."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.step < 3:
            trainer.freeze(module.backbone.parameters())

    def on_step(self, trainer: Trainer, module: TrainModule, step: int) -> None:
        if step == 3:
            trainer.unfreeze(module.backbone.parameters())


@pytest.mark.parametrize("kind", [Once, FromTheStart])
def test_what_is_frozen_stays_frozen_over_a_resume(tmp_path: Path, kind: type[Callback]) -> None:
    def run(**options: Any) -> torch.Tensor:
        module, resume = Net(), options.pop("resume", "auto")
        trainer = Trainer(max_steps=7, keep="all", progress=False, plugins=[kind()], **options)
        trainer.fit(module, ROWS, batch_size=4, shuffle=False, resume=resume)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    whole = run(run_dir=tmp_path, save_every=1)
    for step in (2, 4, 5, 6):
        assert torch.equal(run(resume=tmp_path / "checkpoints" / f"step-{step:08d}"), whole), step


class OnOneRank(Callback):
    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.freeze("on_fit_start", trainer, module)

    def on_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.freeze("on_epoch_start", trainer, module)

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        self.freeze("on_step", trainer, module)

    def freeze(self, hook: str, trainer: Trainer, module: TrainModule) -> None:
        if hook == self.hook and trainer.accelerator.process_index == 1:
            trainer.freeze(module.head.parameters())


def on_one_rank(hook: str) -> str:
    with pytest.raises(FabricateError) as caught:
        Trainer(strategy="ddp", max_steps=4, progress=False, plugins=[OnOneRank(hook)]).fit(Net(), ROWS, batch_size=4)
    return str(caught.value)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_epoch_start", "on_step"])
def test_ranks_that_freeze_different_parameters_are_an_error(hook: str) -> None:
    for message in run_ranks(on_one_rank, 2, hook):
        assert message.startswith("ranks freeze or unfreeze different parameters after step")


class UnfreezesByHand(Net):
    """Its backbone is frozen, and a hook unfreezes it and gives it to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == 2:
            self.backbone.requires_grad_(True)
            (optimizer,) = trainer.optimizers.values()
            optimizer.add_param_group({"params": list(self.backbone.parameters())})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def unfrozen_by_hand() -> str:
    with pytest.raises(FabricateError) as caught:
        Trainer(strategy="ddp", max_steps=8, log_every=4, progress=False).fit(UnfreezesByHand(), ROWS, batch_size=1)
    return str(caught.value)


def test_unfreezing_by_hand_on_several_ranks_is_the_error_of_one_rank() -> None:
    for message in run_ranks(unfrozen_by_hand, 2):
        assert "was frozen when the fit began and requires a gradient at step" in message
