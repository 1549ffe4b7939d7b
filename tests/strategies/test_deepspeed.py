"""The strategies zero1, zero2 and zero3, on real ranks, compared with plain PyTorch by hand and with each other."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fabricate_deepspeed.stage3 import ZeRO3

from fabricate import Callback, ConfigurationError, FabricateError, RankError, Trainer, TrainModule, hookimpl
from fabricate.testing import run_ranks
from tests.support.by_hand import (
    ROWS,
    TOLERANCE,
    WIDTH,
    Net,
    Recorder,
    assert_as_by_hand,
    assert_idle_layers_as_by_hand,
    by_hand,
    difference,
    fit,
    seeded,
)

STAGES = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize(("strategy", "world_size"), [*((stage, 2) for stage in STAGES), *(("zero2", 3), ("zero3", 3))])
def test_losses_norms_and_weights_are_those_of_a_loop_by_hand(strategy: str, world_size: int) -> None:
    assert_as_by_hand(strategy, world_size)


def _resumed(run_dir: Path, strategy: str, **arguments: Any) -> Recorder:
    """The updates that are left after the third, from what another strategy saved."""
    return fit(strategy, resume=str(run_dir / "checkpoints" / "step-00000003"), **arguments)


def _saved(run_dir: Path, strategy: str, **arguments: Any) -> Recorder:
    return fit(strategy, steps=3, run_dir=run_dir, save_every="3 steps", **arguments)


def _save_all(root: Path) -> None:
    for strategy in (*STAGES, "fsdp"):
        _saved(root / strategy, strategy)


def _resume_all(root: Path, pairs: list[tuple[str, str]]) -> list[Recorder]:
    return [_resumed(root / saved, resumed) for saved, resumed in pairs]


def test_what_one_strategy_saves_any_other_resumes_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Optimizer state included: losses and weights go on as in a run by hand that never stopped."""
    run_ranks(_save_all, 2, tmp_path, timeout=120)
    run_ranks(_saved, 1, tmp_path / "single", "single")
    for strategy in STAGES:  # what DeepSpeed keeps in modules is not state that a checkpoint lacks
        assert ".ds_grads_remaining" not in (tmp_path / strategy / "events.jsonl").read_text(encoding="utf-8"), strategy
    hand = by_hand()
    hand.losses, hand.norms = hand.losses[3:], hand.norms[3:]
    for world_size, pairs in {
        2: [("zero3", "fsdp"), ("fsdp", "zero3"), ("zero1", "zero3"), ("zero3", "zero2"), ("single", "zero1")],
        3: [("zero3", "zero3"), ("zero2", "zero3"), ("fsdp", "zero2"), ("zero3", "fsdp"), ("single", "zero3")],
        1: [("zero3", "single"), ("zero1", "single")],
    }.items():
        for rank in run_ranks(_resume_all, world_size, tmp_path, pairs, timeout=120):
            apart = {pair: difference(recorder, hand) for pair, recorder in zip(pairs, rank, strict=True)}
            assert {pair: distance for pair, distance in apart.items() if distance > TOLERANCE} == {}, world_size


def _half(precision: str, root: Path) -> dict[str, Any]:
    plain = fit("ddp", precision=precision)
    by_stage = {}
    for stage in STAGES:
        run_dir = root / stage
        _saved(run_dir, stage, precision=precision)
        whole, resumed = fit(stage, precision=precision), _resumed(run_dir, stage, precision=precision)
        across = _resumed(run_dir, "ddp", precision=precision)
        by_stage[stage] = (whole, resumed, across)
    return {"ddp": plain, **by_stage}


