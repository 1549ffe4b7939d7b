"""Metrics of a validation step whose mean over batches depends on the batch size: the check before training finds them."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fabricate import FitResult, Trainer, TrainModule
from fabricate.testing import run_ranks
from tests.support.regression import Regression, equal, weights

ROWS = [
    (torch.full((3,), row / 8), torch.tensor([float(target)])) for row, target in enumerate((1, 5, -1, 2, 0, 3, -2, -6))
]
NOTE = "which averaged over batches depends on the batch size and the number of ranks"


def f1(error: torch.Tensor) -> float:
    guessed, right = error > error.mean(), error > 0.2
    return float(2 * (guessed & right).sum() / (guessed.sum() + right.sum()))


def over_a_normalised_mask(error: torch.Tensor) -> torch.Tensor:
    mask = (error.abs() > 0.5).float()
    return (error.abs() * mask / mask.mean()).mean()


def contrastive(error: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([error, torch.ones_like(error)], 1)
    return cross_entropy(rows @ rows.T, torch.arange(len(rows)))


DEPEND: dict[str, Callable[[torch.Tensor], Any]] = {
    "root of a mean": lambda error: {"rmse": error.square().mean().sqrt()},
    "perplexity": lambda error: {"loss": error.square().mean(), "perplexity": error.square().mean().exp()},
    "f1": lambda error: {"f1": f1(error)},
    "median": lambda error: {"median": error.median()},
    "standard deviation": lambda error: {"std": float(error.std(correction=0))},
    "normalised mask": lambda error: {"mae": over_a_normalised_mask(error)},
    "mean times its share": lambda error: {"mae": error.abs().mean() * (4 / (error.abs() > 0.5).sum())},
    "sum by einsum": lambda error: {"sse": torch.einsum("bi,bi->", error, error)},
    "numpy": lambda error: {"norm": numpy.linalg.norm(error.numpy())},
    "pairs of rows": lambda error: {"loss": contrastive(error)},
}
"""What a validation step may return, given the errors of the rows: no means over rows."""
DO_NOT: dict[str, Callable[[torch.Tensor], Any]] = {
    "means": lambda error: {"mse": error.square().mean(), "share": (error > 0).float().mean().item()},
    "constants": lambda error: {"rate": 0.1, "nothing": 0, "unknown": float("nan")},
    "mean with its weight": lambda error: {
        "mae": error[error.abs() > 0.5].abs().mean(),
        "weight": (error.abs() > 0.5).sum(),
    },
    "random": lambda error: {"loss": (error + torch.randn_like(error)).square().mean()},
    "random, and almost the same": lambda error: {
        "loss": error.square().mean().sqrt() + 1e-9 * torch.rand(()),
        "more": error.abs().mean().sqrt() + 1e-9 * numpy.random.rand(),
    },
    "random with a seed": lambda error: {
        "loss": (error + torch.randn(error.shape, generator=torch.Generator().manual_seed(1))).square().mean()
    },
    "cross-entropy and accuracy": lambda error: {
        "loss": cross_entropy(error.expand(-1, 3), torch.zeros(len(error)).long()),
        "accuracy": (error > 0).float().mean(),
    },
    "normalised rows": lambda error: {"cosine": normalize(error.expand(-1, 3) + 1, dim=1).mean()},
}


def checked(module: TrainModule, rows: Any = ROWS, **arguments: Any) -> FitResult:
    return Trainer(**{"max_epochs": 1, "progress": False, **arguments}).fit(module, rows, rows, batch_size=4)


class Gives(Regression):
    def __init__(self, metrics: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.metrics = metrics
        self.seen: list[torch.Tensor] = []

    def validation_step(self, batch: Any) -> Any:
        self.seen.append(batch[1])
        return self.metrics(self.layers(batch[0]) - batch[1])


@pytest.mark.parametrize("gives", [*DEPEND, *DO_NOT])
def test_a_metric_that_depends_on_the_batch_size_gets_a_note(gives: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    checked(Gives((DEPEND | DO_NOT)[gives]))
    assert capsys.readouterr().err.count(NOTE) == (gives in DEPEND)


def test_the_note_names_the_metric_and_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    class Root(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"mse": batch.square().mean(), "rmse": batch.square().mean().sqrt()}

        def training_step(self, batch: Any) -> Any:
            return self.layers(batch).square().mean()

    rows = [torch.full((3,), float(row)) for row in (1, 1, 3, 3)]
    checked(Root(), rows)
    assert (
        f"validation_step gives rmse, {NOTE}: 'rmse' of 4 rows is 2.23607, and the mean over two halves of them is 2."
        in (capsys.readouterr().err)
    )


def in_lists(rows: list[Any]) -> Any:
    return [row[0] for row in rows], torch.stack([row[1] for row in rows])


def named(rows: list[Any]) -> Any:
    return {
        "x": torch.stack([row[0] for row in rows]),
        "y": numpy.stack([row[1] for row in rows]),
        "name": ["a"] * len(rows),
    }


def with_a_number(rows: list[Any]) -> Any:
    return *torch.utils.data.default_collate(rows), 1.5


@pytest.mark.parametrize(("collate", "notes"), [(None, 1), (in_lists, 1), (named, 1), (with_a_number, 0)])
def test_batches_of_usual_kinds_are_halved(collate: Any, notes: int, capsys: pytest.CaptureFixture[str]) -> None:
    class Root(Regression):
        def training_step(self, batch: Any) -> Any:
            x, y = (batch["x"], torch.as_tensor(batch["y"])) if isinstance(batch, dict) else batch[:2]
            return (self.layers(torch.stack(x) if isinstance(x, list) else x) - y).square().mean()

        def validation_step(self, batch: Any) -> Any:
            return {"rmse": self.training_step(batch).sqrt()}

    Trainer(max_epochs=1, progress=False).fit(Root(), ROWS, ROWS, batch_size=2, collate_fn=collate)
    assert capsys.readouterr().err.count(NOTE) == notes


def test_a_step_that_fails_with_half_a_batch_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    class Fixed(Regression):
        def validation_step(self, batch: Any) -> Any:
            assert len(batch[0]) == 4
            return {"rmse": (self.layers(batch[0]) - batch[1]).square().mean().sqrt()}

    checked(Fixed())
    assert NOTE not in capsys.readouterr().err


@pytest.mark.parametrize(
    "made", [lambda: torch.Generator().manual_seed(0), lambda: numpy.random.default_rng(0), lambda: random.Random(0)]
)
def test_a_generator_of_the_module_is_put_back_and_what_it_draws_is_not_compared(
    made: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Draws(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.random = made()

        def draw(self) -> float:
            if isinstance(self.random, torch.Generator):
                return float(torch.rand((), generator=self.random))
            return self.random.random()

        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch) * self.draw()

        def validation_step(self, batch: Any) -> Any:
            return {"loss": (self.layers(batch[0]) - batch[1]).square().mean().sqrt() + 1e-9 * self.draw()}

    ends = []
    for number in (0, 2):
        torch.manual_seed(0)
        module = Draws()
        checked(module, sanity_batches=number, seed=1)
        ends.append(weights(module))
    assert equal(*ends)
    assert NOTE not in capsys.readouterr().err


def test_the_comparison_of_halves_leaves_no_trace() -> None:
    ends = []
    for number in (0, 2):
        torch.manual_seed(0)
        module = Gives(DEPEND["f1"])
        result = checked(module, max_epochs=2, seed=1, sanity_batches=number)
        ends.append((result.metrics, weights(module), float(torch.rand(())), len(module.seen)))
    assert ends[0][0] == ends[1][0]
    assert equal(ends[0][1], ends[1][1])
    assert ends[0][2:] == ends[1][2:]


class Gathers(Regression):
    """A step that calls a collective by itself, as often on each rank as batches come."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def validation_step(self, batch: Any) -> Any:
        rows = torch.tensor(len(batch[0]))
        torch.distributed.all_reduce(rows)
        return {"rmse": (self.layers(batch[0]) - batch[1]).square().mean().sqrt(), "rows": rows}


