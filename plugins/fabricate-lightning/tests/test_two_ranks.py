"""Two ranks: the same training as Lightning's DDP on two ranks, with logged values reduced over both."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from fabricate_lightning import Trainer
from lightning_shapes import Classifier, by_fabricate, by_lightning, regression_loss, rows
from safetensors.torch import load_file
from test_data import Data
from test_manual import GAN, Accumulates
from torch.utils.data import DataLoader, DistributedSampler

from fabricate.testing import run_ranks

TOLERANCE = 1e-5


class Synchronised(Classifier):
    """Without batch statistics, which are each rank's own; logs with sync_dist, and gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.nn.LayerNorm(8)
        self.gathered: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = regression_loss(self, batch)
        self.losses.append(float(loss))
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("of_step", float(10 * self.global_rank + batch_idx), sync_dist=True)
        self.log("sum", float(self.global_rank), sync_dist=True, reduce_fx="sum")
        return loss

    def on_train_epoch_end(self) -> None:
        together = self.all_gather(torch.tensor(float(self.global_rank)))
        self.gathered.append(float(together.sum()))
        self.log("rank", float(self.global_rank), sync_dist=True)
        decided = self.trainer.strategy.reduce_boolean_decision(self.global_rank == 0, all=False)
        assert decided
        assert self.trainer.strategy.broadcast({"rank": self.global_rank}) == {"rank": 0}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.val_accuracy(scores, batch[1])
        self.log("val_loss", regression_loss(self, batch), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)


class Evaluated(Synchronised):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", regression_loss(self, batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores: torch.Tensor = self(batch[0])
        return scores


class AccumulatesHere(Accumulates):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.nn.LayerNorm(8)


class OnRankZero(Data):
    def prepare_data(self) -> None:
        with Path("prepared").open("a") as file:
            file.write(os.environ["RANK"])


KINDS: dict[str, Any] = {"automatic": Synchronised, "manual": GAN, "accumulating": AccumulatesHere}


def _trained(kind: str, by: str) -> Any:
    torch.manual_seed(0)
    module = KINDS[kind]()
    data = [DataLoader(rows(48), batch_size=6), DataLoader(rows(24, seed=1), batch_size=6)]
    arguments: dict[str, Any] = {"strategy": "ddp"}
    if by == "lightning":
        os.environ["NODE_RANK"] = "0"
        # Its own sampler would shuffle, whatever the loader says.
        samplers = [DistributedSampler(loader.dataset, 2, int(os.environ["RANK"]), shuffle=False) for loader in data]
        data = [DataLoader(loader.dataset, batch_size=6, sampler=s) for loader, s in zip(data, samplers, strict=True)]
        arguments |= {"use_distributed_sampler": False, "devices": 2}
        if kind == "manual":  # each of the two backwards leaves parameters unused, which DDP refuses
            arguments["strategy"] = "ddp_find_unused_parameters_true"
        trained = by_lightning(module, *(data if kind == "automatic" else data[:1]), **arguments)
    else:
        trained = by_fabricate(module, *(data if kind == "automatic" else data[:1]), **arguments)
    weights = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    return trained.metrics, weights, getattr(module, "gathered", [])


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_two_ranks_of_lightning(kind: str) -> None:
    theirs = run_ranks(_trained, 2, kind, "lightning")
    ours = run_ranks(_trained, 2, kind, "fabricate")
    for (_, one, gathered), (_, other, our_gathered) in zip(theirs, ours, strict=True):
        assert max(abs(one[name] - other[name]).max() for name in one) < TOLERANCE
        assert our_gathered == gathered
    if kind == "automatic":
        assert ours[0][0] == ours[1][0] == pytest.approx(theirs[0][0], abs=TOLERANCE)


def _sharded(strategy: str, directory: str) -> Any:
    torch.manual_seed(0)
    module = Synchronised()
    data = DataLoader(rows(48), batch_size=6), DataLoader(rows(24, seed=1), batch_size=6)
    names = set(module.state_dict())
    trained = by_fabricate(module, *data, strategy=strategy, default_root_dir=directory, enable_checkpointing=True)
    exported = load_file(Path(directory) / "model" / "model.safetensors")
    assert set(exported) == names
    return trained.metrics, {name: value.numpy() for name, value in exported.items()}


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_shards_train_as_replicas_do_and_export_the_modules_names(strategy: str, tmp_path: Path) -> None:
    ((metrics, weights), _) = run_ranks(_sharded, 2, "ddp", str(tmp_path / "ddp"))
    ((other, same), _) = run_ranks(_sharded, 2, strategy, str(tmp_path / "shards"))
    assert other == pytest.approx(metrics, abs=TOLERANCE)
    assert max(abs(weights[name] - same[name]).max() for name in weights) < TOLERANCE