@pytest.mark.parametrize("precision", ["bf16", "fp16:init_scale=64"])
def test_half_precision_keeps_float32_masters_that_every_strategy_resumes(tmp_path: Path, precision: str) -> None:
    (by_stage, _) = run_ranks(_half, 2, precision, tmp_path, timeout=120)
    plain = by_stage.pop("ddp")
    for whole, resumed, across in by_stage.values():
        assert {value.dtype for name, value in whole.weights.items() if name != "fixed"} == {torch.float32}
        assert difference(whole, plain) < 0.05  # sums in another order, rounded to half precision
        assert resumed.losses == whole.losses[3:]
        assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
        assert abs(across.losses[-1] - whole.losses[-1]) < 0.05 * whole.losses[-1]


def _evaluated(strategy: str) -> Any:
    """Before any fit, after one with the same module, after a second one, and under another strategy."""
    module, recorder = seeded(), Recorder()
    trainer = Trainer(strategy=strategy, max_steps=2, seed=3, precision="fp32", progress=False, plugins=[recorder])
    evaluations = []
    for _ in range(3):
        predicted = trainer.predict(module, ROWS, batch_size=4)
        evaluations.append((trainer.validate(module, ROWS[:9], batch_size=4), predicted and torch.stack(predicted)))
        trainer.fit(module, ROWS, ROWS[:9], batch_size=4, resume="never")
    try:
        Trainer(strategy="ddp", max_steps=2, seed=3, precision="fp32", progress=False, plugins=[recorder]).fit(
            module, ROWS, batch_size=4, resume="never"
        )
        refused = ""
    except ConfigurationError as exc:
        refused = str(exc)
    return evaluations, recorder.losses, refused


def test_modules_are_evaluated_and_trained_again_in_one_process() -> None:
    wanted, losses, _ = run_ranks(_evaluated, 2, "ddp", timeout=120)[0]
    for stage in STAGES:
        evaluations, again, refused = run_ranks(_evaluated, 2, stage, timeout=120)[0]
        for (metrics, predicted), (plain, rows) in zip(evaluations, wanted, strict=True):
            assert metrics["val_loss"] == pytest.approx(plain["val_loss"], rel=TOLERANCE)
            torch.testing.assert_close(predicted, rows)
        assert again == pytest.approx(losses[: len(again)], rel=TOLERANCE)
        assert ("sharded already" in refused) == (stage == "zero3")
        assert len(again) == (6 if refused else 8)


