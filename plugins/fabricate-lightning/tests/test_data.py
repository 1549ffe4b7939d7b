"""Data: DataModules, loaders of the module, transfer hooks, several sets; validate, test and predict."""

from __future__ import annotations

from typing import Any

import fabricate_lightning
import lightning
import pytest
import torch
from fabricate_lightning import adapt
from lightning_shapes import Classifier, apart, both, by_fabricate, loader, rows
from torch.utils.data import DataLoader, IterableDataset

import fabricate
from fabricate import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


class Data(lightning.LightningDataModule):
    """Every method of a data module; `calls` notes them."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {str.__str__(stage)} {self.trainer.world_size}")
        self.train, self.val = rows(), rows(20, seed=1)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {str.__str__(stage)}")

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.hparams.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> Any:
        return [self.val_dataloader(), self.train_dataloader()]

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()


class Evaluated(Classifier):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("test_rows", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"label": self(batch[0]).argmax(1)}

    def on_train_start(self) -> None:
        assert self.trainer.datamodule.hparams.batch_size == self.trainer.train_dataloader.batch_size


def test_a_data_module_is_used_as_by_lightning() -> None:
    modules = []

    def data() -> tuple[Any, ...]:
        modules.append(Data())
        return (modules[-1],)

    theirs, ours = both(Evaluated, data, max_epochs=2)
    assert apart(theirs, ours) == 0
    results = [
        run.trainer.test(run.module, datamodule=dm, verbose=False)
        for run, dm in zip((theirs, ours), modules, strict=True)
    ]
    assert results[0] == results[1]
    assert results[1] == [{"test_rows/dataloader_idx_0": 20.0}, {"test_rows/dataloader_idx_1": 52.0}]
    predicted = [
        run.trainer.predict(run.module, datamodule=dm) for run, dm in zip((theirs, ours), modules, strict=True)
    ]
    for one, other in zip(*predicted, strict=True):
        assert torch.equal(one["label"], other["label"])
    assert modules[0].calls == modules[1].calls
    validated = [
        run.trainer.validate(run.module, datamodule=dm, verbose=False)
        for run, dm in zip((theirs, ours), modules, strict=True)
    ]
    assert validated[0] == [pytest.approx(validated[1][0], abs=1e-6)]


def test_fast_dev_run_limits_every_stage_as_in_lightning() -> None:
    sums, lengths = [], []
    for run in both(Evaluated, lambda: (Data(batch_size=4),), fast_dev_run=2):
        sums.append(run.trainer.test(run.module, datamodule=Data(batch_size=4), verbose=False))
        lengths.append(len(run.trainer.predict(run.module, datamodule=Data(batch_size=4))))
    assert sums[0] == sums[1] == [{"test_rows/dataloader_idx_0": 8.0}, {"test_rows/dataloader_idx_1": 8.0}]
    assert lengths == [2, 2]


def test_fabricates_own_trainer_takes_a_data_module() -> None:
    datamodule = Data()
    module = Classifier()
    result = fabricate.Trainer(max_epochs=1, progress=False).fit(adapt(module), datamodule)
    assert (result.steps, datamodule.calls) == (7, ["prepare_data", "setup fit 1", "teardown fit"])
    metrics = fabricate.Trainer(progress=False).validate(adapt(module, datamodule=datamodule))
    assert set(metrics) == {"val_loss", "val/accuracy"}


class BringsLoaders(Classifier):
    def train_dataloader(self) -> Any:
        return loader(batch_size=self.trainer.max_epochs * 4)

    def val_dataloader(self) -> Any:
        return loader(number=20)


def test_a_module_brings_its_own_loaders() -> None:
    assert apart(*both(BringsLoaders, tuple, max_epochs=2)) == 0


class Transfers(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [part.to(device) for part in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * (2 if self.trainer.training else 3), batch[1]


def test_hooks_change_a_batch_on_its_way() -> None:
    theirs, ours = both(Transfers, lambda: (loader(), loader(number=20)))
    assert apart(theirs, ours) == 0
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)


class Halves(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] / 2, batch[1]


def test_a_data_module_changes_a_batch_on_its_way() -> None:
    assert apart(*both(Classifier, lambda: (Halves(),))) == 0


class Several(Classifier):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("mean", batch[0].mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def _before(self: Any, batch: Any, dataloader_idx: int) -> Any:
    return batch[0] + 1 + dataloader_idx, batch[1]


def _transfer(self: Any, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
    assert device == torch.device("cpu")
    return [batch[0].to(device) * (3 + dataloader_idx), batch[1].to(device)]


def _after(self: Any, batch: Any, dataloader_idx: int) -> Any:
    return batch[0] / (2 if self.trainer.training else 5 + dataloader_idx), batch[1]


BEFORE: dict[str, Any] = {"on_before_batch_transfer": _before}
TRANSFER: dict[str, Any] = {"transfer_batch_to_device": _transfer}
AFTER: dict[str, Any] = {"on_after_batch_transfer": _after}


@pytest.mark.parametrize(
    ("of_module", "of_data"),
    [
        *((hook, {}) for hook in (BEFORE, TRANSFER, AFTER)),
        *(({}, hook) for hook in (BEFORE, TRANSFER, AFTER)),
        (BEFORE | TRANSFER, AFTER),
        (AFTER, BEFORE | TRANSFER),
        (AFTER, AFTER | BEFORE),
    ],
    ids=lambda hooks: "+".join(hooks) or "none",
)
def test_a_batch_takes_the_way_that_it_takes_in_lightning(of_module: dict[str, Any], of_data: dict[str, Any]) -> None:
    kind: Any = type("Module", (Several,), of_module)
    source: Any = type("DataModule", (Data,), of_data)
    theirs, ours = both(kind, lambda: (source(),), max_epochs=1)
    assert apart(theirs, ours) == 0
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)
    tested, predicted = [], []
    for run in (theirs, ours):
        tested.append(run.trainer.test(run.module, datamodule=source(), verbose=False))
        predicted.append(run.trainer.predict(run.module, datamodule=source()))
    assert tested[1] == [pytest.approx(each, abs=1e-6) for each in tested[0]]
    assert len(tested[0]) == 2
    for one, other in zip(*predicted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


def test_a_stream_is_read_as_by_lightning() -> None:
    theirs, ours = both(Classifier, lambda: (DataLoader(Stream(), batch_size=8), loader(number=20)), max_epochs=2)
    assert apart(theirs, ours) == 0
    assert ours.trainer.num_training_batches == theirs.trainer.num_training_batches


class WithoutValidation(Data):
    def __init__(self) -> None:
        super().__init__()
        self.val_dataloader = None


def test_a_data_module_may_set_a_loader_to_none() -> None:
    theirs, ours = both(Classifier, lambda: (WithoutValidation(),), max_epochs=1)
    assert apart(theirs, ours) == 0
    assert "val_loss" not in ours.metrics


class NoValidation(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_validation_data_of_a_module_without_a_step_for_it_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert apart(*both(NoValidation, lambda: (loader(), loader()))) == 0
    assert "NoValidation has no validation_step, so its validation data is not read" in capsys.readouterr().out


def test_several_training_loaders_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="train is a dict, which joins several loaders"):
        by_fabricate(Classifier(), {"a": loader(), "b": loader()})


def test_without_data_the_error_says_so() -> None:
    with pytest.raises(ConfigurationError, match="train=None"):
        fabricate_lightning.Trainer(max_epochs=1, logger=False, enable_progress_bar=False).fit(Classifier())


def test_the_numbers_of_batches_of_evaluations_count_the_rows_that_drop_last_would_leave_out() -> None:
    seen = []

    class Counts(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.num_val_batches)

        def on_train_end(self) -> None:
            seen.append(self.trainer.num_training_batches)

    dropping = DataLoader(rows(20), batch_size=8, drop_last=True)
    trainer = fabricate.Trainer(max_epochs=1, progress=False, print_plan="none", sanity_batches=0)
    trainer.fit(adapt(Counts()), dropping, dropping)
    assert seen == [*[[3]] * 3, 2]
