"""Parameters without a dimension, such as CLIP's `logit_scale`, empty ones, complex ones, as of a Fourier layer, and sparse buffers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, FabricateError, Trainer, TrainModule
from fabricate.testing import run_ranks

ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))


class Scaled(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.fixed = torch.nn.Parameter(torch.tensor(0.3), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0, 6), requires_grad=False)  # an export does not write its bytes
        self.norms: list[float] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch)) * self.scale.exp()
        return (batch + self.fixed).square().mean()

    def on_step(self, grad_norm: torch.Tensor) -> None:
        self.norms.append(float(grad_norm))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _trained(
    strategy: str, run_dir: str, accumulation: int, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three updates, and three more in a run that resumes; the norms and the whole weights."""
    size = 12 // accumulation // (1 if strategy == "single" else 2)
    norms: list[float] = []
    for steps in (3, 6):
        torch.manual_seed(0)
        module = Scaled().to(dtype)
        weights: dict[str, torch.Tensor] = {}
        options: dict[str, Any] = {
            "gradient_accumulation_steps": accumulation,
            "max_grad_norm": 0.1,
            "run_dir": run_dir,
        }
        trainer = Trainer(strategy=strategy, precision="fp32", max_steps=steps, seed=1, progress=False, **options)

        def gather(
            gathered: dict[str, torch.Tensor] = weights, module: Scaled = module, trainer: Trainer = trainer
        ) -> None:
            gathered |= {name: trainer.strategy.gather(p).clone() for name, p in module.named_parameters()}

        type(module).on_fit_end = lambda self: gather()  # type: ignore[method-assign]
        trainer.fit(module, ROWS.to(dtype), batch_size=size, shuffle=False)
        norms += module.norms
    return norms, weights


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:accumulate=whole"])
def test_a_parameter_without_a_dimension_trains_as_in_one_process_and_is_resumed(strategy: str, tmp_path: Path) -> None:
    norms, weights = _trained("single", str(tmp_path / "single"), 1)
    for norms_of_rank, ended in run_ranks(_trained, 2, strategy, str(tmp_path / "ranks"), 2):
        assert norms_of_rank == pytest.approx(norms, rel=1e-4)
        assert ended.keys() == weights.keys()
        for name, wanted in weights.items():
            assert ended[name].shape == wanted.shape
            torch.testing.assert_close(ended[name], wanted, rtol=1e-4, atol=1e-5)


def test_fsdp_averages_float64_gradients_without_a_dimension_in_float64(tmp_path: Path) -> None:
    norms, weights = _trained("single", str(tmp_path / "single"), 1, torch.float64)
    for norms_of_rank, ended in run_ranks(_trained, 2, "fsdp", str(tmp_path / "ranks"), 2, torch.float64):
        assert norms_of_rank == pytest.approx(norms, rel=1e-13)
        torch.testing.assert_close(ended["scale"], weights["scale"], rtol=1e-13, atol=1e-13)


def _refused(strategy: str, kind: type[TrainModule]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=strategy, max_steps=1, progress=False).fit(kind(), ROWS, batch_size=2)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_deepspeed_refuses_parameters_without_a_dimension_by_name(strategy: str) -> None:
    for text in run_ranks(_refused, 2, strategy, Scaled):
        assert (
            "DeepSpeed does not support parameters with zero dimensions: scale, fixed; give each the shape (1,)" in text
        )


class Fourier(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 1)
        self.filter = torch.nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(batch) * self.filter, n=6)
        return (self.linear(filtered) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _of_complex(strategy: str, batch_size: int) -> tuple[torch.Tensor, str, list[str]]:
    """The weights after a fit, its error, and its warnings about complex values."""
    torch.manual_seed(0)
    module, error = Fourier(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer = Trainer(strategy=strategy, max_epochs=2, seed=0, progress=False)
            trainer.fit(module, ROWS, batch_size=batch_size, shuffle=False)
        except FabricateError as exc:
            error = str(exc)
    return module.filter.detach().clone(), error, [str(w.message) for w in caught if "omplex" in str(w.message)]


def test_complex_parameters_train_under_ddp_as_in_one_process_without_a_warning() -> None:
    wanted, _, _ = _of_complex("single", 8)
    for weights, error, warned in run_ranks(_of_complex, 2, "ddp", 4):
        torch.testing.assert_close(weights, wanted)
        assert (error, warned) == ("", [])


def test_deepspeed_refuses_complex_parameters_and_names_a_strategy() -> None:
    for _, error, _ in run_ranks(_of_complex, 2, "zero2", 4):
        assert error.endswith("DeepSpeed trains torch.complex64; use strategy='ddp'")


class Graph(TrainModule):
    """Multiplies with the adjacency of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 1)
        self.register_buffer("adjacency", torch.eye(6).to_sparse(), persistent=False)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        adjacency: torch.Tensor = self.get_buffer("adjacency")
        loss: torch.Tensor = (self.linear((adjacency @ batch.T).T) - 1).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sparse_buffers_are_refused_on_several_ranks(strategy: str) -> None:
    for text in run_ranks(_refused, 2, strategy, Graph):
        assert (
            "messages between ranks cannot take sparse buffers: adjacency. Register the indices and the values" in text
        )


def test_sparse_buffers_that_a_checkpoint_would_hold_are_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = Trainer(max_steps=1, run_dir=tmp_path / "run", progress=False)
    with pytest.raises(ConfigurationError, match="a checkpoint cannot take sparse buffers: adjacency"):
        trainer.fit(Graph(), ROWS, batch_size=2)
    assert Trainer(max_steps=1, progress=False).fit(Graph(), ROWS, batch_size=2).steps == 1


class Wide(TrainModule):
    """A sparse embedding, and a buffer of its caller."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 1, sparse=True)
        self.register_buffer("constant", buffer)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.embedding(torch.tensor([0, 1])) - self.get_buffer("constant").real.mean()).mean()
        return loss.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.parameters(), lr=0.1)


@pytest.mark.parametrize("clipping", ["max_grad_norm", "max_grad_value"])
def test_clipping_of_sparse_gradients_is_refused_before_the_first_step(clipping: str) -> None:
    trainer = Trainer(max_steps=1, progress=False, **{clipping: 1.0})
    with pytest.raises(ConfigurationError, match=f"{clipping}=1.0: embedding has sparse=True"):
        trainer.fit(Wide(torch.ones(2)), ROWS, batch_size=2)


def test_a_dtype_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module = Wide(torch.ones(2, dtype=torch.complex128))
    with pytest.raises(
        ConfigurationError, match=r"constant has the dtype torch\.complex128, which a checkpoint cannot"
    ):
        Trainer(max_steps=1, run_dir=tmp_path / "run", progress=False).fit(module, ROWS, batch_size=2)
    assert Trainer(max_steps=1, progress=False).fit(module, ROWS, batch_size=2).steps == 1


def _of_expanded(run_dir: Path | None) -> int:
    for steps in (1, 2):
        trainer = Trainer(max_steps=steps, run_dir=run_dir, progress=False)
        reached = trainer.fit(Wide(torch.ones(1).expand(5)), ROWS, batch_size=1).steps
    return reached


def test_a_buffer_made_by_expand_is_saved_and_sent(tmp_path: Path) -> None:
    assert _of_expanded(tmp_path) == 2
    assert run_ranks(_of_expanded, 2, None) == [2, 2]