def _bag() -> tuple[float, float]:
    """The loss of a module whose repr has all attributes of a layer, after one fit and after a second."""

    class Bag(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.bag = torch.nn.EmbeddingBag(10, 4)

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.bag(batch).square().mean()

        def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": self.training_step(batch)}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    rows, bag = torch.randint(0, 10, (8, 3), generator=torch.Generator().manual_seed(0)), Bag()
    trainer = Trainer(strategy="zero3", max_steps=2, precision="fp32", progress=False)

    def loss() -> float:
        trainer.fit(bag, rows, batch_size=4, resume="never")
        return trainer.validate(bag, rows, batch_size=4)["val_loss"]

    return loss(), loss()


def test_a_module_whose_repr_has_all_attributes_is_evaluated_and_trained_after_a_fit() -> None:
    [(first, second)] = run_ranks(_bag, 1, timeout=120)
    assert second < first


def _left_changed(strategy: str) -> list[str]:
    """What a fit changed in the process, after a first one that may import."""
    import copy
    import logging

    def state() -> dict[str, Any]:
        return {
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "linear": torch.nn.functional.linear,
            "constructors": (torch.zeros, torch.empty, torch.Tensor.__new__, torch.nn.Module.apply),
            "default dtype": torch.get_default_dtype(),
            "log level": logging.getLogger("DeepSpeed").level,
            "root handlers": list(logging.getLogger().handlers),
        }

    before = state()
    fit(strategy, precision="bf16")
    module = seeded()
    hooks, attributes = copy.deepcopy(module), set(vars(module.gain))
    Trainer(strategy=strategy, max_steps=1, seed=3, precision="bf16", progress=False).fit(module, ROWS, batch_size=4)
    after = state()
    changed = [name for name, value in before.items() if after[name] != value]
    changed += ["linear of torch"] if torch.nn.functional.linear is not torch._C._nn.linear else []  # of an earlier fit
    if strategy != "zero3":  # whose parameters stay in parts
        changed += ["parameters"] if {p.dtype for p in module.parameters()} != {torch.float32} else []
        changed += sorted(set(vars(module.gain)) - attributes)
        copy.deepcopy(module)(ROWS)
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for one, other in zip(module.modules(), hooks.modules(), strict=True):
        changed += [name for name in names if len(getattr(one, name)) != len(getattr(other, name))]
    return changed


def test_a_fit_leaves_the_process_and_the_module_as_they_were() -> None:
    assert {stage: run_ranks(_left_changed, 2, stage, timeout=120)[0] for stage in STAGES} == {
        stage: [] for stage in STAGES
    }


@pytest.mark.parametrize("strategy", STAGES)
def test_a_layer_that_a_window_does_not_use_has_a_gradient_of_zero_there(strategy: str) -> None:
    assert_idle_layers_as_by_hand(strategy)


class Apart(Net):
    """Two layers of one size, of which each rank uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.layers[int(os.environ["RANK"])](super().forward(rows))
        return chosen


def _apart_by_rank(strategies: tuple[str, ...]) -> list[str]:
    errors = []
    for strategy in strategies:
        with pytest.raises(RankError) as caught:
            Trainer(strategy=strategy, max_steps=2, seed=3, precision="fp32", progress=False).fit(
                Apart(), ROWS, batch_size=4
            )
        errors.append(str(caught.value))
    return errors


def test_ranks_that_use_other_layers_are_told_apart() -> None:
    """Gradients of unlike parameters would be added up as if they were one."""
    for error in run_ranks(_apart_by_rank, 2, STAGES)[0]:
        assert "ranks ran different layers in the update to step 1" in error


class LeavingOut(Callback):
    """Leaves out the second update."""

    def __init__(self) -> None:
        self.asked = 0

    @hookimpl
    def optimizer_step(self) -> bool | None:
        self.asked += 1
        return False if self.asked == 2 else None


class Poisoned(Net):
    """One window has a loss that is not finite."""

    def training_step(self, batch: torch.Tensor) -> dict[str, Any]:
        answer = super().training_step(batch)
        once = self.trainer.progress.skipped == 0 and self.trainer.step == 2
        return {**answer, "loss": answer["loss"] * torch.inf} if once else answer


def _with_gaps(strategy: str) -> Any:
    left_out = fit(strategy, plugins=[LeavingOut()])
    torch.manual_seed(0)
    recorder, errors = Recorder(), []
    for nonfinite in ("skip", "stop"):
        trainer = Trainer(
            strategy=strategy,
            max_steps=4,
            seed=3,
            precision="fp32",
            nonfinite=nonfinite,
            progress=False,
            plugins=[recorder],
        )
        try:
            trainer.fit(Poisoned(), ROWS, batch_size=2, shuffle=False)
        except FabricateError as exc:
            errors.append(str(exc))
    return left_out, recorder.losses, recorder.skipped, errors


def test_an_update_that_is_left_out_leaves_nothing_behind() -> None:
    wanted, losses, skipped, _ = run_ranks(_with_gaps, 2, "ddp")[0]
    for stage in (*STAGES, "zero2:offload_optimizer=cpu", "zero3:offload_optimizer=cpu"):
        left_out, again, reasons, errors = run_ranks(_with_gaps, 2, stage)[0]
        assert difference(left_out, wanted) < TOLERANCE
        assert again[:4] == pytest.approx(losses[:4], rel=TOLERANCE)
        assert reasons == skipped == ["non-finite gradients"]
        assert "the gradient of this update is not finite" in errors[0]


class Large(TrainModule):
    """200 MiB of parameters in float32, built layer by layer."""

    def configure_model(self) -> None:
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(50))

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch


def _mebibytes(field: str) -> int:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index(f"{field}:") + 1]) // 1024


def _peak(strategy: str) -> tuple[int, str]:
    """MiB of memory that building `Large` and predicting with it take at most, and a digest of the predictions."""
    small = {"stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": 1, "reduce_bucket_size": 1024}
    chosen: Any = ZeRO3(config={"zero_optimization": small}) if strategy == "zero3" else strategy
    trainer = Trainer(strategy=chosen, precision="fp32", seed=3, progress=False)
    trainer.predict(seeded(), torch.ones(2, WIDTH), batch_size=1)  # what is imported and started once
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed counts no more
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _mebibytes("VmRSS")
    predicted = trainer.predict(Large(), torch.ones(2, 1024), batch_size=1)
    digest = hashlib.sha256(torch.stack(predicted).numpy().tobytes()).hexdigest() if predicted else ""
    return _mebibytes("VmHWM") - before, digest


def test_a_rank_builds_little_more_than_its_part_from_the_same_initial_weights() -> None:
    parts, whole = run_ranks(_peak, 2, "zero3", timeout=120), run_ranks(_peak, 2, "ddp", timeout=120)
    assert parts[0][1] == whole[0][1]
    assert [peak < 150 for peak, _ in parts] == [True, True], parts
    assert [peak > 195 for peak, _ in whole] == [True, True], whole


class Two(Net):
    def configure_optimizers(self) -> Any:
        return {name: torch.optim.SGD(getattr(self, name).parameters(), lr=0.1) for name in ("first", "second")}


class Factored(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


class Gathered(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters())


class Editing(Callback):
    def on_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        raise AssertionError("there is nothing to edit")


def _refused(strategy: str, **arguments: Any) -> list[str]:
    errors = []
    cases: list[tuple[type[Net], dict[str, Any]]] = [
        (Two, {}),
        (Factored, {}),
        (Gathered, {}),
        (Net, {"plugins": [Editing()]}),
    ]
    for kind, options in cases:
        trainer = Trainer(strategy=strategy, max_steps=1, seed=1, precision="fp32", progress=False, **options)
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit(kind(), ROWS, batch_size=4)
        errors.append(str(caught.value))
    return errors


def test_what_flat_slices_and_hidden_gradients_cannot_do_is_refused() -> None:
    two, factored, gathered, editing = run_ranks(_refused, 2, "zero2")[0]
    assert "trains with one optimizer, but there are 2 (first, second)" in two
    assert "Adafactor is not known to update each element independently" in factored
    assert "zero2:allow_untested_optimizer=true" in factored
    assert "Adagrad has state before its first step" in gathered
    assert "strategy='zero2' hides gradients from on_before_step, which Editing implements" in editing


def _scaled(root: Path, strategies: tuple[str, ...]) -> Any:
    """A loss scale that doubles after each clean update, and the same resumed after the third under another strategy."""
    growing = "fp16:init_scale=4,growth_interval=1"
    by_strategy = {}
    for strategy in strategies:
        fixed, doubled = (
            fit(strategy, "sgd", precision=precision, max_grad_norm=None)
            for precision in ("fp16:init_scale=4", growing)
        )
        _saved(root / strategy, strategy, precision=growing)
        by_strategy[strategy] = (fixed.losses, doubled.losses)
    resumed = {}
    for saved, strategy in (("zero3", "fsdp"), ("fsdp", "zero3"), ("zero2", "zero1")):
        run_dir = root / f"{saved}-{strategy}"
        path = root / saved / "checkpoints" / "step-00000003"
        fit(strategy, precision=growing, run_dir=run_dir, resume=str(path))
        text = (run_dir / "checkpoints" / "step-00000005" / "state.json").read_text()
        resumed[saved, strategy] = json.loads(text)["scaler"]["scale"]
    return by_strategy, resumed


def test_a_loss_scale_that_grows_changes_no_update_and_is_resumed(tmp_path: Path) -> None:
    by_strategy, resumed = run_ranks(_scaled, 2, tmp_path, (*STAGES, "fsdp"), timeout=120)[0]
    for fixed, doubled in by_strategy.values():
        assert doubled == pytest.approx(fixed, rel=2e-3)  # rounded elsewhere
    assert set(resumed.values()) <= {64.0, 128.0}, resumed


TOKENS = torch.randint(0, 40, (24, 8), generator=torch.Generator().manual_seed(2))


class Language(TrainModule):
    """A small transformers model with tied embeddings: from its configuration, or read from `path`."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=40, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        self.model = AutoModelForCausalLM.from_pretrained(self.path) if self.path else GPT2LMHeadModel(config)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam would make whole steps of the rounding errors that are the gradient of attention's key biases.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _language(strategy: str, run_dir: Path, path: str = "") -> Recorder:
    recorder = Recorder()
    trainer = Trainer(
        strategy=strategy, max_steps=3, seed=3, precision="fp32", run_dir=run_dir, progress=False, plugins=[recorder]
    )
    trainer.fit(Language(path), TOKENS, batch_size=8 // int(os.environ["WORLD_SIZE"]), shuffle=False)
    return recorder


def _languages(root: Path, cases: dict[str, tuple[str, str]]) -> dict[str, Recorder]:
    return {name: _language(strategy, root / name, path) for name, (strategy, path) in cases.items()}


def _exported(paths: list[Path]) -> list[dict[str, torch.Tensor]]:
    from transformers import GPT2LMHeadModel

    return [{n: p.detach() for n, p in GPT2LMHeadModel.from_pretrained(path).named_parameters()} for path in paths]


def test_a_transformers_model_is_built_read_trained_and_exported_in_parts(tmp_path: Path) -> None:
    path, zero3 = str(tmp_path / "built" / "model"), f"zero3:config={_persist_nothing(tmp_path)}"
    alone = {"built": ("single", ""), "read": ("single", path)}
    hand = run_ranks(_languages, 1, tmp_path, alone, timeout=120)[0]
    cases = {"built in zero2": ("zero2", ""), "built in zero3": (zero3, ""), "read in zero3": (zero3, path)}
    parts = run_ranks(_languages, 2, tmp_path, cases, timeout=120)[0]
    exported = run_ranks(_exported, 1, [tmp_path / case / "model" for case in cases], timeout=120)[0]
    for (case, recorder), weights in zip(parts.items(), exported, strict=True):
        assert difference(recorder, hand[case.split()[0]]) < TOLERANCE, case
        assert all(torch.equal(value, recorder.weights[f"model.{name}"]) for name, value in weights.items()), case


def _persist_nothing(directory: Path) -> Path:
    """A file that has stage 3 gather every parameter, however small."""
    file = directory / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    return file


class Generates(TrainModule):
    """Generates more tokens on rank 1 than on rank 0, in each step of an evaluation."""

    def configure_model(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=8, eos_token_id=None, pad_token_id=0, **sizes))

    def validation_step(self, batch: torch.Tensor) -> Any:
        number = 1 + 4 * self.trainer.accelerator.process_index
        tokens = self.model.generate(batch, max_new_tokens=number, do_sample=False)
        return {"outputs": tokens.tolist()}

    def compute_metrics(self, outputs: list[Any]) -> dict[str, float]:
        self.generated = outputs
        return {"rows": len(outputs)}


def _generated(strategy: str) -> tuple[list[list[int]] | None, bool]:
    module = Generates()
    rows = [torch.tensor([1 + number % 7]) for number in range(6)]
    Trainer(strategy=strategy, seed=1, progress=False, timeout="60 seconds").validate(module, rows, batch_size=2)
    return getattr(module, "generated", None), "generate" in vars(module.model)


def test_ranks_may_generate_different_numbers_of_tokens() -> None:
    wanted = run_ranks(_generated, 2, "ddp", timeout=120)
    generated = wanted[0][0]
    assert generated is not None
    assert {len(row) for row in generated} == {2, 6}
    assert run_ranks(_generated, 2, "zero3", timeout=120) == wanted
