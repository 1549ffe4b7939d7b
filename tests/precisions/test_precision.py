"""Precision in effect: the dtypes of the computation are observed, reported and refused; pure bfloat16 trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optimi
import pytest
import torch
from torch.utils.data import TensorDataset

from campaigns.precision import table
from fabricate import ConfigurationError, Precision, Trainer, TrainModule
from fabricate.precisions.builtin import FP32

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True) / 4)
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return optimi.AdamW(parameters, lr=1e-2, weight_decay=0.0)


class Net(TrainModule):
    def __init__(self, optimizer: Optimizer = adamw, autocast: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        self.layers = torch.nn.Sequential(*layers)
        self.optimizer = optimizer
        self.autocast = autocast
        self.observations: list[Any] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.observations.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        with torch.autocast("cpu", enabled=self.autocast and torch.is_autocast_enabled("cpu")):
            return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())

    def on_save(self, state: Any) -> None:
        """What it has seen is for the tests, and in no checkpoint."""


def fit(module: TrainModule, precision: Any, **options: Any) -> Any:
    trainer = Trainer(precision=precision, progress=False, seed=3, **({"max_steps": 6} | options))
    return trainer.fit(module, DATA, batch_size=8, resume="auto")


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


# --------------------------------------------------------------------------------------------------------------- TF32


@pytest.mark.parametrize("precision", ["tf32", "fp32:tf32=true"])
def test_tf32_is_refused_where_there_is_none(precision: str) -> None:
    with pytest.raises(ConfigurationError, match="cpu has no TF32; only NVIDIA GPUs of compute capability"):
        fit(Net(), precision)


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", (False, True)), ("fp32:tf32=false", (False, False))])
def test_what_is_said_about_tf32_holds_for_the_run_and_no_longer(precision: str, allowed: tuple[bool, bool]) -> None:
    module = Net()
    fit(module, precision)
    Trainer(precision=precision, progress=False).validate(module, DATA, batch_size=8)
    assert module.observations == [allowed] * 10
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True), "torch's own"


def test_torchs_newer_switch_for_tf32_is_read_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    switch: Any = torch.backends.cuda.matmul
    switch.fp32_precision = "tf32"  # as a script may, which makes it an error to read allow_tf32
    try:
        text = "torch's settings: matrix products TF32, convolutions TF32"
        assert FP32().describe() == {"float32 products": text}
        with FP32(tf32=False).process_context(torch.device("cpu")):
            assert (switch.fp32_precision, switch.allow_tf32) == ("ieee", False)
        assert switch.fp32_precision == "tf32"
    finally:
        switch.allow_tf32 = False
        switch.fp32_precision = "none"


def test_settings_of_the_process_are_given_back_after_a_failure() -> None:
    class Breaks(Precision):
        name = "breaks"
        compute_dtype = "bfloat16"  # which is not so

        def process_context(self, device: torch.device) -> Any:
            return torch.autograd.set_detect_anomaly(True)

    with pytest.raises(ConfigurationError, match="computes in bfloat16, but autocast computes in float32 on cpu"):
        fit(Net(), Breaks())
    assert not torch.is_anomaly_enabled()


class Double(Precision):
    name = "double"
    compute_dtype = "float64"

    def convert(self, module: torch.nn.Module) -> None:
        module.double()


class OnlySaysDouble(Double):
    def convert(self, module: torch.nn.Module) -> None:
        """Nothing, which is the fault."""


@pytest.mark.parametrize("precision", [Double, OnlySaysDouble])
def test_a_precision_may_convert_parameters_to_float64(
    precision: type[Precision], capsys: pytest.CaptureFixture[str]
) -> None:
    module, dtype = Net(), torch.float64 if precision is Double else torch.float32
    data = TensorDataset(*(each.to(dtype) for each in DATA.tensors))
    Trainer(precision=precision(), max_steps=2, progress=False).fit(module, data, batch_size=8)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    said = "computes in float64, but no layer returned a tensor of this dtype" in capsys.readouterr().err
    assert said == (precision is OnlySaysDouble)


# ------------------------------------------------------------------------------------------------------- pure bfloat16


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_an_optimizer_that_loses_small_updates_is_refused(optimizer: Optimizer) -> None:
    with pytest.raises(ConfigurationError, match=r"precision='bf16-true': (AdamW|SGD) loses updates .* such as optimi"):
        fit(Net(optimizer), "bf16-true")


def test_an_optimizer_whose_compensation_is_off_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="AdamW loses updates"):
        fit(Net(lambda p: optimi.AdamW(p, lr=0.1, kahan_sum=False)), "bf16-true")


@pytest.mark.parametrize(
    ("precision", "frozen", "optimizer", "noted"),
    [
        ("bf16", False, torch.optim.AdamW, True),
        ("fp32", False, lambda p: torch.optim.SGD(p, lr=0.1), True),
        ("bf16", False, lambda p: optimi.AdamW(p, lr=0.1), False),
        ("bf16-true", False, lambda p: optimi.AdamW(p, lr=0.1), False),
        ("bf16", True, torch.optim.AdamW, False),
    ],
)
def test_weights_that_a_script_made_in_bfloat16_get_a_note(
    precision: str, frozen: bool, optimizer: Optimizer, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Net(optimizer)
    module.layers[3].to(torch.bfloat16)
    module.layers[3].requires_grad_(not frozen)
    if precision == "fp32":
        module.layers[2] = Narrows()
    fit(module, precision)
    text = f"2 of 6 trained parameters are bfloat16, as the script made or loaded them, and precision={precision!r} leaves them so"
    assert (text in capsys.readouterr().out) == noted


class Narrows(torch.nn.Tanh):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).bfloat16()


def test_pure_bfloat16_keeps_everything_in_it_and_gives_float32_back(tmp_path: Path) -> None:
    module = Net()
    fit(module, "bf16-true", run_dir=tmp_path)
    (observed,) = events(tmp_path, "observed")
    assert observed["parameters"] == observed["gradients"] == ["bfloat16", "float32"], "float32 in BatchNorm1d"
    assert observed["optimizer_state"] == ["bfloat16", "float32"]
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_evaluating_in_pure_bfloat16_leaves_the_weights_to_the_last_bit() -> None:
    module, whole = Net(), Net()
    assert not torch.equal(module.layers[0].weight, module.layers[0].weight.bfloat16().float())
    Trainer(precision="bf16-true", progress=False).validate(module, DATA, batch_size=8)
    for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_small_updates_add_up_in_pure_bfloat16() -> None:
    """200 updates of 1e-4 next to a weight of 1: each is lost in bfloat16, all together are not."""

    class Slow(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimi.SGD(self.parameters(), lr=1e-4)

    module = Slow()
    fit(module, "bf16-true", max_steps=200)
    assert module.weight.tolist() == pytest.approx([0.98] * 3, abs=0.004)
    alone = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(200):
        alone -= 1e-4
    assert alone.tolist() == [1.0] * 3


def test_a_run_in_pure_bfloat16_resumes_to_the_last_bit(tmp_path: Path) -> None:
    whole, halves = Net(), Net()
    fit(whole, "bf16-true", run_dir=tmp_path / "whole", save_every=3)
    fit(halves, "bf16-true", run_dir=tmp_path / "halves", save_every=3, max_steps=3)
    halves = Net()
    fit(halves, "bf16-true", run_dir=tmp_path / "halves", save_every=3)
    for ours, theirs in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_no_precision_learns_much_worse_than_float32() -> None:
    lines = table(("bf16", "fp16", "bf16-true", "fp8"), 40)
    assert lines[0].loss < 0.8 * lines[0].first, "it learns"
    assert [line.precision for line in lines if line.difference > line.bound] == []
    assert len({line.loss for line in lines}) == 5


# --------------------------------------------------------------------------------------------------------- loss scale

LABELS = 512


class Words(TrainModule):
    """Predicts `LABELS` words per row; rows in the second half of a window have an eighth as many labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words, self.head = torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16)
        self.skipped: list[int] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        logits = self.head(torch.tanh(self.words(batch[0]))).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_step_skipped(self, step: int) -> None:
        self.skipped.append(step)


