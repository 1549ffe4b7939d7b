"""A killed fit resumes bit for bit, with the state of the module, its callbacks and its data module."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import fabricate_lightning
import lightning
import pytest
import torch
from fabricate_lightning import adapt
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_shapes import Classifier, loader, rows
from test_manual import GAN
from torch.utils.data import DataLoader

import fabricate
from fabricate import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


class Stateful(Classifier):
    """Dropout, a schedule by a metric, attributes that change, and what it adds to a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.3))
        self.smoothed = 0.0
        self.recent: list[float] = []
        self.table = {"best": torch.zeros(())}
        self.by_batch: dict[int, list[float]] = defaultdict(list)
        self.window: deque[float] = deque(maxlen=3)
        self.hidden: tuple[torch.Tensor, int] | None = None
        self.added = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.smoothed = 0.9 * self.smoothed + 0.1 * float(loss)
        self.recent = [*self.recent[-3:], self.smoothed]
        self.by_batch[batch_idx].append(self.smoothed)
        self.window.append(self.smoothed)
        self.hidden = loss.detach(), batch_idx
        self.log("smoothed", self.smoothed, on_step=False, on_epoch=True)
        return loss + 0 * self.smoothed

    def on_train_epoch_start(self) -> None:
        self.table["best"] = self.table["best"] + torch.rand(())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = {"step": self.global_step, "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert torch.equal(checkpoint["added"]["tensor"], torch.ones(2))
        self.added = checkpoint["added"]["step"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "smoothed"}


def data() -> tuple[Any, ...]:
    return DataLoader(rows(), batch_size=8, shuffle=True), loader(number=20, seed=1)


def _fit(module: Any, run_dir: Path, ckpt_path: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(1)
    trainer = fabricate_lightning.Trainer(
        **{"max_epochs": 4, "logger": False, "enable_progress_bar": False, "default_root_dir": run_dir, **arguments},
        callbacks=[EarlyStopping("val_loss", patience=9)],
    )
    trainer.fit(module, *data(), ckpt_path=ckpt_path)
    return trainer


class Killed(Exception):
    pass


def _interrupted(kind: Any, run_dir: Path, at: int) -> Any:
    """A fit that ends with an error in the update after step `at`, and one that continues from its last checkpoint."""

    class Dies(kind):  # type: ignore[misc]
        def training_step(self, *arguments: Any) -> Any:
            if self.global_step == at:
                raise Killed
            return super().training_step(*arguments)

    torch.manual_seed(0)
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(run_dir, every_n_train_steps=2, save_top_k=-1)
    torch.manual_seed(1)
    trainer = fabricate_lightning.Trainer(
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        callbacks=[EarlyStopping("val_loss", patience=9), saves],
    )
    torch.manual_seed(0)
    module = Dies()
    torch.manual_seed(1)
    with pytest.raises(Killed):
        trainer.fit(module, *data())
    assert Path(saves.last_model_path).name == f"step-{at - at % 2:08d}"
    return saves.last_model_path


@pytest.mark.parametrize("at", [5, 9, 14])
def test_a_killed_fit_goes_on_to_the_same_bits(tmp_path: Path, at: int) -> None:
    torch.manual_seed(0)
    whole = Stateful()
    whole_trainer = _fit(whole, tmp_path / "whole")
    path = _interrupted(Stateful, tmp_path / "killed", at)
    torch.manual_seed(0)
    resumed = Stateful()
    went_on = _fit(resumed, tmp_path / "resumed", ckpt_path=path)
    assert resumed.added == at - at % 2
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert (resumed.smoothed, resumed.recent, resumed.losses) == (whole.smoothed, whole.recent, whole.losses)
    assert torch.equal(resumed.table["best"], whole.table["best"])
    assert (resumed.by_batch, resumed.window, resumed.hidden) == (whole.by_batch, whole.window, whole.hidden)
    assert (resumed.by_batch.default_factory, resumed.window.maxlen) == (list, 3)
    assert {n: float(v) for n, v in went_on.callback_metrics.items()} == {
        n: float(v) for n, v in whole_trainer.callback_metrics.items()
    }
    assert went_on.callbacks[0].state_dict().keys() == whole_trainer.callbacks[0].state_dict().keys()
    assert float(went_on.callbacks[0].best_score) == float(whole_trainer.callbacks[0].best_score)
    rates = [t.optimizers[0].param_groups[0]["lr"] for t in (whole_trainer, went_on)]
    assert rates[0] == rates[1]


def test_manual_optimization_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    ends = []
    for run_dir, steps in (("whole", 14), ("parts", 9), ("parts", 14)):
        torch.manual_seed(0)
        module = GAN()
        fabricate.Trainer(max_steps=steps, run_dir=tmp_path / run_dir, progress=False, seed=3).fit(
            adapt(module), data()[0]
        )
        ends.append(module)
    for name, value in ends[0].state_dict().items():
        assert torch.equal(ends[2].state_dict()[name], value), name


def test_ckpt_path_last_resumes_and_no_ckpt_path_starts_anew(tmp_path: Path) -> None:
    first = _fit(Classifier(), tmp_path, max_epochs=1)
    assert first.global_step == 7
    on = _fit(Classifier(), tmp_path, max_epochs=2, ckpt_path="last")
    assert on.global_step == 14
    assert len(on.lightning_module.losses) == 14
    anew = _fit(Classifier(), tmp_path, max_epochs=1)
    assert anew.global_step == 7
    assert (tmp_path / "before-1").exists()
    with pytest.raises(ConfigurationError, match="this run has no directory to write to; give"):
        _fit(Classifier(), None, ckpt_path="last")  # type: ignore[arg-type]


def test_a_checkpoint_callback_that_was_used_before_leads_to_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ModelCheckpoint(dirpath=str(tmp_path / "run"), save_last=True)
    for epochs in (1, 2):
        trainer = fabricate_lightning.Trainer(
            max_epochs=epochs, callbacks=[callback], logger=False, enable_progress_bar=False, accelerator="cpu"
        )
        trainer.fit(Classifier(), loader(), ckpt_path="last")
        assert trainer.global_step == 7 * epochs
        text = f"fit(ckpt_path='last'): {tmp_path / 'run'} has no checkpoint, so the fit begins at step 0"
        assert (text in capsys.readouterr().out) is (epochs == 1)
        assert len(trainer.lightning_module.losses) == 7 * epochs  # the list is part of the state
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_resumed_model_checkpoint_knows_the_best_score_before_its_checkpoint(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    began: list[Any] = []

    class Reads(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            began.append(trainer.checkpoint_callback.best_model_score)

    for epochs in (2, 3):
        callback = ModelCheckpoint(dirpath=str(tmp_path / "run"), monitor="val_loss")
        fabricate_lightning.Trainer(
            max_epochs=epochs, callbacks=[callback, Reads()], logger=False, enable_progress_bar=False, accelerator="cpu"
        ).fit(Classifier(), loader(), loader(), ckpt_path="last")
    assert began[0] is None
    assert began[1] > 0
    assert not [each for each in recwarn if "dirpath has changed" in str(each.message)]


class Curriculum(lightning.LightningDataModule):
    """Counts the epochs that it gave data for, and keeps the count in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs, self.calls = 0, []

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {str.__str__(stage)}")

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        self.calls.append("val_dataloader")
        return loader(number=20, seed=1)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "rows": torch.arange(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert torch.equal(state_dict["rows"], torch.arange(3))
        self.calls.append("load_state_dict")
        self.epochs = state_dict["epochs"]


class CountsInData(Classifier):
    def on_train_epoch_start(self) -> None:
        self.trainer.datamodule.epochs += 1


def test_ckpt_path_last_loads_the_state_of_the_data_module(tmp_path: Path) -> None:
    ends = []
    for epochs, path in ((1, None), (3, "last")):
        trainer = fabricate_lightning.Trainer(
            max_epochs=epochs, logger=False, enable_progress_bar=False, default_root_dir=tmp_path
        )
        trainer.fit(CountsInData(), datamodule=(datamodule := Curriculum()), ckpt_path=path)
        ends.append(datamodule)
    assert [each.epochs for each in ends] == [1, 3]
    assert "load_state_dict" not in ends[0].calls
    assert ends[1].calls.index("setup fit") < ends[1].calls.index("load_state_dict")
    assert ends[1].calls.count("load_state_dict") == 1


def test_a_second_fit_of_one_trainer_says_that_it_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    trainer = fabricate_lightning.Trainer(max_epochs=1, logger=False, enable_progress_bar=False)
    for _ in range(2):
        trainer.fit(Classifier(), loader())
        said.append("this Trainer has run a fit before" in capsys.readouterr().out)
    assert said == [False, True]
    assert trainer.global_step == 7


def test_hooks_of_checkpoints_see_what_hooks_added() -> None:
    from fabricate_lightning.saved import Checkpoint

    with pytest.raises(
        ConfigurationError, match=r"checkpoint\['state_dict'\]: this key does not exist. fabricate saves weights,"
    ):
        Checkpoint({"epoch": 1})["state_dict"]
