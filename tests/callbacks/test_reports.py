"""Callbacks that report on a run: the table of layers, the profile of a few updates, the gradient norms of groups."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import (
    Callback,
    ConfigurationError,
    GradientNorms,
    ModelSummary,
    Profiler,
    Throughput,
    Trainer,
    TrainModule,
)
from fabricate.testing import run_ranks

WIDTH, ROWS = 16, 4


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
        self.frozen = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(self.frozen(x)).squeeze(-1), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def rows() -> torch.utils.data.TensorDataset:
    torch.manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32))


def fit(*plugins: object, **arguments: Any) -> Net:
    module = Net()
    Trainer(**{"max_steps": 6, "seed": 3, "progress": False, "plugins": plugins, **arguments}).fit(
        module, rows(), batch_size=ROWS
    )
    return module


def summary(strategy: str) -> dict[str, tuple[int, int, str, int]]:
    """Of a fit on any number of ranks: parameters, trainable ones, output and forward FLOPs by layer; and all FLOPs, of a micro-batch
    and of an update of two on each rank."""
    callback = ModelSummary(depth=2)
    module = fit(callback, strategy=strategy, max_steps=1, gradient_accumulation_steps=2)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.net.modules())
    layers = {row.name: (row.parameters, row.trainable, row.output, row.forward_flops) for row in callback.layers}
    return {**layers, "all": (0, 0, "", callback.micro_batch_flops), "step": (0, 0, "", callback.step_flops)}


EXPECTED = {
    "net": (8 * WIDTH + WIDTH + WIDTH + 1, 8 * WIDTH + WIDTH + WIDTH + 1, f"{ROWS} x 1", 2 * ROWS * WIDTH * 9),
    "net.0": (8 * WIDTH + WIDTH, 8 * WIDTH + WIDTH, f"{ROWS} x {WIDTH}", 2 * ROWS * WIDTH * 8),
    "net.1": (0, 0, f"{ROWS} x {WIDTH}", 0),
    "net.2": (WIDTH + 1, WIDTH + 1, f"{ROWS} x 1", 2 * ROWS * WIDTH),
    "frozen": (64, 0, f"{ROWS} x 8", 2 * ROWS * 8 * 8),
}
# Forward; backward: the gradient of each trained weight, and of the input of net.2 alone.
FLOPS = 2 * ROWS * (64 + 9 * WIDTH + 9 * WIDTH + WIDTH)


def expected(ranks: int) -> dict[str, tuple[int, int, str, int]]:
    return EXPECTED | {"all": (0, 0, "", FLOPS), "step": (0, 0, "", FLOPS * 2 * ranks)}


class Validated(Net):
    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}


@pytest.mark.parametrize("first", [False, True])
def test_the_summary_shows_shapes_of_training_and_not_of_a_validation_before_it(first: bool) -> None:
    callback = ModelSummary(depth=2)
    trainer = Trainer(max_steps=2, validate_every=1, validate_first=first, progress=False, plugins=[callback])
    trainer.fit(Validated(), rows(), torch.utils.data.DataLoader(rows(), 2), batch_size=ROWS)
    assert {row.name: row.output for row in callback.layers} == {name: each[2] for name, each in EXPECTED.items()}


def test_the_summary_counts_parameters_shapes_and_flops_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert summary("single") == expected(1)
    printed = capsys.readouterr().out
    assert printed.count("net.0") == 1
    assert "FLOPs per micro-batch" in printed
    assert "per update" in printed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_the_summary_is_the_same_on_two_ranks(strategy: str) -> None:
    assert run_ranks(summary, 2, strategy) == [expected(2)] * 2


def test_the_profiler_writes_a_trace_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Profiler(wait=1, warmup=1, active=2), run_dir=tmp_path)
    trace = json.loads((tmp_path / "profile/trace-rank0.json").read_text())
    assert "aten::addmm" in {event["name"] for event in trace["traceEvents"]}
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("training_step") == names.count("optimizer_step") == 2
    table = (tmp_path / "profile/operators-rank0.txt").read_text()
    assert table.startswith("2 updates of ")
    assert "loop and hooks" in table.splitlines()[0], "the share of the loop"
    _, operators, _ = re.split(r"(?m)^(?:-+  )+\n", table.partition("\n\n")[2])[1:]
    assert len(operators.splitlines()) == 10  # which ones take most is the machine's to say
    assert table.strip() in capsys.readouterr().out


def test_a_fit_too_short_for_the_profiler_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Profiler(wait=10), run_dir=tmp_path)
    assert "The fit ended after 6 updates, and wait + warmup + active is 15" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_gradient_norms_are_those_of_the_groups(tmp_path: Path) -> None:
    fit(GradientNorms(depth=2, every=2), run_dir=tmp_path, max_steps=3, log_every=3)
    recorded = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["metrics"]

    module, data = Net(), rows()
    optimizer = module.configure_optimizers()
    for batch in batches_of_a_fit(data)[:2]:
        optimizer.zero_grad()
        module.training_step(batch).backward()
        optimizer.step()
    for layer in ("0", "2"):
        parameters = getattr(module.net, layer).parameters()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert recorded[f"grad_norm/net.{layer}"] == pytest.approx(norm.item(), rel=1e-6)
    assert "grad_norm/frozen.weight" not in recorded


def test_gradient_norms_are_averaged_over_records_whatever_their_rows(tmp_path: Path) -> None:
    norms: list[float] = []

    class Looks(Net):
        def on_before_step(self) -> None:
            gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    trainer = Trainer(max_epochs=1, log_every=2, run_dir=tmp_path, progress=False, plugins=[GradientNorms(every=1)])
    trainer.fit(Looks(), torch.utils.data.Subset(rows(), range(5)), batch_size=4)
    recorded = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert len(norms) == 2
    assert recorded["grad_norm/net"] == pytest.approx(sum(norms) / 2, rel=1e-6)


def batches_of_a_fit(data: torch.utils.data.TensorDataset) -> list[Any]:
    """The first three micro-batches that a fit reads."""
    batches: list[Any] = []

    class Note(Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            batches.append(batch)
            return super().training_step(batch)

    Trainer(max_steps=3, seed=3, progress=False).fit(Note(), data, batch_size=ROWS)
    return batches


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ModelSummary(depth=0), r"ModelSummary\(depth=0\)"),
        (lambda: GradientNorms(every=0), r"GradientNorms\(every=0\)"),
        (lambda: Profiler(active=0), r"Profiler\(active=0\)"),
        (lambda: fit(Profiler()), r"Profiler\(folder=None\).*run_dir"),
    ],
)
def test_arguments_that_cannot_work_are_refused(build: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build()


class FrozenEncoder(TrainModule):
    """A head over a frozen encoder, which takes torch's fast path for rows with padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()
        self.head = torch.nn.Linear(16, 2)
        self.hooked: list[bool] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        rows, padded, labels = batch
        layers = self.encoder.layers.modules()
        self.hooked.append(any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers))
        hidden = self.encoder(rows, src_key_padding_mask=padded)
        return torch.nn.functional.cross_entropy(self.head(hidden).mean(1), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("callback", [None, Throughput(), ModelSummary(depth=1), ModelSummary(depth=4)])
def test_a_frozen_encoder_keeps_its_fast_path_in_the_first_update(callback: Callback | None) -> None:
    """A hook on its layers ended that path; there, torch's counter of FLOPs raises an error."""
    torch.manual_seed(0)
    padded = torch.zeros(16, 5, dtype=torch.bool)
    padded[::2, 3:] = True
    rows = torch.utils.data.TensorDataset(torch.randn(16, 5, 16), padded, torch.randint(0, 2, (16,)))
    module = FrozenEncoder()
    by_hand = copy.deepcopy(module)
    Trainer(max_steps=2, plugins=[callback] if callback else [], progress=False).fit(
        module, rows, batch_size=8, shuffle=False
    )
    optimizer = by_hand.configure_optimizers()
    for places in (slice(8), slice(8, 16)):
        by_hand.training_step([tensor[places] for tensor in rows.tensors]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(module.head.weight, by_hand.head.weight)
    assert module.hooked == by_hand.hooked == [False, False]