def _evaluated_after(strategy: str, directory: str) -> Any:
    torch.manual_seed(0)
    module = Evaluated()
    train, val = DataLoader(rows(48), batch_size=6), DataLoader(rows(24, seed=1), batch_size=6)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
    )
    trainer.fit(module, train, val)
    (validated,) = trainer.validate(dataloaders=val)
    (tested,) = trainer.test(module, val)
    predicted = torch.cat(trainer.predict(dataloaders=val) or [])
    trainer.fit(module, train, val)
    return validated, tested, predicted.tolist(), trainer.validate(module, val)[0]


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3"])
def test_one_trainer_evaluates_and_trains_again_after_a_fit_that_sharded(strategy: str, tmp_path: Path) -> None:
    whole = run_ranks(_evaluated_after, 2, "ddp", str(tmp_path / "ddp"))
    sharded = run_ranks(_evaluated_after, 2, strategy, str(tmp_path / "shards"))
    for (validated, tested, predicted, again), (*others, predicted_too, again_too) in zip(whole, sharded, strict=True):
        assert [pytest.approx(validated, abs=TOLERANCE), pytest.approx(tested, abs=TOLERANCE)] == others
        torch.testing.assert_close(torch.tensor(predicted), torch.tensor(predicted_too), rtol=0, atol=TOLERANCE)
        assert again_too == pytest.approx(again, abs=TOLERANCE)


def _ragged() -> Any:
    """23 rows of validation in batches of 4 on two ranks: the last batch of a rank may be missing."""
    torch.manual_seed(0)
    module = Synchronised()
    data = DataLoader(rows(44), batch_size=4), DataLoader(rows(21, seed=1), batch_size=4)
    trained = by_fabricate(module, *data, max_epochs=2)
    with torch.no_grad():
        x, y = rows(21, seed=1).tensors
        correct = (module.eval()(x).argmax(1) == y).float().mean()
    return trained.metrics, float(correct)


def test_metrics_are_over_exactly_the_rows_of_all_ranks() -> None:
    (first, correct), (second, _) = run_ranks(_ragged, 2)
    assert first == second
    assert first["val_accuracy"] == pytest.approx(correct, abs=1e-6)
    assert first["rank"] == 0.5


def _prepared(directory: str) -> str:
    os.chdir(directory)
    lightning.seed_everything(0)
    by_fabricate(Classifier(), OnRankZero(), max_epochs=1, logger=True, enable_checkpointing=True)
    return "".join(sorted(str(path) for path in Path().glob("lightning_logs/*/checkpoints/*")))


def test_data_is_prepared_once_and_ranks_write_into_one_folder(tmp_path: Path) -> None:
    paths = run_ranks(_prepared, 2, str(tmp_path))
    assert (tmp_path / "prepared").read_text() == "0"
    assert paths == ["lightning_logs/version_0/checkpoints/step-00000004"] * 2


def _resumed(directory: str) -> Any:
    ends = []
    for folder, epochs in (("whole", 3), ("parts", 2), ("parts", 3)):
        torch.manual_seed(0)
        module = Synchronised()
        loader = DataLoader(rows(44), batch_size=4, shuffle=True)
        trained = by_fabricate(
            module,
            loader,
            DataLoader(rows(21, seed=1), batch_size=4),
            max_steps=int(epochs * 5.5),
            max_epochs=None,
            default_root_dir=f"{directory}/{folder}",
            enable_checkpointing=True,
            ckpt_path="last",
        )
        ends.append((trained.metrics, [value.tolist() for value in module.state_dict().values()]))
    return ends[0] == ends[2]


def test_two_ranks_go_on_to_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(_resumed, 2, str(tmp_path)) == [True, True]


class Local(Synchronised):
    """Logs a value of its own on each rank, without sync_dist, as in most modules."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("of_this_rank", float(self.global_rank))
        return regression_loss(self, batch)


def _noted(directory: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        data = DataLoader(rows(24), batch_size=6), DataLoader(rows(12, seed=1), batch_size=6)
        by_fabricate(Local(), *data, default_root_dir=directory, max_epochs=1, enable_checkpointing=True)
    return printed.getvalue()


def test_a_metric_of_one_rank_is_no_state_that_differs(tmp_path: Path) -> None:
    for text in run_ranks(_noted, 2, str(tmp_path)):
        assert "stores another value" not in text
