"""State of user objects other than weights, such as generators and counters: what no checkpoint holds is named."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import functools
import io
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import torchmetrics
from sklearn.preprocessing import StandardScaler

from fabricate import Callback, FitResult, Trainer, TrainModule
from fabricate.testing import run_ranks
from fabricate.training.saves import unsaved
from fabricate.training.saves.marks import Fingerprint

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(0)
        self.reads = 0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return ROWS[index]


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.generator_of_mine = torch.Generator().manual_seed(0)
        self.seen, self.width = 0, 3
        self.mean, self.constant = torch.zeros(3), torch.ones(3)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += 1
        self.mean.lerp_(batch[0].mean(0), 0.1)
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Saving(Regression):
    def on_save(self, state: dict[str, Any]) -> None:
        state["seen"] = self.seen


def fit(module: TrainModule, steps: int = 2, train: Any = ROWS, **options: Any) -> FitResult:
    trainer = Trainer(max_steps=steps, seed=1, progress=False, **options)
    val = ROWS if isinstance(module, Regression) else None
    return trainer.fit(module, train, val, batch_size=2, shuffle=False)


def test_what_no_checkpoint_holds_is_named_with_the_way_to_save_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Regression(), train=Rows(), run_dir=tmp_path)
    output = capsys.readouterr()
    generators = "Regression.generator_of_mine (Generator), Rows (train).noise (Generator)"
    assert (
        f"note: these random generators are not in checkpoints, so a resumed run draws other numbers: {generators}. Draw from"
        in output.out
    )
    assert (
        "note: Regression.seen, Regression.mean, Rows (train).reads changed since the fit began but is not in the checkpoint"
        in output.err
    )
    assert "register_buffer" in output.err


class Remembering(Callback):
    """Of every kind one that changes and one that does not."""

    def __init__(self) -> None:
        self.history, self.table, self.grid = list[float](), {"x": [1.0]}, np.zeros(2)
        self.warm, self.phase, self.pair, self.ring = False, "a", (1, 2), deque([1])
        self.same_list, self.same_table, self.same_grid, self.same_text = [0.0], {"y": [1]}, np.ones(2), "b"
        self.loop: list[Any] = [0]
        self.loop.append(self.loop)

    def on_step(self) -> None:
        self.history.append(1.0)
        self.table["x"][0] += 1
        self.grid += 1
        self.warm, self.phase, self.pair = True, "b", (2, 1)
        self.ring.append(2)


class Keeping(Callback):
    """Keeps the module's parameters, which checkpoints hold, and a parameter of its own, which they do not."""

    def __init__(self) -> None:
        self.own = [torch.nn.Parameter(torch.zeros(1))]

    def on_fit_start(self, module: TrainModule) -> None:
        self.parameters, self.first = list(module.parameters()), next(module.parameters())

    def on_step(self) -> None:
        torch.nn.init.ones_(self.own[0])


def test_parameters_of_the_module_that_a_plugin_keeps_are_in_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(max_steps=1, progress=False, run_dir=tmp_path, plugins=[Keeping()]).fit(Saving(), ROWS, batch_size=2)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "Keeping" in line]
    assert note.startswith("note: Keeping.own changed since")


def test_collections_arrays_texts_and_truth_values_are_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsaved, "few", ", ".join)
    Trainer(max_steps=1, progress=False, run_dir=tmp_path, plugins=[Remembering()]).fit(
        Regression(), ROWS, batch_size=2
    )
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "Remembering" in line]
    changed = ["history", "table", "grid", "warm", "phase", "pair", "ring"]
    assert note.split(" changed since")[0].split(", ")[-7:] == [f"Remembering.{name}" for name in changed]


