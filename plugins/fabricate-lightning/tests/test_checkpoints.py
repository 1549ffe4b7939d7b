"""Weights of a checkpoint in an evaluation and in `load_from_checkpoint`: what comes with them, and what messages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fabricate_lightning
import lightning
import pytest
import torch
from fabricate_lightning import adapt, load_from_checkpoint
from lightning_shapes import Classifier, by_fabricate, by_lightning, loader

import fabricate
from fabricate import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")


class Options:
    """What JSON does not hold."""


class HoldsOptions(Classifier):
    """Hyper-parameters that cannot be recorded, and an attribute that changes; no hook of checkpoints."""

    def __init__(self, options: Any, kind: Any = torch.nn.Tanh, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", float(len(batch[0])), reduce_fx="sum")


def _saved(module: Any, run_dir: Path, **arguments: Any) -> tuple[Any, str]:
    trained = by_fabricate(
        module,
        loader(),
        loader(number=20),
        default_root_dir=run_dir,
        enable_checkpointing=True,
        max_epochs=1,
        **arguments,
    )
    return trained, trained.trainer.checkpoint_callback.last_model_path


def test_messages_about_what_cannot_be_recorded_name_the_users_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, path = _saved(HoldsOptions(Options()), tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_from_checkpoint(HoldsOptions, path, options=Options())
    assert str(error.value) == (
        f"load_from_checkpoint({path!r}): the constructor arguments kind of HoldsOptions could not be recorded; pass them as well: "
        "load_from_checkpoint(..., kind=...)"
    )
    loaded = load_from_checkpoint(HoldsOptions, path, options=Options(), kind=torch.nn.ReLU)
    assert (type(loaded), loaded.hparams.lr) == (HoldsOptions, 0.05)
    assert torch.equal(loaded.net[0].weight, trained.module.net[0].weight)
    trained.trainer.test(HoldsOptions(Options()), loader(), ckpt_path=path)
    trained.trainer.test(trained.module, loader(), ckpt_path="last")
    captured = capsys.readouterr()
    for text in (captured.out, captured.err, str(error.value)):
        assert not [word for word in ("on_save", "on_load_weights", "Loaded", "Adapted", "Into") if word in text], text


class Vocabulary(Classifier):
    """Adds to a checkpoint what belongs to its weights."""

    words: Any = None
    came: Any = None

    def test_step(self, batch: Any, batch_idx: int) -> None:
        assert self.words == ["a", "b"]

    def on_train_start(self) -> None:
        self.words = ["a", "b"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = self.words

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.words, self.came = checkpoint["words"], (checkpoint["epoch"], checkpoint["global_step"])


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_a_module_added_to_a_checkpoint_comes_with_its_weights_as_in_lightning(
    tmp_path: Path, weights_only: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    theirs = by_lightning(Vocabulary(), loader(), max_epochs=1)
    theirs.trainer.save_checkpoint(tmp_path / "theirs.ckpt", weights_only=weights_only)
    first = Vocabulary.load_from_checkpoint(tmp_path / "theirs.ckpt")
    saves = ModelCheckpoint(tmp_path / "ours", save_weights_only=weights_only)
    _, path = _saved(Vocabulary(), tmp_path, callbacks=[saves])
    second = load_from_checkpoint(Vocabulary, path)
    assert second.words == first.words == ["a", "b"]
    assert second.came == (0, 7)
    trainers = (
        lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False),
        fabricate_lightning.Trainer(logger=False, enable_progress_bar=False),
    )
    for trainer, checkpoint in zip(trainers, (tmp_path / "theirs.ckpt", path), strict=True):
        trainer.test(module := Vocabulary(), loader(), ckpt_path=checkpoint)
        assert module.words == ["a", "b"]
    captured = capsys.readouterr()
    assert "on_save put values" not in captured.out + captured.err


def test_the_best_weights_at_the_end_of_a_fit_come_without_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = {"last": 1, "best": 1, "metric": "val_loss", "mode": "min"}
    trainer = fabricate.Trainer(max_epochs=1, run_dir=tmp_path, progress=False, keep=keep, load_best=True)
    trainer.fit(adapt(HoldsOptions(Options())), loader(), loader(number=20))
    captured = capsys.readouterr()
    assert "the weights are those of" in captured.out
    assert "on_save" not in captured.out + captured.err
