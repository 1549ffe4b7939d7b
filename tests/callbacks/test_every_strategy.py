"""Every callback that comes with fabricate, under every strategy on two ranks: it does its work, or is refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fabricate
from fabricate import (
    ConfigurationError,
    DeviceStats,
    EarlyStopping,
    GenerateSamples,
    GradientNorms,
    HubPush,
    LearningRateFinder,
    ModelSummary,
    PredictionWriter,
    Profiler,
    SaveOnException,
    StochasticWeightAveraging,
    Throughput,
    Trainer,
    TrainModule,
    UnfreezeAt,
)
from fabricate.testing import run_ranks
from tests.support.hub import TOKEN, serving

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
ALL = ("ddp", "fsdp", "powersgd", "diloco:every=2", "zero1", "zero2", "zero3")
HIDING = ALL[3:]
"""Those that keep gradients to themselves."""
PROMPT = "text"


class Letters:
    """A tokenizer: one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]

    def decode(self, numbers: list[int]) -> str:
        return "".join(chr(96 + number) for number in numbers)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.tokenizer = Letters()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.predict_step(batch) - batch.sum(1, keepdim=True)).square().mean()

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(batch)))  # type: ignore[no-any-return]

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([tokens, 1 + self.predict_step(tokens / 26.0).abs().mul(9).long() % 26], 1)

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(strategy: str, run_dir: Path | None, *plugins: object, batch_size: int = 2) -> dict[str, float]:
    """The metrics of a fit of six updates, validation among them."""
    trainer = Trainer(
        strategy=strategy, max_epochs=1, run_dir=run_dir, log_every=2, seed=3, progress=False, plugins=plugins
    )
    return trainer.fit(Net(), ROWS, ROWS[:8], batch_size=batch_size).metrics


def reports(directory: Path) -> dict[str, Any]:
    """By strategy: whether the metrics are those of a fit without callbacks, and what was reported; or why that was refused."""
    by_strategy: dict[str, Any] = {}
    for strategy in ALL:
        run_dir = directory / strategy.partition(":")[0]
        summary = ModelSummary()
        works = [
            summary,
            Profiler(wait=1, active=2),
            DeviceStats(),
            Throughput(peak=1e9),
            SaveOnException(),
            EarlyStopping(),
        ]
        works += [] if strategy in HIDING else [GradientNorms(every=1)]
        metrics = fit(strategy, run_dir, *works)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            plain = fit(strategy, None)
        norms = {name: value for name, value in metrics.items() if name.startswith("grad_norm/")}
        same = {name: metrics[name] for name in plain} == plain
        stages = UnfreezeAt({"first": 2})
        refused = [_refused(strategy, plugin) for plugin in (GradientNorms(), stages)]
        if strategy not in HIDING:
            fit(strategy, None, stages)
        tried = {type(plugin).__name__ for plugin in (*works, GradientNorms(), stages)}
        messages = sorted({str(warning.message) for warning in warned})
        by_strategy[strategy] = same, [layer.name for layer in summary.layers], norms, refused, messages, tried
    return by_strategy


def others(directory: Path, hub: str) -> dict[str, Any]:
    """By strategy: what the callbacks came to that do not report: rates tried, predictions written, texts, weights averaged, pushes."""
    by_strategy: dict[str, Any] = {}
    for strategy in ALL:
        folder = directory / strategy.partition(":")[0]
        finder, samples = LearningRateFinder(1e-4, 1e-2, num_training_steps=6), GenerateSamples([PROMPT])
        averaging = StochasticWeightAveraging(0.01, "2 steps", average_every="2 steps")
        writer = PredictionWriter(folder)
        fit(strategy, None, finder)
        drifts = "averaging" if "diloco" in strategy else ""
        refused = _refused(strategy, averaging) if drifts else ""
        push = HubPush(f"me/{folder.name}", at="saves", endpoint=hub, token=TOKEN)
        fit(strategy, directory / f"run-{folder.name}", samples, push, *(() if drifts else (averaging,)))
        returned = Trainer(strategy=strategy, progress=False, plugins=[writer]).predict(Net(), ROWS, batch_size=2)
        predictions = list(PredictionWriter.read(folder)) if returned is not None else []
        few = Trainer(strategy=strategy, progress=False, limit_predict_batches=1).predict(Net(), ROWS, batch_size=2)
        tried = {type(plugin).__name__ for plugin in (finder, samples, averaging, writer, push)}
        by_strategy[strategy] = (
            finder.results["lr"],
            samples.texts,
            averaging.averages,
            refused,
            (returned, predictions, few),
            tried,
        )
    return by_strategy