def texts() -> TensorDataset:
    words = torch.randint(16, (32, LABELS), generator=torch.Generator().manual_seed(5))
    following = (3 * words + 1) % 16
    following[torch.arange(32) % 8 >= 4, LABELS // 8 :] = -100
    return TensorDataset(words, following)


def by_hand(steps: int) -> tuple[dict[str, torch.Tensor], int]:
    """The mean over the labels of two micro-batches, with torch's scaler; the weights, and how many updates were skipped."""
    module, scaler, skipped = Words(), torch.amp.GradScaler("cpu"), 0
    optimizer = module.configure_optimizers()
    x, y = texts().tensors
    for step in range(steps):
        pieces = [(x[at : at + 4], y[at : at + 4]) for at in (8 * step % 32, (8 * step + 4) % 32)]
        labels = sum(int((piece[1] >= 0).sum()) for piece in pieces)
        for piece in pieces:
            with torch.autocast("cpu", torch.float16):
                loss = module.training_step(piece) * (int((piece[1] >= 0).sum()) / labels)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    return {n: p.detach() for n, p in module.named_parameters()}, skipped


def test_the_loss_scale_is_that_of_a_loop_by_hand_however_many_labels_a_row_has() -> None:
    wanted, skipped = by_hand(4)
    assert skipped == 0
    module = Words()
    options: dict[str, Any] = {"precision": "fp16", "gradient_accumulation_steps": 2, "seed": 3, "progress": False}
    Trainer(max_steps=4, **options).fit(module, texts(), batch_size=4, shuffle=False)
    assert module.skipped == []
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.detach(), wanted[name], rtol=1e-3, atol=1e-4)