class Replay:
    def __init__(self) -> None:
        self.rows = list[float]()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.uses = torch.nn.Linear(3, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.uses += 1
        return self.layer(x)


class Carrying(Regression):
    """As scripts carry a hidden state and a replay buffer: None at first, set where it is first needed, in an object of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Any = None
        self.never: Any = None
        self.blocks = torch.nn.ModuleList([Block()])
        self.replay, self.untouched = Replay(), Replay()

    def on_epoch_start(self) -> None:
        self.empty: Any = None
        self.cell: Any = (torch.zeros(1), torch.zeros(1))

    def training_step(self, batch: Any) -> torch.Tensor:
        self.hidden = batch[0].mean()
        self.replay.rows.append(1.0)
        return super().training_step([self.blocks[0](batch[0]), batch[1]])


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_what_is_set_only_during_the_fit_and_objects_of_the_user_are_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(unsaved, "few", ", ".join)
    fit(Carrying(), 4, run_dir=tmp_path, save_every=2, strategy=strategy)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    changed = ["seen", "mean", "hidden", "replay", "cell", "blocks.0.uses"]
    assert note.split(" changed since")[0] == "note: " + ", ".join(f"Carrying.{name}" for name in changed)


class Beginning(TrainModule):
    """Sets in `on_fit_start` a tensor that stays as it is, and one that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def on_fit_start(self) -> None:
        self.anchor, self.moving = self.layer.weight.detach().clone(), torch.zeros(3)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.moving += 1
        return self.layer(batch[0]).square().mean() + (self.layer.weight - self.anchor).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_what_on_fit_start_sets_is_looked_at_only_if_it_changes_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Beginning()
    module.given = torch.ones(3)  # by the script, which sets it again when it resumes
    fit(module, run_dir=tmp_path)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    assert note.startswith("note: Beginning.moving changed since the fit began")


class Layers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(3)

    def on_step(self) -> None:
        self.drop.p, self.norm.momentum = 0.2, 0.01


def test_what_a_script_changes_of_layers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsaved, "few", ", ".join)
    fit(Layers(), run_dir=tmp_path)
    assert "Layers.drop.p, Layers.norm.momentum" in capsys.readouterr().err


class Copies:
    def __init__(self, network: torch.nn.Module) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False)


class Follows(Callback):
    """Keeps a copy of the network that follows it, and a network for a metric."""

    def __init__(self) -> None:
        self.network: Any = None
        self.judge: Any = None

    def on_fit_start(self, module: Any) -> None:
        self.network = copy.deepcopy(module.layer)

    def on_step(self, module: Any) -> None:
        self.judge = self.judge or torch.nn.Linear(3, 1)
        follow(self.network, module.layer)


class Averaging(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "object":
            self.copy = Copies(self.layer)
        elif how in ("list", "frozen"):
            self.copies = [copy.deepcopy(self.layer).requires_grad_(False)]
        elif how == "hidden":
            self.__dict__["copy"] = copy.deepcopy(self.layer)
        elif how == "attribute":
            self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    def on_step(self) -> None:
        copies = {"object": lambda: self.copy.network, "list": lambda: self.copies[0], "hidden": lambda: self.copy}
        if self.how in copies:
            follow(copies[self.how](), self.layer)
        elif self.how == "attribute":
            follow(self.teacher, self.layer)


def follow(network: torch.nn.Module, other: torch.nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("object", "Averaging.copy"),
        ("list", "Averaging.copies"),
        ("hidden", "Averaging.copy"),
        ("callback", "Follows.network"),
        ("frozen", ""),
        ("attribute", ""),
    ],
)
def test_a_copy_of_the_network_outside_of_the_module_that_follows_it_is_named(
    how: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsaved, "few", ", ".join)
    fit(Averaging(how), plugins=[Follows()] if how == "callback" else [], run_dir=tmp_path)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    names = note.partition(" changed since")[0].removeprefix("note: ").split(", ")
    assert set(names) - {"Averaging.seen", "Averaging.mean"} == ({named} if named else set())


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.0


class OneSlot:
    __slots__ = "count"

    def __init__(self) -> None:
        self.count = 0


