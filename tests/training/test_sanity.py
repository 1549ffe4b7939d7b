"""The few batches of validation before training: they find errors and leave no trace."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import ChainMap, OrderedDict, UserList
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas
import pytest
import torch
import torchmetrics
from sklearn.preprocessing import StandardScaler

from fabricate import Callback, ConfigurationError, EarlyStopping, Trainer, hookimpl
from tests.support.regression import ROWS, Hears, Quantising, Regression, equal, fit, weights


class Collects(Regression):
    """Collects in validation what it uses at the end of it, as Lightning's pages show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))
        self.outputs: list[torch.Tensor] = []
        self.count = 0

    def on_eval_start(self) -> None:
        self.began = True

    def validation_step(self, batch: Any) -> Any:
        assert self.began
        self.outputs.append(batch[1])
        self.count += 1
        self.batches += 1
        return {"loss": torch.rand(())}

    def on_eval_end(self) -> None:
        self.log("collected", sum(map(len, self.outputs)))
        self.log("count", self.count)
        self.log("batches", self.batches)
        self.outputs.clear()
        self.trainer.request_save()


def test_batches_before_training_leave_no_trace() -> None:
    listener, ends = Hears(), []
    for number in (0, 2):
        torch.manual_seed(0)
        module = Collects()
        result = fit(module, listener, val=ROWS, max_steps=4, seed=1, sanity_batches=number)
        ends.append((result.metrics, weights(module), float(torch.rand(()))))
    assert ends[0][0] == ends[1][0]
    assert ends[0][0]["val_collected"] == 8
    assert ends[0][0]["val_count"] == ends[0][0]["val_batches"] == 4
    assert equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]
    assert len(listener.evaluations) == 2


def test_buffers_that_grow_before_training_get_their_shape_back() -> None:
    ends, shapes = [], []

    class Listens(Hears):
        def on_epoch_start(self, module: Quantising) -> None:
            shapes.append(module.fake_quantise.scale.shape)

    for number in (0, 2):
        torch.manual_seed(0)
        module = Quantising()
        fit(module, Listens(), val=ROWS, max_steps=4, seed=1, sanity_batches=number)
        ends.append(weights(module))
    assert shapes == [(1,), (1,)]
    assert equal(*ends)


class ChangesTraining(Regression):
    """Changes in validation what training uses: weights, an assigned buffer, the learning rate, and a schedule that it steps itself."""

    def __init__(self) -> None:
        super().__init__(rate=0.1)
        torch.manual_seed(0)
        self.layers[0].reset_parameters()
        self.layers[2].reset_parameters()
        self.register_buffer("scale", torch.ones(()))
        self.prototypes = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.own = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return optimizer

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step((batch[0] * self.prototypes, batch[1])) * self.scale
        return loss

    def validation_step(self, batch: Any) -> Any:
        self.scale = 0.9 * self.scale
        self.prototypes *= 0.9
        return {"loss": self.training_step(batch)}

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        with torch.no_grad():
            self.layers[0].weight *= 0.9
        for group in self.trainer.optimizers["main"].param_groups:
            group["lr"] *= 0.5
        self.own.step(metrics["val_loss"])


def test_what_a_validation_changes_of_the_training_is_put_back_too() -> None:
    modules, rates = [], []
    for sanity_batches in (0, 2):
        modules.append(ChangesTraining())
        trainer = Trainer(max_epochs=3, seed=0, sanity_batches=sanity_batches, progress=False)
        rates.append(trainer.fit(modules[-1], ROWS, ROWS, batch_size=2).metrics["lr"])
    assert rates[0] == rates[1]
    assert equal(weights(modules[0]), weights(modules[1]))


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    """Three updates of warm-up, then the schedule that it holds, as a widely copied class does it. It also holds a lock."""

    def __init__(self, optimizer: Any) -> None:
        self.after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        self.log = threading.Lock()  # cannot be copied, as an open file
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [rate * min(1.0, (self.last_epoch + 1) / 3) for rate in self.base_lrs]

    def step(self, epoch: int | None = None, metrics: float | None = None) -> None:
        if getattr(self, "last_epoch", 0) >= 3:
            self.after.step()
        else:
            super().step(epoch)


class WarmsUp(Regression):
    def configure_optimizers(self) -> Any:
        self.rates: list[float] = []
        optimizer = torch.optim.SGD([{"params": self.parameters(), "lr": 0.1}], lr=torch.tensor(0.1))
        return optimizer, WarmUp(optimizer)

    def on_step(self) -> None:
        self.rates.append(float(self.trainer.optimizers["main"].param_groups[0]["lr"]))


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step.*")
def test_a_schedule_that_holds_another_goes_on_after_the_check() -> None:
    """It advances once per update, although its step also takes `metrics`."""
    rates = []
    for sanity_batches in (0, 2):
        module = WarmsUp()
        Trainer(max_steps=8, sanity_batches=sanity_batches, progress=False).fit(module, ROWS, ROWS, batch_size=2)
        rates.append(module.rates)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 5