def test_a_resumed_run_keeps_the_size_of_its_gradients(tmp_path: Path) -> None:
    """Its first window has rows of fewer labels than the one that decided it."""
    options: dict[str, Any] = {"precision": "fp16", "seed": 3, "progress": False, "run_dir": tmp_path}
    for steps in (1, 2):
        result = Trainer(max_steps=steps, gradient_accumulation_steps=2, **options).fit(
            Words(), texts(), batch_size=2, shuffle=False
        )
        state = json.loads((Path(str(result.checkpoint)) / "state.json").read_bytes())
        assert state["weight_per_row"] == {"main": LABELS}


# ------------------------------------------------------------------------------------------------------------ observed


@pytest.mark.parametrize(
    ("precision", "activations"),
    [("fp32", {"float32": 3}), ("bf16", {"bfloat16": 3}), ("fp16", {"float16": 3}), ("bf16-true", {"bfloat16": 3})],
)
def test_the_first_update_says_what_it_was_computed_in(
    precision: str, activations: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Net(), precision, run_dir=tmp_path)
    (observed,) = events(tmp_path, "observed")
    assert {dtype: len(layers) for dtype, layers in observed["activations"].items()} == activations
    assert observed["loss"] == ["float32", "weighed by rows"]
    output = capsys.readouterr().out
    (dtype,) = activations
    assert f"observed in the first update: activations {dtype} (BatchNorm1d, Linear, Tanh); loss float32" in output
    assert not events(tmp_path, "note")


def test_a_precision_that_no_layer_runs_in_is_pointed_out(tmp_path: Path) -> None:
    fit(Net(autocast=False), "bf16", run_dir=tmp_path)
    (note,) = events(tmp_path, "note")
    assert note["text"].startswith(
        "precision='bf16' computes in bfloat16, but no layer returned a tensor of this dtype. Check"
    )


def test_what_compiled_blocks_compute_in_is_not_guessed_from_what_they_answer(tmp_path: Path) -> None:
    class Residual(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    class Blocks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.layers = torch.nn.ModuleList([Residual(8, 8)]), torch.nn.Sequential(torch.nn.LayerNorm(8))

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.layers(self.blocks[0](batch[0])).sum(1).square().mean()

    fit(Blocks(), "bf16", run_dir=tmp_path, compile={"backend": "eager"}, max_steps=1)
    (observed,) = events(tmp_path, "observed")
    assert observed["activations"] == {"float32": ["LayerNorm", "Residual"]}
    assert not events(tmp_path, "note")


@pytest.mark.parametrize(
    ("precision", "averaged"), [("fp32", "as they are"), ("bf16", "in float32"), ("bf16-true", "as they are")]
)
def test_the_plan_says_in_which_dtype_shards_sum_gradients(precision: str, averaged: str) -> None:
    plan = Trainer(strategy="fsdp", precision=precision, max_steps=1, progress=False).plan(Net(), DATA, batch_size=8)
    assert plan["gradients"] == f"averaged {averaged}, per micro-batch"


def test_layers_are_watched_in_the_first_update_only() -> None:
    class Counts(Net):
        hooks: list[int]

        def training_step(self, batch: Any) -> torch.Tensor:
            self.hooks = [*getattr(self, "hooks", []), len(self.layers[0]._forward_hooks)]
            if len(self.hooks) == 5:
                raise RuntimeError("in the third update")
            return super().training_step(batch)

    module = Counts()
    with pytest.raises(RuntimeError, match="third"):
        fit(module, "fp32", gradient_accumulation_steps=2)
    assert module.hooks == [1, 1, 0, 0, 0]
    module.hooks = [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="third"):
        fit(module, "fp32", gradient_accumulation_steps=2)
    assert not module.layers[0]._forward_hooks, "a failure leaves none behind"


def test_compiled_layers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it otherwise

    class Compiled(Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            inner: Any = self.layers
            self.observations.append(len(inner._orig_mod[0]._forward_hooks))
            return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    module = Compiled()
    module.layers = torch.compile(module.layers, backend="eager")  # type: ignore[assignment]
    fit(module, "fp32", max_steps=1)
    assert module.observations == [0]