def _refused(strategy: str, plugin: object) -> str:
    if strategy not in HIDING:
        return ""
    with pytest.raises(ConfigurationError) as error:
        fit(strategy, None, plugin)
    return str(error.value)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("reports")
    return directory, run_ranks(reports, 2, directory, timeout=300)


@pytest.mark.parametrize("strategy", ALL)
def test_what_reports_does_so_and_leaves_the_weights_alone(
    reported: tuple[Path, list[dict[str, Any]]], strategy: str
) -> None:
    directory, ranks = reported
    for rank in ranks:
        same, layers, norms, _, warned, _ = rank[strategy]
        assert warned == [], "a library's warning says nothing to a user"
        assert same, "validation measures the same loss to the last bit"
        assert layers == ["first", "last"]
        assert sorted(norms) == ([] if strategy in HIDING else ["grad_norm/first", "grad_norm/last"])
    run_dir = directory / strategy.partition(":")[0]
    assert (run_dir / "profile/operators-rank0.txt").exists()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = [line["clock"] for line in lines if line["stage"] == "train"][-1]
    assert {"process_memory_bytes", "host_memory_share", "tokens_per_second", "flops_per_second", "mfu"} <= clock.keys()


@pytest.mark.parametrize("strategy", HIDING)
def test_what_needs_gradients_is_refused_by_name_where_they_are_hidden(
    reported: tuple[Path, list[dict[str, Any]]], strategy: str
) -> None:
    name = strategy.partition(":")[0]
    for rank in reported[1]:
        norms, stages = rank[strategy][3]
        assert f"strategy={name!r} hides gradients from on_before_step, which GradientNorms implements" in norms
        assert f"strategy={name!r}" in stages


def test_gradient_norms_of_ranks_are_those_of_one_process(reported: tuple[Path, list[dict[str, Any]]]) -> None:
    alone = fit("single", None, GradientNorms(every=1), batch_size=4)
    for strategy in ("ddp", "fsdp"):
        for rank in reported[1]:
            norms = rank[strategy][2]
            assert norms == pytest.approx({name: alone[name] for name in norms}, rel=1e-4)


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with serving(tmp_path_factory.mktemp("hub")) as hub:
        ranks = run_ranks(others, 2, tmp_path_factory.mktemp("others"), hub.url, timeout=300)
    pushed = [["README.md", "model.safetensors"]] * len(ALL)
    assert [sorted(files) for files in hub.repositories.values()] == pushed
    return ranks


@pytest.mark.parametrize("strategy", ALL)
def test_what_changes_a_fit_or_writes_works_or_is_refused_by_name(worked: list[dict[str, Any]], strategy: str) -> None:
    expected = Net().predict_step(ROWS)
    for number, rank in enumerate(worked):
        rates, texts, averages, refused, (returned, predictions, few), _ = rank[strategy]
        assert rates == pytest.approx([1e-4 * 10 ** (update / 2.5) for update in range(6)])
        together = strategy in ("fsdp", "zero3")
        assert [text[: len(PROMPT)] for text in texts] == ([PROMPT] if number == 0 or together else [])
        assert all(len(text) == len(PROMPT) + 1 for text in texts)
        assert (averages, "weights differ between ranks" in refused) == (
            (0, True) if "diloco" in strategy else (2, False)
        )
        assert returned == ([] if number == 0 else None)
        if number == 0:
            torch.testing.assert_close(torch.stack(predictions), expected)
            assert few is not None
            torch.testing.assert_close(torch.stack(few), expected[:4])  # a batch of each rank


def test_every_callback_that_comes_with_fabricate_is_tried(
    reported: tuple[Path, list[dict[str, Any]]], worked: list[dict[str, Any]]
) -> None:
    offered = {name for name, home in fabricate._HOME.items() if home.startswith("callbacks.")}
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.count("|") == 5}
    assert rows == offered | {"BatchSizeFinder"}, "which tests/training/test_batch_size.py tries"
    for strategy in ALL:
        assert reported[1][0][strategy][-1] | worked[0][strategy][-1] == offered
