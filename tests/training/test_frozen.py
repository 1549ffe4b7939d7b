"""Freezing and adapters: frozen parameters are not in optimizers, and optionally not in checkpoints."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from fabricate import Callback, CheckpointError, ConfigurationError, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.cli.main import main
from fabricate.testing import run_ranks
from tests.support.regression import ROWS as REGRESSION_ROWS
from tests.support.regression import Regression

# Of transformers, where peft asks for a property by its older name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS = torch.randint(1, 32, (12, 6), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(torch.arange(6) < torch.arange(12)[:, None] % 6 + 2, TOKENS, -100)
ROWS = [{"input_ids": each, "labels": label} for each, label in zip(TOKENS, LABELS, strict=True)]
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2}
RESUMED = [(name, name) for name in STRATEGIES] + list(zip(STRATEGIES, [*list(STRATEGIES)[1:], "single"], strict=True))
"""The strategy that goes on, and the one that saved."""
STEPS = 6
Weights = dict[str, np.ndarray[Any, Any]]


def gpt2(seed: int = 0) -> Any:
    config = transformers.GPT2Config(
        n_positions=6, n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("cpu"):  # pretrained weights, so to speak
            model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def adapted(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(gpt2(seed), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


class Adapted(TrainModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def configure_model(self) -> None:
        self.model = adapted(self.seed)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Recorder(Callback):
    """The losses, and the trained weights at the end, whole."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: Weights = {}

    def on_step(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        whole = {n: trainer.strategy.gather(p) for n, p in module.named_parameters() if p.requires_grad}
        self.weights = {name: tensor.detach().clone().numpy() for name, tensor in whole.items()}


def fit(run_dir: Path | None, strategy: str = "single", module: Any = None, **options: Any) -> tuple[Any, Recorder]:
    module, recorder = module or Adapted(), Recorder()
    trainer = Trainer(
        strategy=strategy,
        precision="fp32",
        **({"max_steps": STEPS, "save_every": 2, "save_frozen": False} | options),
        seed=3,
        run_dir=run_dir,
        progress=False,
        plugins=[recorder],
    )
    trainer.fit(module, ROWS, batch_size=4 // STRATEGIES[strategy], shuffle=False)
    return module, recorder


# ----------------------------------------------------------------------------------------------------------- on ranks


def job(world_size: int, directory: Path) -> dict[Any, Any]:
    """Trains under each strategy, then continues from the middle under the others."""
    results: dict[Any, Any] = {}
    try:
        for strategy in (name for name, needed in STRATEGIES.items() if needed == world_size):
            _, recorder = fit(directory / strategy, strategy)
            results[strategy] = (recorder.losses, recorder.weights)
    except Exception as exception:
        results["failed"] = "".join(traceback.format_exception(exception))
    return results


class Prompted(Adapted):
    def configure_model(self) -> None:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        self.model = peft.get_peft_model(gpt2(), config)


def prompt_job(directory: Path) -> list[str]:
    rows = [{n: t[:4] for n, t in row.items()} | {"attention_mask": torch.ones(4)} for row in ROWS]
    for strategy in ("ddp", "fsdp"):
        trainer = Trainer(
            strategy=strategy, precision="fp32", max_steps=2, run_dir=directory / strategy, progress=False
        )
        trainer.fit(Prompted(), rows, batch_size=2)
    return [name for strategy in ("ddp", "fsdp") for name in sorted(os.listdir(directory / strategy / "model"))]


def resume_job(world_size: int, directory: Path) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    try:
        for strategy, saved in ((name, saved) for name, saved in RESUMED if STRATEGIES[name] == world_size):
            at, recorder = directory / saved / "checkpoints" / "step-00000002", Recorder()
            trainer = Trainer(strategy=strategy, precision="fp32", max_steps=STEPS, progress=False, plugins=[recorder])
            trainer.fit(Adapted(), ROWS, batch_size=4 // world_size, shuffle=False, resume=at)
            results[strategy, saved] = (recorder.losses, recorder.weights)
    except Exception as exception:
        results["failed"] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, list[Any]]]:
    """Run directories by strategy, and what each rank answered, by strategy or (strategy, the one that saved)."""
    directory, by_case = tmp_path_factory.mktemp("frozen"), {}
    for function in (job, resume_job):
        for world_size in (1, 2):
            answers = [function(1, directory)] if world_size == 1 else run_ranks(function, 2, 2, directory)
            for rank in answers:
                assert "failed" not in rank, rank["failed"]
                for key, answer in rank.items():
                    by_case.setdefault(key, []).append(answer)
    return directory, by_case


Runs = tuple[Path, dict[Any, list[Any]]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_train_as_in_a_loop_by_hand(runs: Runs, strategy: str) -> None:
    model, losses = adapted(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        loss = model(**torch.utils.data.default_collate(ROWS[step % 3 * 4 : step % 3 * 4 + 4])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for curve, weights in runs[1][strategy]:
        np.testing.assert_allclose(curve, losses, rtol=1e-5)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                np.testing.assert_allclose(weights[f"model.{name}"], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("strategy", "saved"), RESUMED)
def test_a_checkpoint_without_frozen_weights_resumes_under_any_strategy(runs: Runs, strategy: str, saved: str) -> None:
    whole_losses, whole_weights = runs[1][saved][0]
    for losses, weights in runs[1][strategy, saved]:
        if strategy == saved:
            assert losses == whole_losses[2:], "to the last bit"
        np.testing.assert_allclose(losses, whole_losses[2:], rtol=1e-5)
        for name, weight in whole_weights.items():
            np.testing.assert_allclose(weights[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_holds_what_is_trained_and_the_export_what_peft_reads(runs: Runs, strategy: str) -> None:
    run_dir = runs[0] / strategy
    with Reader(run_dir / "checkpoints" / f"step-{STEPS:08d}") as reader:
        names = {name.removeprefix("model/") for name in reader.manifest.tensors if name.startswith("model/")}
    assert names == runs[1][strategy][0][1].keys()
    assert sorted(os.listdir(run_dir / "model")) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(gpt2(), run_dir / "model")
    for name, weight in runs[1][strategy][0][1].items():
        np.testing.assert_array_equal(loaded.get_parameter(name.removeprefix("model.")).detach(), weight)


# ---------------------------------------------------------------------------------------------------- in one process


def test_prompts_are_exported_by_peft_where_parameters_are_whole_and_with_all_weights_elsewhere(tmp_path: Path) -> None:
    for files in run_ranks(prompt_job, 2, tmp_path):
        assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors", "model.safetensors"]


def test_adapters_that_configure_model_makes_begin_as_peft_says() -> None:
    module = Adapted()
    Trainer(max_steps=0, seed=3, progress=False).fit(module, ROWS, batch_size=4)
    fresh = adapted()
    for name, parameter in fresh.named_parameters():
        assert torch.equal(module.model.get_parameter(name), parameter), name
        assert "lora_B" not in name or not parameter.any()


def test_frozen_weights_are_left_out_of_the_optimizer_and_the_plan_says_so(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Looks(Adapted):
        def on_step(self) -> None:
            (optimizer,) = self.trainer.optimizers.values()
            sizes.append(sum(len(group["params"]) for group in optimizer.param_groups))

    module, _ = fit(tmp_path, module=Looks(), max_steps=1)
    assert sizes == [4]
    total = len(list(module.parameters()))
    notes = json.loads((tmp_path / "plan.json").read_text())["notes"]
    assert f"optimizer 'main': {total - 4} of {total} parameters are frozen and left out" in notes


def test_a_resume_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=2)
    with pytest.raises(CheckpointError, match=r"saved without its frozen weights \(save_frozen=False\)"):
        fit(tmp_path, module=Adapted(seed=1))
    with pytest.raises(CheckpointError, match="are not the ones it was trained with: model"):
        Trainer(run_dir=tmp_path, progress=False).validate(Adapted(seed=1), ROWS, checkpoint="last", batch_size=4)
    with pytest.raises(CheckpointError, match="Load the same pretrained weights, in the same precision"):
        Adapted.load_from_checkpoint(tmp_path, seed=1)


def test_weights_are_loaded_around_the_frozen_ones_of_the_module(tmp_path: Path) -> None:
    module, _ = fit(tmp_path, max_steps=2)
    loaded = Adapted.load_from_checkpoint(tmp_path)
    for name, parameter in module.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    metrics = Trainer(run_dir=tmp_path, progress=False).validate(Adapted(), ROWS, checkpoint="last", batch_size=4)
    with torch.no_grad():
        alone = loaded.eval().training_step(torch.utils.data.default_collate(ROWS))
    assert metrics["val_loss"] == pytest.approx(float(alone), rel=1e-6)


def test_a_frozen_weight_that_a_hook_changes_is_not_left_out(tmp_path: Path) -> None:
    class Teacher(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = torch.nn.Linear(3, 8).requires_grad_(False)

        def on_step(self) -> None:
            self.teacher.weight.data = self.teacher.weight.data * 0.9 + self.layers[0].weight.data * 0.1

    options: dict[str, Any] = {"run_dir": tmp_path, "max_steps": 1, "progress": False, "save_frozen": False}
    with pytest.raises(
        ConfigurationError, match=r"teacher.weight changed since the fit began, but save_frozen=False, so a"
    ):
        Trainer(**options).fit(Teacher(), REGRESSION_ROWS, batch_size=4)


def test_a_checkpoint_that_left_weights_out_is_no_whole_model_to_export(tmp_path: Path) -> None:
    fit(tmp_path / "run", max_steps=2)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    result = CliRunner().invoke(main, ["ckpt", "export", checkpoint, str(tmp_path / "out")])
    assert result.exit_code
    assert "holds the trained weights only (save_frozen=False), and" in result.output


def test_frozen_weights_are_saved_unless_asked_otherwise(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=2, save_frozen=True)
    _, resumed = fit(tmp_path, module=Adapted(seed=1), save_frozen=True, accept_changes=("module",))
    whole = fit(None)[1]
    assert resumed.losses == whole.losses[2:], "the checkpoint's frozen weights are used, whatever the module came with"


def test_unfreezing_during_a_fit_is_refused() -> None:
    class Unfreezes(Adapted):
        def on_step(self, step: int) -> None:
            if step == 2:
                self.model.base_model.model.lm_head.weight.requires_grad_()

    with pytest.raises(ConfigurationError, match=r"wte.weight was frozen when the fit began .* fit the module again"):
        fit(None, module=Unfreezes())


def test_freezing_with_requires_grad_during_a_fit_gets_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Freezes(Regression):
        def on_step(self, step: int) -> None:
            if step == 2:
                self.layers[0].requires_grad_(False)

    Trainer(max_steps=4, log_every=1, progress=False).fit(Freezes(), REGRESSION_ROWS, batch_size=4)
    noted = capsys.readouterr().err
    assert noted.count("layers.0.weight, layers.0.bias required a gradient when the fit began and not at step 2") == 1


def _frozen_in_a_hook(strategy: str) -> str:
    class Freezes(Regression):
        def on_step(self) -> None:
            self.layers[0].requires_grad_(False)

    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=strategy, max_steps=3, log_every=1, progress=False).fit(
            Freezes(), REGRESSION_ROWS, batch_size=4
        )
    return str(caught.value)


def test_zero_refuses_freezing_in_a_hook_because_it_would_go_on_updating() -> None:
    [message] = run_ranks(_frozen_in_a_hook, 1, "zero1")
    assert "not at step 1: strategy='zero1' goes on updating it. Freeze it before the fit" in message


def test_a_module_is_fitted_again_with_more_of_it_unfrozen(tmp_path: Path) -> None:
    module, _ = fit(tmp_path, max_steps=2)
    head = module.model.base_model.model.transformer.ln_f.weight.requires_grad_()
    before = head.detach().clone()
    with pytest.raises(CheckpointError, match="has 1 groups of 4 parameters in all, this run has 1 groups of 5"):
        fit(tmp_path, module=module)
    trainer = Trainer(precision="fp32", max_steps=2, run_dir=tmp_path, progress=False)
    trainer.fit(module, ROWS, batch_size=4, resume="never")
    assert not torch.equal(head, before)


def test_turns_may_freeze_what_was_trainable() -> None:
    class Turns(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)

        def training_step(self, batch: Any) -> torch.Tensor:
            turn = self.trainer.step % 2 == 0
            self.first.requires_grad_(turn)
            self.second.requires_grad_(not turn)
            x = batch["input_ids"].float()
            return (self.first(x) * self.second(x)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    assert len(fit(None, module=Turns())[1].losses) == STEPS


# ------------------------------------------------------------------------------------------------------ train and eval mode


class Partly(TrainModule):
    """A frozen part in eval mode, normalisation in eval mode, a transformers model as `from_pretrained` leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.backbone.requires_grad_(False).eval()
        self.norm = torch.nn.BatchNorm1d(4).eval()
        self.head = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.1))
        self.model = gpt2().eval()
        self.teacher = gpt2().eval().requires_grad_(False)
        self.modes: list[dict[str, bool]] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.modes.append({name: child.training for name, child in self.named_modules()})
        return self.head(self.norm(self.backbone(batch))).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not any(child.training for child in self.modules())
        return {"loss": self.head(self.norm(self.backbone(batch))).square().mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_every_part_trains_in_the_mode_that_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    module, rows = Partly(), torch.randn(8, 3)
    statistics = [buffer.clone() for part in (module.backbone, module.norm) for buffer in part.buffers()]
    before = {name: child.training for name, child in module.named_modules()}
    Trainer(max_steps=4, validate_every=1, progress=False).fit(module, rows, rows, batch_size=2)
    for modes in module.modes:
        in_eval = [name for name, training in modes.items() if not training]
        assert {name.partition(".")[0] for name in in_eval} == {"backbone", "norm", "teacher"}
        assert {"backbone.1", "backbone.2", "teacher.transformer"} <= set(in_eval)
    after = [buffer for part in (module.backbone, module.norm) for buffer in part.buffers()]
    assert all(map(torch.equal, statistics, after))
    assert {name: child.training for name, child in module.named_modules()} == before
    printed = capsys.readouterr().out
    assert "note: the transformers model 'model' was in eval mode and is put into train mode; to leave parts" in printed
    assert "note: in eval mode, as set: backbone, norm, teacher" in printed


def test_a_module_that_was_evaluated_by_hand_trains_in_train_mode_except_what_is_frozen() -> None:
    module = Partly().eval()
    Trainer(max_steps=1, progress=False).fit(module, torch.randn(8, 3), batch_size=2)
    (modes,) = module.modes
    assert {name.partition(".")[0] for name, training in modes.items() if not training} == {"backbone", "teacher"}
    assert not module.training


class KeptInEvalMode(TrainModule):
    """The usual way to keep a frozen backbone in eval mode: an overridden `train`. One part is in train mode all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).requires_grad_(False)
        self.moving = torch.nn.BatchNorm1d(4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 1)

    def train(self, mode: bool = True) -> KeptInEvalMode:
        super().train(mode)
        self.backbone.eval()
        return self

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.moving(self.backbone(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_an_overridden_train_decides_what_stays_in_eval_mode(capsys: pytest.CaptureFixture[str]) -> None:
    module = KeptInEvalMode()
    before = [part[-1].running_mean.clone() for part in (module.backbone, [module.moving])]  # type: ignore[union-attr, index]
    Trainer(max_steps=2, progress=False).fit(module, torch.randn(8, 3), batch_size=4)
    assert torch.equal(module.backbone[1].running_mean, before[0])  # type: ignore[arg-type]
    assert not torch.equal(module.moving.running_mean, before[1])  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "note: in eval mode, as set: backbone" in printed
    assert (
        "note: frozen, but in train mode, so that their running statistics change with every batch: moving;" in printed
    )


class Taught(TrainModule):
    """Learns from a quantised teacher inside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 3)).requires_grad_(False)
        quantize_(self.teacher, Int8WeightOnlyConfig(version=2))
        self.student = torch.nn.Linear(32, 3)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.student(batch) - self.teacher(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def test_an_export_leaves_out_quantised_weights_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Taught()
    Trainer(max_steps=2, run_dir=tmp_path, progress=False).fit(module, torch.randn(8, 32), batch_size=4)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(exported) == ["student.bias", "student.weight", "teacher.0.bias", "teacher.1.bias"]
    assert torch.equal(exported["student.weight"], module.student.weight)
    printed = capsys.readouterr()
    assert (
        "will hold the weights without teacher.0.weight, teacher.1.weight: as in checkpoints"
        in printed.out + printed.err
    )