def test_what_a_validation_before_training_freezes_is_trained() -> None:
    class Freezes(Regression):
        def on_eval_end(self) -> None:
            self.trainer.freeze([self.layers[0].weight])

    module = Freezes()
    before = module.layers[0].weight.detach().clone()
    fit(module, val=ROWS, max_steps=4, sanity_batches=2)
    assert not torch.equal(before, module.layers[0].weight)


class Table:
    def __init__(self) -> None:
        self.rows, self.counts = 0, np.zeros(2)


class Probe(torch.nn.Identity):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []


class Tables(Regression):
    """Counts validations in all that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.tensor, self.lists = Table(), torch.zeros(1), {"a": [0]}
        self.probe = Probe()

    def validation_step(self, batch: Any) -> Any:
        self.table.rows += len(batch[0])
        self.table.counts += 1
        self.tensor += 1
        self.lists["a"].append(1)
        self.probe.batches.append(1)
        return {"loss": 1.0}


class Wraps(Callback):
    def __init__(self) -> None:
        self.batches = 0

    @hookimpl(wrapper=True)
    def eval_step(self) -> Any:
        self.batches += 1
        return (yield)


def test_what_lies_in_objects_of_the_module_and_in_wrappers_is_put_back_too() -> None:
    module, wraps = Tables(), Wraps()
    fit(module, wraps, val=ROWS, max_steps=4, sanity_batches=2)
    assert (module.table.rows, float(module.table.counts[0]), float(module.tensor)) == (8, 4, 4)
    assert (len(module.lists["a"]), len(module.probe.batches), wraps.batches) == (5, 4, 4)


class KeepsItsPlace(torch.utils.data.IterableDataset[Any]):
    """Rows of a stream that begins where it was left."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < len(ROWS):
            self.at += 1
            yield ROWS[self.at - 1]
        self.at = 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_validation_stream_that_keeps_its_place_is_put_back(wrapped: bool) -> None:
    module, val = Collects(), KeepsItsPlace()
    data: Any = torch.utils.data.DataLoader(val, batch_size=2) if wrapped else val
    hears = Hears()
    trainer = Trainer(max_steps=4, sanity_batches=2, progress=False, plugins=[hears])
    trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=2), data, batch_size=None if wrapped else 2)
    assert hears.evaluations[0]["val_collected"] == len(ROWS)


class Slots:
    __slots__ = ("client", "rows")

    def __init__(self) -> None:
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("made on first use, too early") if name == "client" else AttributeError(name)