def on_two_ranks(number: int) -> tuple[str, float]:
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        trainer = Trainer(max_epochs=1, progress=False, strategy="ddp", timeout="30 seconds")
        metrics = trainer.fit(Gathers(), ROWS, ROWS[:number], batch_size=2).metrics
    return printed.getvalue(), metrics["val_rows"]


def both() -> list[tuple[str, float]]:
    return [on_two_ranks(number) for number in (3, 4)]


def test_ranks_compare_halves_together_or_not_at_all() -> None:
    first, _ = run_ranks(both, 2, timeout=120)
    assert [(text.count(NOTE), rows) for text, rows in first] == [(0, 3), (1, 4)]


class Padded(Regression):
    """Measures tokens, some of which are padding."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any) -> Any:
        scores, kept = self.layers(batch[0])[:, :1] * torch.arange(8.0) - batch[1], batch[2].bool()
        labels = batch[1].gt(0).long().masked_fill(~kept, -100)
        errors = (scores - batch[1]).abs()
        loss = functools.partial(cross_entropy, torch.stack([scores, -scores], 1), labels)
        return {
            "root": lambda: {"rmse": math.sqrt(errors.square().mean().item())},
            "masked": lambda: {"error": (errors * kept).sum() / kept.sum()},
            "a number beside a loss": lambda: {"loss": loss(), "longest": float(errors.numpy().max(1).mean())},
            "spread": lambda: {"spread": errors.std()},
            "constant": lambda: {"loss": loss(), "rate": 0.0123},
            "mean over rows": lambda: {"error": errors.mean()},
        }[self.gives]()


def _padded(gives: str, in_fit: bool, batch_size: int) -> str:
    generator = torch.Generator().manual_seed(2)
    kept = torch.ones(8, 8)
    kept[1::2, 3:] = 0  # the rows of rank 1
    inputs, targets = torch.randn(8, 3, generator=generator), torch.randn(8, 8, generator=generator)
    rows = torch.utils.data.TensorDataset(inputs, targets, kept)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        trainer = Trainer(max_epochs=1, progress=False, strategy="ddp", timeout="30 seconds")
        if in_fit:
            trainer.fit(Padded(gives), rows, rows, batch_size=batch_size)
        else:
            trainer.validate(Padded(gives), rows, batch_size=batch_size)
    return printed.getvalue()


CASES_ON_RANKS = [
    ("root", False, 4, "gives rmse, and it is not known whether"),
    ("masked", False, 2, "'error' as a sum divided by"),
    ("masked", True, 2, "'error' as a sum divided by"),
    ("a number beside a loss", True, 4, "'longest' as a number that was computed outside of torch"),
    ("a number beside a loss", False, 4, "'longest' as a number that was computed outside of torch"),
    ("spread", False, 4, "'spread' as a non-linear function (std) of a mean"),
    ("constant", True, 4, ""),
    ("constant", False, 2, ""),
    ("mean over rows", True, 4, ""),
    ("mean over rows", False, 4, ""),
]
"""What is measured, whether in a fit, the batch size, and the note. Batches of 4 rows are one for each rank."""


def _all_padded() -> list[str]:
    return [_padded(*case) for *case, _ in CASES_ON_RANKS]


def test_what_any_rank_sees_of_a_metric_is_noted_once() -> None:
    first, second = run_ranks(_all_padded, 2, timeout=300)
    for (gives, in_fit, batch_size, note), printed in zip(CASES_ON_RANKS, first, strict=True):
        about = [line for line in printed.splitlines() if line.startswith("note: validation_step")]
        counted = sum(note in line for line in about) if note else 1 + len(about)
        assert counted == 1, (gives, in_fit, batch_size, printed)
    assert not any("note: validation_step" in printed for printed in second)


def _added_in_place(error: torch.Tensor) -> Any:
    total: Any = 0
    for row in error:
        total += -10 * row.square().mean().log10()
    return total


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "root": lambda error: {"mse": error.square().mean(), "rmse": error.square().mean().sqrt()},
    "power": lambda error: {"rmse": error.square().mean() ** 0.5},
    "signal to noise": lambda error: {"psnr": -10 * error.square().mean().log10()},
    "signal to noise, of the inverse": lambda error: {"psnr": 10 * torch.log10(1 / error.square().mean())},
    "half a root": lambda error: {"rmse": 1 - error.square().mean().sqrt() / 2},
    "exponential": lambda error: {"growth": 2 ** error.square().mean()},
    "perplexity": lambda error: {"perplexity": cross_entropy(error.expand(-1, 3), error.sign()[:, 0].long() + 1).exp()},
    "root as a number": lambda error: {"rmse": error.square().mean().sqrt().item()},
    "norm": lambda error: {"error": torch.norm(error)},
    "relative norm": lambda error: {"error": torch.linalg.norm(error) / torch.linalg.norm(error - 1)},
    "relative mean": lambda error: {"r2": 1 - error.square().mean() / error.var(correction=0)},
    "sum of exponentials": lambda error: {"entropy": error.logsumexp((0, 1)) - math.log(error.numel())},
    "product": lambda error: {"product": error.abs().mean() * error.square().mean()},
    "square": lambda error: {"bias": error.mean() * error.mean()},
    "absolute value": lambda error: {"bias": 2 * error.mean().abs()},
    "absolute value of one sign": lambda error: {"bias": (error.mean() - 100).abs()},
    "largest": lambda error: {"largest": error.abs().max(), "loss": error.square().mean()},
    "middle": lambda error: {"middle": 100 * error.abs().median()},
    "root of a positive mean": lambda error: {"rmse": error.square().mean().abs().sqrt()},
    "square of a norm": lambda error: {"mse": torch.norm(error).pow(2) / error.numel()},
    "norm of a constant": lambda error: {"norm": torch.ones(8, 3).norm(), "mse": error.square().mean()},
    "norm times a mean": lambda error: {"scaled": torch.ones(7).norm() * error.square().mean()},
    "mean of norms in a loop": lambda error: {"error": sum(torch.norm(row) for row in error) / len(error)},
    "mean of relative norms in a loop": lambda error: {
        "error": sum(row.norm() / (row - 1).norm() for row in error) / len(error)
    },
    "mean": lambda error: {"mse": error.square().mean(), "loss": error.abs().mean() * 2},
    "weighed": lambda error: {"rmse": error.square().mean().sqrt(), "weight": 1},
    "shares": lambda error: {"accuracy": 0.5, "other": 0 * error.mean() + torch.full((4,), 0.25).mean()},
    "mean of functions in a loop": lambda error: {
        "psnr": sum(-10 * row.square().mean().log10() for row in error) / len(error)
    },
    "mean of functions, in place": lambda error: {"psnr": _added_in_place(error) / len(error)},
    "parameter": lambda error: {"scale": torch.ones(3, 8).square().mean().sqrt(), "mse": error.square().mean()},
    "mean of roots": lambda error: {"distance": error.square().sum(1).sqrt().mean()},
}


WITHOUT = (
    "mean",
    "weighed",
    "mean of roots",
    "mean of norms in a loop",
    "mean of relative norms in a loop",
    "norm of a constant",
    "norm times a mean",
    "absolute value of one sign",
    "square of a norm",
    "mean of functions in a loop",
    "mean of functions, in place",
    "shares",
    "parameter",
)


@pytest.mark.parametrize("gives", FUNCTIONS)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_function_of_a_mean_gets_a_note_in_every_evaluation_of_several_batches(
    gives: str, batch_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Measures(Regression):
        def test_step(self, batch: Any) -> Any:
            return FUNCTIONS[gives](batch[1])

    Trainer(progress=False).test(Measures(), ROWS, batch_size=batch_size)
    what = {"largest": "as the max", "middle": "as the median"}.get(gives, "of a mean")
    noted = f"{what} over the batch, so its mean over batches depends on the batch size" in capsys.readouterr().err
    assert noted == (batch_size == 2 and gives not in WITHOUT)


def _f1(error: torch.Tensor) -> float:
    found, right = (error > 0.2).numpy(), (error.roll(1, 1) > 0.4).numpy()
    return float(2 * (found & right).sum() / (found.sum() + right.sum()))


def _of_sums(found: torch.Tensor, right: torch.Tensor) -> dict[str, float]:
    both, either = int((found & right).sum()), found.sum().item() + right.sum().item()
    return {"f1": 200 * both / either, "precision": both / found.sum().item()}


def _recalls(error: torch.Tensor) -> torch.Tensor:
    found, right = (error > 0.2).flatten().long(), (error.roll(1, 1) > 0.4).flatten().long()
    confusion = torch.bincount(2 * right + found, minlength=4).view(2, 2).float()
    return confusion.diag() / confusion.sum(1).clamp(min=1)


NUMBERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "root": lambda error: {"rmse": math.sqrt(error.square().mean().item())},
    "signal to noise": lambda error: {"psnr": 10 * math.log10(1 / error.square().mean().item())},
    "perplexity": lambda error: {"ppl": math.exp(cross_entropy(error, error[:, 0].gt(0).long()).item())},
    "f1": lambda error: {"f1": _f1(error)},
    "f1 and precision of sums": lambda error: _of_sums(error > 0.2, error.roll(1, 1) > 0.4),
    "by numpy": lambda error: {"rmse": float(numpy.sqrt(numpy.square(error.numpy()).mean()))},
    "beside what is not finite": lambda error: {
        "rmse": math.sqrt(error.square().mean().item()),
        "nan": error.mean() * math.nan,
        "inf": (error.square().mean() / 0).item(),
    },
    "as a tensor": lambda error: {"f1": torch.tensor(_f1(error))},
    "as a tensor of one element": lambda error: {"f1": torch.tensor([_f1(error)]).float()},
    "by numpy, as a tensor": lambda error: {"f1": torch.as_tensor(numpy.float64(_f1(error)))},
    "percent of a tensor": lambda error: {"f1": torch.tensor(_f1(error)) * 100},
    "count": lambda error: {"large": int((error.numpy() > 0.4).sum())},
    "count in a tensor": lambda error: {"large": torch.bincount((error > 0.4).long().flatten(), minlength=2)[1]},
    "quantile": lambda error: {"p90": error.quantile(0.9)},
    "recall of a class": lambda error: {"recall": _recalls(error)[1]},
    "mean of a group": lambda error: {"mae": torch.zeros(2).index_add(0, (error[:, 0] > 0.3).long(), error[:, 1])[1]},
    "correlation": lambda error: {"corr": torch.nn.functional.cosine_similarity(error[:, 0], error[:, 1], dim=0)},
    "root of a column": lambda error: {"rmse": error.square().mean(0).sqrt()[1]},
    "mean": lambda error: {"mae": error.abs().mean().item()},
    "mean of a column": lambda error: {"first": error.abs().mean(0)[0], "last": error.abs().mean(dim=0).tolist()[-1]},
    "mean of a column, by keywords": lambda error: {
        "first": torch.mean(input=error, dim=0)[0],
        "last": torch.sum(input=error, axis=(0,))[-1] / len(error),
        "product": torch.matmul(input=error.T, other=error).sum() * 0,
    },
    "mean of nothing in a batch": lambda error: {
        "mae": error[:, 1][error[:, 0] > 9].mean(),
        "mse": error.square().mean(),
    },
    "share of a column": lambda error: {"first": ((error > 0.2).sum(0) / len(error))[0]},
    "mean of images": lambda error: {"red": error.reshape(len(error), 2, 2, 2).mean((0, 2, 3))[0]},
    "sum of means": lambda error: {"loss": error.abs().mean() + 0.1 * error.square().mean()},
    "loop over rows": lambda error: {"loss": torch.stack([row.abs().mean() for row in error]).mean()},
    "bool": lambda error: {"all": bool((error > -0.5).all()), "any": (error > 1.9).any()},
    "number of rows": lambda error: {"rows": len(error)},
    "one minus a mean": lambda error: {"score": 1 - error.abs().mean().item()},
    "sum over a number": lambda error: {"mae": error.abs().sum().item() / error.numel(), "percent": 25.0},
    "share": lambda error: {"accuracy": float(numpy.mean(error.numpy()[:, 0] > 0)), "loss": error.abs().mean()},
    "share as a tensor": lambda error: {"accuracy": torch.tensor(numpy.mean(error.numpy()[:, 0] > 0))},
    "share that is 0 in a batch": lambda error: {"accuracy": float(numpy.mean(error.numpy()[:, 0] > 1.9))},
    "constant as a tensor": lambda error: {"rate": torch.tensor(0.0123)},
    "percentage": lambda error: {"accuracy": 100 * (error[:, 0] > 0).float().mean().item()},
    "weighed": lambda error: {"rmse": math.sqrt(error.square().mean().item()), "weight": len(error)},
    "constant": lambda error: {"rate": 0.0123},
}


@pytest.mark.parametrize("gives", NUMBERS)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_number_that_torch_did_not_compute_gets_a_note_outside_of_a_fit(
    gives: str, batch_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Measures(Regression):
        def test_step(self, batch: Any) -> Any:
            return NUMBERS[gives](batch[1] * torch.linspace(-1, 1, 8) + torch.arange(8.0).cos())

    Trainer(progress=False).test(Measures(), ROWS, batch_size=batch_size)
    noted = capsys.readouterr().err.count(", and it is not known whether the mean over batches")
    assert noted == (batch_size == 3 and list(NUMBERS).index(gives) < list(NUMBERS).index("mean"))


def test_a_note_about_one_metric_beside_a_cross_entropy_hides_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    class Measures(Regression):
        def test_step(self, batch: Any) -> Any:
            error = batch[1] * torch.linspace(-1, 1, 8) + torch.arange(8.0).cos()
            loss = cross_entropy(error, error[:, 0].gt(0).long())
            both = (error > 0.4).sum().item()
            return {"loss": loss, "share": both / (error > 0.2).sum().item(), "perplexity": math.exp(loss.item())}

    Trainer(progress=False).test(Measures(), ROWS, batch_size=3)
    printed = capsys.readouterr().err
    assert "gives 'share' as a sum divided by" in printed
    assert "perplexity, and it is not known whether" in printed


class Counts(Regression):
    """Measures in Python what the check before training cannot compare: 0 before training, or in some batches only."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives, self.trained = gives, False

    def on_step(self) -> None:
        self.trained = True

    def validation_step(self, batch: Any) -> Any:
        error = batch[1] * torch.linspace(-1, 1, 8) + torch.arange(8.0).cos()
        parts = error[error[:, 0] > 0.3].numpy()
        if self.gives == "of some rows" and len(parts):
            self.log("part", float(abs(parts).mean()))
        return {
            "f1, 0 before training": lambda: {"f1": _f1(error) * self.trained},
            "f1": lambda: {"f1": _f1(error)},
            "of some rows": dict,
            "mean by numpy": lambda: {"mae": float(abs(error.numpy()).mean())},
            "share that is 0 before training": lambda: {
                "share": float((error[:, 0] > 0.3).numpy().mean()) * self.trained
            },
        }[self.gives]()