class Nested:
    def __init__(self) -> None:
        self.inside = types.SimpleNamespace(memory=Slots(), around=self)


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "Counter": (collections.Counter, lambda it: it.update(a=1)),
    "defaultdict": (lambda: collections.defaultdict(float), lambda it: it.update(a=it["a"] + 1)),
    "OrderedDict of tensors": (lambda: torch.nn.Linear(2, 1).state_dict(), lambda it: it["bias"].add_(1)),
    "SimpleNamespace": (lambda: types.SimpleNamespace(n=0.0), lambda it: setattr(it, "n", it.n + 1)),
    "slots": (Slots, lambda it: setattr(it, "number", it.number + 1)),
    "object in an object": (Nested, lambda it: setattr(it.inside.memory, "number", it.inside.memory.number + 1)),
    "number of numpy": (
        lambda: types.SimpleNamespace(baseline=np.float64(0)),
        lambda it: setattr(it, "baseline", it.baseline * 0.9 + 1),
    ),
    "frozenset": (lambda: {"seen": frozenset()}, lambda it: it.update(seen=it["seen"] | {len(it["seen"])})),
    "one slot": (OneSlot, lambda it: setattr(it, "count", it.count + 1)),
    "list three deep": (lambda: {"x": {"y": [0.0]}}, lambda it: it["x"]["y"].append(1.0)),
    "function": (
        lambda: types.SimpleNamespace(loss=torch.nn.functional.mse_loss),
        lambda it: setattr(it, "loss", torch.nn.functional.l1_loss),
    ),
    "partial": (
        lambda: types.SimpleNamespace(loss=functools.partial(torch.nn.functional.huber_loss, delta=1.0)),
        lambda it: setattr(it, "loss", functools.partial(torch.nn.functional.huber_loss, delta=0.5)),
    ),
    "array": (lambda: array.array("d"), lambda it: it.append(1.0)),
    "ChainMap": (lambda: collections.ChainMap({"x": [0.0]}), lambda it: it["x"].append(1.0)),
    "UserList": (collections.UserList, lambda it: it.append(1.0)),
    "mapping proxy": (lambda: types.MappingProxyType({"x": [0.0]}), lambda it: it["x"].append(1.0)),
    "300 tensors in an object": (
        lambda: types.SimpleNamespace(shadow={n: torch.zeros(1) for n in range(300)}),
        lambda it: it.shadow[250].add_(1),
    ),
}
"""What a module may hold, and how it changes there."""


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("kind", HOLDERS)
def test_state_in_any_container_or_object_is_named_once_it_changes(
    kind: str, changes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, change = HOLDERS[kind]

    class Holds(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.held = torch.nn.Linear(3, 1), make()

        def training_step(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def on_step(self) -> None:
            if changes:
                change(self.held)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    fit(Holds(), run_dir=tmp_path)
    assert ("note: Holds.held changed since the fit began" in capsys.readouterr().err) == changes


class Exchanging(TrainModule):
    """Exchanges a layer without parameters once, and makes an equal function again in each step."""

    def __init__(self, exchanges: bool) -> None:
        super().__init__()
        self.layer, self.activation = torch.nn.Linear(3, 1), torch.nn.ReLU()
        self.exchanges = exchanges

    def training_step(self, batch: Any) -> torch.Tensor:
        self.scaled = lambda x: 2 * x
        return torch.nn.functional.mse_loss(self.scaled(self.activation(self.layer(batch[0]))), batch[1])

    def on_step(self, step: int) -> None:
        self.late = torch.nn.Identity()
        if self.exchanges and step == 1:
            self.activation = torch.nn.Tanh()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_layer_that_is_exchanged_is_named(
    exchanges: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Exchanging(exchanges), run_dir=tmp_path)
    notes = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    named = ["note: Exchanging.activation"] if exchanges else []
    assert [note.partition(" changed since")[0] for note in notes] == named


def endless(items: Any) -> Iterator[Any]:
    while True:
        yield from items


UNLABELLED: Any = torch.utils.data.DataLoader(torch.zeros(6, 3), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(UNLABELLED),
        lambda: endless(UNLABELLED),
        lambda: itertools.cycle(UNLABELLED),
        lambda: {"loaders": [itertools.islice(UNLABELLED, 3)]},
        itertools.count,
    ],
)
def test_an_iterator_that_the_module_reads_from_is_named_with_the_way_to_save_it(
    make: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Second(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.second = make()

        def on_step(self) -> None:
            next(self.second["loaders"][0] if isinstance(self.second, dict) else self.second)

    fit(Second(), run_dir=tmp_path)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    assert "Second.second" in note
    assert "Of an iterator, save how many items it gave, and take as many from a new one in on_load" in note


def test_iterators_that_nothing_advances_and_what_is_made_on_the_way_are_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Quiet(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.generator_of_mine = None
            self.trained = filter(lambda parameter: parameter.requires_grad, self.layer.parameters())
            self.unread = [
                self.parameters(),
                zip("ab", "cd", strict=True),
                map(len, ["a"]),
                iter([1, 2]),
                enumerate("ab"),
            ]
            self.once, self.numbers, self.ended = itertools.repeat(1.0), itertools.count(), endless([])
            self.views, self.loader = iter(UNLABELLED), iter([1])

        def training_step(self, batch: Any) -> torch.Tensor:
            self.scaled = functools.partial(torch.mul, 2.0)
            self.shapes = map(len, batch)
            return torch.nn.functional.mse_loss(self.scaled(self.layer(batch[0])), batch[1])

        def on_epoch_start(self) -> None:
            self.second = iter(UNLABELLED)

    fit(Quiet(), 4, run_dir=tmp_path, save_every=1)
    notes = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    assert notes == []


def test_large_data_is_compared_by_shape_and_files_are_not_read(tmp_path: Path) -> None:
    held = [np.zeros(2**20) for _ in range(50)]
    fingerprint = Fingerprint(set()).of([np.zeros(2**22), *held, np.zeros(3), "a" * 2**25])
    assert [shape for shape, content in fingerprint[:-1] if content is not None] == [(2**20,), (2**20,), (3,)]
    assert fingerprint[-1] == 2**25
    in_file = np.memmap(tmp_path / "rows", dtype=np.uint8, mode="w+", shape=(8,))
    assert Fingerprint(set()).of(in_file) == ((8,), None)


class Difficult:
    __slots__ = ("inside", "rest")

    def __init__(self) -> None:
        self.inside = 1

    def __getattr__(self, name: str) -> Any:
        return {}[name]


def test_objects_that_cannot_be_looked_at_do_not_end_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Holds(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.difficult, self.lazy, self.large = Difficult(), [torch.nn.LazyLinear(2)], 10**5000

    fit(Holds(), run_dir=tmp_path)
    assert "changed since the fit began" in capsys.readouterr().err


def test_what_checkpoints_hold_is_not_named_where_a_plugin_refers_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Holds(Callback):
        groups: Any = None

        def on_fit_start(self, trainer: Any) -> None:
            self.groups = trainer.optimizers["main"].param_groups

        def on_step(self) -> None:
            for group in self.groups:
                group["lr"] *= 0.9

    fit(Saving(), plugins=[Holds()], run_dir=tmp_path)
    assert "changed since the fit began" not in capsys.readouterr().err


class Spread(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, values: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, values.max())

    def compute(self) -> torch.Tensor:
        return self.largest


def test_the_state_of_a_metric_of_the_user_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Measures(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.spread = torch.nn.Linear(3, 1), Spread()

        def training_step(self, batch: Any) -> torch.Tensor:
            self.spread.update(batch[1])
            self.log("spread", self.spread)
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    fit(Measures(), run_dir=tmp_path)
    assert "changed since the fit began" not in capsys.readouterr().err


def test_a_plugin_that_saves_itself_is_not_named_where_another_one_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Saves(Counting):
        def on_save(self, state: dict[str, Any]) -> None:
            state["steps"] = self.steps

    class Reads(Callback):
        def __init__(self, other: Any) -> None:
            self.others = {"counting": other}

        def on_step(self) -> None:
            assert self.others["counting"].steps

    saves = Saves()
    fit(Saving(), plugins=[saves, Reads(saves)], run_dir=tmp_path)
    assert "changed since the fit began" not in capsys.readouterr().err


class Order(torch.utils.data.Sampler[int]):
    def __init__(self) -> None:
        self.random, self.passes = np.random.default_rng(0), 0

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(self.random.permutation(len(ROWS)).tolist())


class Pausing(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


class Scaling(torch.nn.Identity):
    def get_extra_state(self) -> Any:
        return {"scale": 1}


class Late(Regression):
    """Names as they are in scripts; `stage` changes after the first save."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.stage = torch.Generator().manual_seed(0), 1
        self.scaling = Scaling()

    def on_step(self, step: int) -> None:
        self.stage = 1 + step // 4

    def configure_optimizers(self) -> Any:
        optimizer = Pausing(self.parameters(), lr=1e-3)
        optimizer.steps = 0
        return optimizer


class Counting(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step(self) -> None:
        self.steps += 1


def test_samplers_optimizers_and_plugins_are_looked_at_and_what_changes_late_is_named_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = torch.utils.data.DataLoader(ROWS, batch_size=2, sampler=Order())  # type: ignore[arg-type]
    Trainer(max_steps=4, seed=1, progress=False, run_dir=tmp_path, save_every=2, plugins=[Counting()]).fit(Late(), rows)
    output = capsys.readouterr()
    assert (
        "other numbers: Late.generator_of_mine (Generator), Late.generator (Generator), Order (train).random"
        in output.out
    )
    assert "note: not in checkpoints: what get_extra_state gives of scaling. Save it in on_save" in output.out
    first, second = [line for line in output.err.splitlines() if "changed since the fit began" in line]
    assert "Late.seen, Late.mean, Pausing.steps, Counting.steps" in first
    assert "Order (train).passes" in first or "and 1 more" in first
    assert second.startswith("note: Late.stage changed")


class Blockwise(torch.optim.SGD):
    """As the optimizers of bitsandbytes: the first step after a load prepares what it needs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)
        self.initialized = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.initialized = True
        super().step()


class Extended(Blockwise):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


@pytest.mark.parametrize(
    ("optimizer", "library", "named"),
    [
        (Blockwise, "bitsandbytes.optim.optimizer", []),
        (Extended, "bitsandbytes.optim.optimizer", ["Extended.steps"]),
        (Blockwise, "my_script", ["Blockwise.initialized"]),
    ],
)
def test_bookkeeping_of_bitsandbytes_optimizers_is_not_named(
    optimizer: Any,
    library: str,
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Net(Regression):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

    monkeypatch.setattr(Blockwise, "__module__", library)
    Trainer(max_steps=2, progress=False, print_plan="none", run_dir=tmp_path).fit(Net(), ROWS, batch_size=2)
    notes = " ".join(line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line)
    assert [
        name for name in ("Blockwise.initialized", "Extended.initialized", "Extended.steps") if name in notes
    ] == named


def test_what_a_data_set_holds_and_a_plugin_saves_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Labels(torch.utils.data.TensorDataset):
        def __init__(self) -> None:
            super().__init__(*map(torch.stack, zip(*ROWS, strict=True)))
            self.guessed, self.other = torch.zeros(8), torch.zeros(8)

    class Guesses(Callback):
        def on_step(self) -> None:
            data.guessed.add_(1)
            data.other.add_(1)
            memory["rounds"] += 1

        def on_save(self, state: dict[str, Any]) -> None:
            state["labels"], state["memory"] = data.guessed.clone(), dict(memory)

        def on_load(self, state: dict[str, Any]) -> None:
            data.guessed.copy_(state["labels"])
            memory.update(state["memory"])

    data, memory = Labels(), {"rounds": 0}
    fit(Regression(), run_dir=tmp_path, train=data, plugins=[Guesses()])
    notes = " ".join(line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line)
    assert "Labels (train).other" in notes
    assert "guessed" not in notes
    assert "memory" not in notes


def test_the_module_itself_is_named_if_its_extra_state_is_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Extra(Regression):
        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    fit(Extra(), run_dir=tmp_path)
    assert "not in checkpoints: what get_extra_state gives of Extra. Save" in capsys.readouterr().out


class Table(torch.nn.Module):
    """Writes a plain tensor, and its buffer under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(2)
        self.register_buffer("mean", torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "table"], destination[prefix + "again"] = self.table, self.mean


def _add_words(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "words"] = torch.arange(5)


class Writing(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), Table())
        self.inner[0].requires_grad_(False)
        self.inner[0].register_state_dict_post_hook(_add_words)


def _output_of_a_fit(module: type[Regression], directory: Path, strategy: str = "single") -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        fit(module(), run_dir=directory, strategy=strategy, print_plan="full")
    return output.getvalue()


def test_entries_of_state_dict_that_are_no_parameters_or_buffers_are_named(tmp_path: Path) -> None:
    class Saving(Writing):
        def on_save(self, state: dict[str, Any]) -> None:
            state["table"] = self.inner[1].table

    note = "not in checkpoints and exports: "
    assert f"{note}inner.0.words, inner.1.table, which" in _output_of_a_fit(Writing, tmp_path / "lost")
    assert note not in _output_of_a_fit(Saving, tmp_path / "saved")
    assert note not in _output_of_a_fit(Regression, tmp_path / "none")
    sharded = run_ranks(_output_of_a_fit, 2, Writing, tmp_path / "sharded", "fsdp")
    assert f"{note}inner.1.table, which" in sharded[0]


def test_a_plugin_of_ones_own_distribution_is_looked_at_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Mean(Counting):
        __module__ = "fabricate_mine.callback"  # as the page about plugins names distributions

    Trainer(max_steps=4, progress=False, run_dir=tmp_path, save_every=2, plugins=[Mean()]).fit(Late(), ROWS)
    assert "Mean.steps" in capsys.readouterr().err


class Shifted(torch.utils.data.SequentialSampler):
    """Its order depends on the epoch, which is set under a name of its own."""

    current, passes = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.current = epoch

    def __iter__(self) -> Any:
        self.passes += 1
        return iter([(index + self.current) % len(ROWS) for index in range(len(ROWS))])


def test_what_set_epoch_sets_is_no_state_to_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = torch.utils.data.DataLoader(ROWS, batch_size=2, sampler=Shifted(ROWS))  # type: ignore[arg-type]
    Trainer(max_epochs=3, progress=False, run_dir=tmp_path).fit(Regression(), rows)
    noted = capsys.readouterr().err
    assert "Shifted (train).passes" in noted
    assert "Shifted (train).current" not in noted


def test_modes_that_a_hook_sets_on_the_way_are_those_of_a_resumed_run(tmp_path: Path) -> None:
    modes = []

    class Settles(Regression):
        def on_epoch_start(self) -> None:
            modes.append((self.layer.training, self.training))

        def on_step(self, step: int) -> None:
            if step == 1:
                self.layer.eval()

    for steps in (2, 3):
        fit(Settles(), steps, run_dir=tmp_path)
    assert modes == [(True, True), (False, True)]


def test_nothing_is_named_where_nothing_is_saved_or_the_module_saves_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Regression())
    fit(Saving(), run_dir=tmp_path)
    output = capsys.readouterr()
    assert "in checkpoints" not in output.out
    assert "changed since the fit began" not in output.err


# ------------------------------------------------------------------------------------------------ schedulers and optimizers of one's own


class Own(torch.optim.SGD):
    """An optimizer of the user's: a schedule sets an attribute on it, which needs no checkpoint."""


class Steps(TrainModule):
    """Holds a scheduler and a second optimizer; `own` says which of them it steps itself instead of returning them."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.layer, self.spare = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        self.own = own

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]) + self.spare(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        self.main = Own(self.layer.parameters(), lr=1e-3)
        self.second = torch.optim.Adam(self.spare.parameters(), lr=1e-3)
        self.warm = torch.optim.lr_scheduler.LinearLR(self.main, 0.5, total_iters=2)
        self.whole = torch.optim.lr_scheduler.ConstantLR(self.main, 1.0)
        self.chained = torch.optim.lr_scheduler.ChainedScheduler([self.warm, self.whole], self.main)
        answer = {"main": self.main if self.own == "scheduler" else (self.main, self.chained)}
        return answer if self.own == "optimizer" else {**answer, "second": self.second}

    def on_step(self) -> None:
        if self.own == "scheduler":
            self.chained.step()
        elif self.own == "optimizer":
            self.spare.weight.grad = torch.ones_like(self.spare.weight)
            self.second.step()
            self.second.zero_grad()


@pytest.mark.parametrize("own", ["", "scheduler", "optimizer"])
def test_a_scheduler_or_optimizer_that_a_hook_steps_is_named(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(max_steps=4, seed=1, progress=False, run_dir=tmp_path).fit(Steps(own), ROWS, batch_size=2)
    notes = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    named = {"": None, "scheduler": "Steps.warm, Steps.whole, Steps.chained", "optimizer": "Steps.second"}[own]
    assert [note.partition(" changed since")[0] for note in notes] == ([f"note: {named}"] if named else [])


class OfLibraries(Regression):
    """Objects of other libraries that a step changes, beside some that it does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics, self.unused = [torchmetrics.MeanMetric()], [torchmetrics.MeanMetric()]
        self.scaler, self.fitted = StandardScaler(), StandardScaler().fit([[0.0], [1.0]])
        self.table, self.constant = pandas.DataFrame(columns=["loss"]), pandas.Series([1.0])

    def training_step(self, batch: Any) -> torch.Tensor:
        self.metrics[0].update(batch[1])
        self.scaler.partial_fit(batch[0].numpy())
        self.table.loc[len(self.table)] = [1.0]
        return super().training_step(batch)


def test_objects_of_other_libraries_that_a_step_changes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsaved, "few", ", ".join)
    fit(OfLibraries(), 4, run_dir=tmp_path, save_every=2)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    changed = ["seen", "mean", "metrics", "scaler", "table"]
    assert note.split(" changed since")[0] == "note: " + ", ".join(f"OfLibraries.{name}" for name in changed)