class ObjectsOfLibraries(Regression):
    """Holds what validation writes to in objects whose classes are not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.items = pandas.DataFrame({"rows": []}), UserList[int]()
        self.slots, self.namespace = Slots(), SimpleNamespace(rows=0)
        self.metrics = [torchmetrics.SumMetric()]
        self.scaler = StandardScaler()

    def validation_step(self, batch: Any) -> Any:
        rows = len(batch[0])
        self.table.loc[len(self.table)] = [rows]
        self.items.append(rows)
        self.slots.rows += rows
        self.namespace.rows += rows
        self.metrics[0].update(rows)
        self.scaler.partial_fit(batch[0].numpy())
        return {"loss": torch.rand(())}


def test_tables_metrics_and_containers_of_libraries_are_put_back_too() -> None:
    module = ObjectsOfLibraries()
    fit(module, val=ROWS, max_steps=4, sanity_batches=2)
    counted = (int(module.metrics[0].compute()), int(module.scaler.n_samples_seen_))
    assert (sum(module.table["rows"]), sum(module.items), module.slots.rows, module.namespace.rows, *counted) == (
        8,
    ) * 6


SEEN: list[int] = []
COUNTS = {"batches": np.zeros(()), "rows": torch.zeros(())}
TABLE = Table()


def note_row() -> None:
    TABLE.rows += 1


class Pair(NamedTuple):
    rows: list[float]
    other: list[float]


class Tally:
    def __init__(self) -> None:
        self.rows: list[float] = []

    def add(self, row: float) -> None:
        self.rows.append(row)


class Batches(list[float]):
    """A list with an attribute of its own."""

    total = 0.0


def times(rows: list[float], factor: float) -> None:
    rows.append(factor)


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], Any]]] = {
    "tuple": (lambda: ([], []), lambda held: held[0].append(1.0), lambda held: len(held[0])),
    "named tuple in dict": (
        lambda: {"val": Pair([], [])},
        lambda held: held["val"].rows.append(1.0),
        lambda held: len(held["val"].rows),
    ),
    "tuple of tensors": (lambda: (torch.zeros(1),), lambda held: held[0].add_(1), lambda held: int(held[0])),
    "frozen set": (
        lambda: frozenset([Tally()]),
        lambda held: next(iter(held)).add(1.0),
        lambda held: len(next(iter(held)).rows),
    ),
    "list with an attribute": (Batches, lambda held: setattr(held, "total", held.total + 1), lambda held: held.total),
    "array": (lambda: array("d"), lambda held: held.append(1.0), len),
    "bytearray": (bytearray, lambda held: held.append(1), len),
    "chain map": (
        lambda: ChainMap({"rows": []}),
        lambda held: held["rows"].append(1.0),
        lambda held: len(held["rows"]),
    ),
    "mapping proxy": (
        lambda: MappingProxyType({"rows": []}),
        lambda held: held["rows"].append(1.0),
        lambda held: len(held["rows"]),
    ),
    "order of a mapping": (
        lambda: OrderedDict.fromkeys("abcdefg"),
        lambda held: held.move_to_end(next(iter(held))),
        lambda held: 1 + list(held).index("a"),
    ),
    "network in a list": (
        lambda: [torch.nn.BatchNorm1d(2)],
        lambda held: held[0](torch.ones(2, 2)),
        lambda held: int(held[0].num_batches_tracked),
    ),
    "tensor that is resized": (lambda: torch.ones(2), lambda held: held.resize_(len(held) + 1).fill_(1), len),
    "setting of a layer": (
        lambda: torch.nn.Dropout(0.5),
        lambda held: setattr(held, "p", held.p / 2),
        lambda held: held.p,
    ),
    "partial": (lambda: partial(times, []), lambda held: held(1.0), lambda held: len(held.args[0])),
    "method": (lambda: Tally().add, lambda held: held(1.0), lambda held: len(held.__self__.rows)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_fixed_container_holds_is_put_back_too(name: str) -> None:
    make, change, measure = HOLDERS[name]

    class Holds(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.held = make()

        def validation_step(self, batch: Any) -> Any:
            change(self.held)
            return {"loss": torch.zeros(())}

    modules = Holds(), Holds()
    for sanity_batches, module in zip((0, 2), modules, strict=True):
        fit(module, val=ROWS, max_steps=4, sanity_batches=sanity_batches)
    assert measure(modules[0].held) == measure(modules[1].held) > 0


class Collector(Callback):
    """Receives rows from validation_step, and clears them at the end of each evaluation."""

    shared: ClassVar[list[int]] = []
    batches = 0

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.lengths: list[int] = []

    def on_eval_end(self) -> None:
        self.lengths.append(len(self.rows))
        self.rows.clear()


@pytest.mark.parametrize("number", [0, 2])
def test_what_validation_puts_into_plugins_and_global_variables_is_put_back_too(number: int) -> None:
    collector, in_scope = Collector(), [0]

    class Gives(Regression):
        def validation_step(self, batch: Any) -> Any:
            collector.rows.append(1)
            Collector.shared.append(1)
            Collector.batches += 1
            in_scope.append(1)
            note_row()
            SEEN.append(1)
            for count in COUNTS.values():
                count += 1
            return {"loss": 1.0}

    SEEN.clear()
    Collector.shared.clear()
    Collector.batches = 0
    TABLE.rows = 0
    for count in COUNTS.values():
        count.fill_(0) if isinstance(count, torch.Tensor) else count.fill(0)
    fit(Gives(), collector, val=ROWS, max_steps=4, sanity_batches=number)
    assert collector.lengths == [4]
    counts = [len(SEEN), len(Collector.shared), Collector.batches, len(in_scope) - 1, TABLE.rows, *COUNTS.values()]
    assert counts == [4] * 7


FIXED = np.broadcast_to(np.zeros(1), 3)
GRAPH = torch.eye(3).to_sparse()
NAMESPACE: Any = __builtins__
MODULES = sys.modules


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_global_variables_that_cannot_be_written_are_left_alone() -> None:
    class Reads(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.graph = GRAPH
            self.ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])

        def validation_step(self, batch: Any) -> Any:
            assert NAMESPACE
            assert MODULES
            return {"loss": GRAPH.to_dense().sum() + float(FIXED.sum())}

    modules = list(sys.modules)
    assert fit(Reads(), val=ROWS, max_steps=4, sanity_batches=2).metrics["val_loss"] == 3
    assert list(sys.modules)[: len(modules)] == modules


def test_a_long_chain_of_objects_is_put_back() -> None:
    module = Tables()
    module.chain = None  # type: ignore[assignment]
    for _ in range(3000):
        table = Table()
        table.following, module.chain = module.chain, table  # type: ignore[attr-defined]
    fit(module, val=ROWS, max_steps=4, sanity_batches=2)
    assert module.table.rows == 8


class NoStep(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        raise AssertionError("a step ran")


@pytest.mark.parametrize(
    ("returned", "plugins", "message"),
    [
        (torch.ones(2), (), "validation_step returned Tensor; return a mapping of metrics"),
        ({"loss": torch.ones(2)}, (), r"a metric is one number, this tensor has shape \(2,\)"),
        (
            {"loss": 1.0},
            (EarlyStopping("val_acc", mode="max"),),
            r"EarlyStopping\(metric='val_acc'\): validation recorded val_loss",
        ),
    ],
)
def test_a_mistake_in_validation_shows_before_the_first_step(returned: Any, plugins: Any, message: str) -> None:
    module = type("Wrong", (NoStep,), {"validation_step": lambda self, batch: returned})()
    with pytest.raises(ConfigurationError, match=message):
        fit(module, *plugins, val=ROWS, max_steps=4, sanity_batches=2)


def test_checkpoints_kept_by_a_metric_that_validation_lacks_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keep: validation gives val_loss, but not 'val_acc'"):
        Trainer(
            max_epochs=1, progress=False, run_dir=tmp_path, keep={"best": 1, "metric": "val_acc", "mode": "max"}
        ).fit(_Validates(), ROWS, ROWS, batch_size=2)


class _Validates(NoStep):
    def validation_step(self, batch: Any) -> Any:
        return {"loss": 1.0}


def test_data_that_can_be_read_once_is_left_for_the_validation() -> None:
    batches = iter([torch.utils.data.default_collate(ROWS)])
    assert "val_loss" in fit(val=batches, max_steps=4, sanity_batches=2).metrics


def test_an_error_names_its_stage_epoch_and_batch() -> None:
    class Fails(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.step and batch_idx == 1:
                raise ValueError("broken")
            return {"epoch": self.trainer.epoch}

        test_step = validation_step

    with pytest.raises(ValueError, match="broken") as caught:
        fit(Fails(), val=ROWS, max_steps=8, sanity_batches=2)
    notes = "\n".join(caught.value.__notes__)
    assert "while validating: rank 0, epoch 0, after step 4, batch 1" in notes
    assert "the batch was [float32[2, 3], float32[2, 1]]" in notes
    assert "while training" not in notes

    class Sane(Regression):
        def validation_step(self, batch: Any) -> Any:
            raise ValueError("broken")

        test_step = validation_step

    with pytest.raises(ValueError, match="broken") as caught:
        fit(Sane(), val=ROWS, max_steps=8, sanity_batches=2)
    assert any("in the check of validation before training (2 batches)" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="broken") as caught:
        Trainer(progress=False).test(Sane(), ROWS, batch_size=4)
    assert "while testing: rank 0, batch 0" in caught.value.__notes__


def test_the_epoch_of_an_evaluation_at_its_end_is_that_epoch() -> None:
    epochs: list[tuple[str, int]] = []

    class Looks(Callback):
        def on_eval_end(self, trainer: Trainer) -> None:
            epochs.append(("eval", trainer.epoch))

        def on_epoch_end(self, trainer: Trainer) -> None:
            epochs.append(("end", trainer.epoch))

        def on_epoch_start(self, trainer: Trainer) -> None:
            epochs.append(("start", trainer.epoch))

    fit(None, Looks(), val=ROWS, max_steps=8)
    assert epochs == [(what, epoch) for epoch in (0, 1) for what in ("start", "eval", "end")]


def test_the_hooks_after_training_see_the_last_epoch_in_a_complete_run_that_is_started_again_too(
    tmp_path: Path,
) -> None:
    epochs: list[tuple[str, int]] = []

    class Looks(Callback):
        def on_complete(self, trainer: Trainer) -> None:
            trainer.request_eval()
            epochs.append(("complete", trainer.epoch))

        def on_eval_end(self, trainer: Trainer) -> None:
            epochs.append(("eval", trainer.epoch))

        def on_export(self, trainer: Trainer) -> None:
            epochs.append(("export", trainer.epoch))

        def on_fit_end(self, trainer: Trainer) -> None:
            epochs.append(("fit", trainer.epoch))

    ends = [(what, 1) for what in ("complete", "eval", "export", "fit")]
    fit(None, Looks(), val=ROWS, max_steps=8, run_dir=tmp_path)
    assert epochs[-4:] == ends
    epochs.clear()
    fit(None, Looks(), val=ROWS, max_steps=8, run_dir=tmp_path)
    assert epochs == ends