@pytest.mark.parametrize(
    ("gives", "strategy", "is_noted"),
    [
        ("f1, 0 before training", "single", True),
        ("of some rows", "single", True),
        ("f1", "fsdp", True),
        ("mean by numpy", "single", False),
        ("share that is 0 before training", "single", False),
    ],
)
def test_a_number_that_halves_did_not_show_gets_a_note_in_a_fit(
    gives: str, strategy: str, is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (4, 8):  # the second fit resumes
        trainer = Trainer(max_steps=steps, validate_every=2, progress=False, strategy=strategy, run_dir=tmp_path)
        trainer.fit(Counts(gives), ROWS, ROWS, batch_size=3)
        printed = capsys.readouterr().err
        noted = "and it is not known whether the mean" in printed
        assert noted == (is_noted and steps == 4), printed


def test_a_small_difference_of_the_halves_shows_no_mean(capsys: pytest.CaptureFixture[str]) -> None:
    class Nearly(Regression):
        def validation_step(self, batch: Any) -> Any:
            error = 10 + batch[1].numpy()
            return {"rmse": float(numpy.sqrt(numpy.square(error).mean())), "mae": float(numpy.abs(error).mean())}

    Trainer(max_epochs=1, progress=False).fit(Nearly(), ROWS, ROWS, batch_size=4)
    printed = capsys.readouterr().err
    assert NOTE not in printed
    assert "validation_step gives rmse, and it is not known whether" in printed
