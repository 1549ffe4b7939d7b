"""TrainModule: steps and their arguments, logging, recorded constructor arguments, copies, and its access to the Trainer."""

from __future__ import annotations

import copy
import enum
import itertools
import pickle
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fabricate import Callback, CheckpointError, ConfigurationError, FabricateError, Trainer, TrainModule
from fabricate.checkpoint.format.arguments import read
from fabricate.module import overrides, recorded, step_function

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Regression(TrainModule):
    def __init__(self, width: int = 4, *, rate: float = 0.001, act: Any = None, **rest: Any) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
        self.rate, self.act, self.rest = rate, act, rest

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Configured(Regression):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__(config.pop("width", 4))


class Kind(enum.StrEnum):
    WIDE = "wide"


class Perceptron(TrainModule):
    def __init__(self, first: int, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        widths = [first, *sizes]
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths)])

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def _fit(module: TrainModule, *plugins: object, **arguments: Any) -> Any:
    arguments = {"max_steps": 1, "progress": False, **arguments}
    return Trainer(plugins=plugins, **arguments).fit(module, ROWS, batch_size=2)


def _same(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------------------- steps and methods


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (lambda self, batch: [batch], ["batch"]),
        (lambda self, batch, batch_idx: [batch, batch_idx], ["batch", 7]),
        (lambda self, rows, number: [rows, number], ["batch", 7]),
        (lambda self, batch, batch_idx=None: [batch, batch_idx], ["batch", 7]),
        (lambda self, batch, scale=3: [batch, scale], ["batch", 3]),
        (lambda self, *everything: list(everything), ["batch", 7]),
    ],
)
def test_a_step_gets_the_batch_and_its_number_if_it_takes_one(step: Any, arguments: list[Any]) -> None:
    module = type("Steps", (TrainModule,), {"training_step": step})()
    assert step_function(module, "train")("batch", 7) == arguments


def test_batches_are_numbered_within_the_epoch() -> None:
    numbers: list[int] = []

    class Numbered(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            numbers.append(batch_idx)
            return super().training_step(batch)

    _fit(Numbered(), max_steps=None, max_epochs=2, gradient_accumulation_steps=2)
    assert numbers == [0, 1, 2, 3, 0, 1, 2, 3]


def test_an_override_is_told_from_a_default() -> None:
    assert overrides(Regression(), "training_step")
    assert not overrides(Regression(), "validation_step")


# --------------------------------------------------------------------------------------------------------------- while it is run


def test_the_trainer_and_the_device_are_known_in_a_step() -> None:
    values: list[Any] = []

    class Asks(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            values.append((self.trainer.step, self.trainer.epoch, self.trainer.total_steps, self.device))
            return super().training_step(batch)

    _fit(Asks(), max_steps=2)
    assert values == [(0, 0, 2, torch.device("cpu")), (1, 0, 2, torch.device("cpu"))]


def test_a_module_may_bring_its_own_data() -> None:
    calls: list[Any] = []

    class Brings(Regression):
        def provide_data(self, trainer: Trainer, stage: str, train: Any, val: Any) -> tuple[Any, Any]:
            calls.append((trainer.settings.max_steps, trainer.running, stage, train, val))
            return (torch.utils.data.DataLoader(ROWS, batch_size=4), None) if stage == "fit" else (None, val * 2)

        def predict_step(self, batch: Any) -> Any:
            return batch[1]

    trainer = Trainer(max_steps=2, progress=False)
    assert trainer.plan(Brings())["updates_per_epoch"] == 2
    assert trainer.fit(Brings()).steps == 2
    assert len(trainer.predict(Brings(), ROWS, batch_size=4) or []) == 16
    assert calls == [(2, False, "fit", None, None), (2, False, "fit", None, None), (2, False, "predict", None, ROWS)]


def test_the_trainer_is_gone_after_the_fit_even_if_it_failed() -> None:
    class Fails(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise RuntimeError("broken")

    for module in (Regression(), Fails()):
        if isinstance(module, Fails):
            with pytest.raises(RuntimeError, match="broken"):
                _fit(module)
        else:
            _fit(module)
        with pytest.raises(FabricateError, match="exists only while a Trainer runs the module"):
            _ = module.trainer
    assert Regression().device == torch.device("cpu")


def test_rank_0_alone_prints_outside_of_a_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Regression().print("here", 1)
    assert capsys.readouterr().out == "here 1\n"
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    Regression().print("here", 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("late", [False, True])
def test_a_module_inside_the_module_logs_and_knows_the_trainer(late: bool) -> None:
    class Inner(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.log("rows", len(batch[0]))
            self.log("step", self.trainer.step)
            return super().training_step(batch)

    class Outer(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.inner = None if late else Inner()

        def configure_model(self) -> None:
            self.inner = self.inner or Inner()

        def training_step(self, batch: Any) -> Any:
            assert self.inner is not None
            return self.inner.training_step(batch)

    module = Outer()
    metrics = _fit(module, max_steps=2, log_every=2).metrics
    assert (metrics["rows"], metrics["step"]) == (2, 0.5)
    inner: Any = module.inner
    for part in (inner, copy.deepcopy(inner)):
        with pytest.raises(FabricateError, match="no fit or evaluation is running"):
            part.log("rows", 1)
        with pytest.raises(FabricateError, match="exists only while a Trainer runs the module"):
            _ = part.trainer
    assert _fit(inner, log_every=1).metrics["rows"] == 2


@pytest.mark.parametrize("trained", [True, False])
def test_hooks_of_a_trained_module_inside_the_module_are_named(
    trained: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Inner(Regression):
        def on_step(self) -> None:
            raise AssertionError("called")

    class Outer(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner().requires_grad_(trained)

        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch) + self.inner.training_step(batch)

    _fit(Outer(), print_plan="full")
    assert ("are not called: on_step of Outer.inner" in capsys.readouterr().out) == trained


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_taken_during_a_fit_leaves_the_trainer_behind(copied: Any) -> None:
    class Copies(Callback):
        def on_step(self, module: TrainModule) -> None:
            self.copy = copied(module)
            self.same = _same(self.copy, module)

    copies, module = Copies(), Regression()
    _fit(module, copies, max_steps=2)
    assert copies.same
    assert copies.copy._trainer is None
    assert _fit(copies.copy).steps == 1


# -------------------------------------------------------------------------------------------------------------------------- logging


def test_what_a_step_logs_is_a_mean_weighted_by_rows() -> None:
    class Logs(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.log("rows", len(batch[0]))
            self.log("first", batch[0][0, 0])
            self.log("count", len(batch[0]), reduce="sum")
            self.log("own", batch[0][0, 0], weight=float(batch[0][0, 0] == 6))
            return super().training_step(batch)

    result = Trainer(max_steps=3, log_every=3, progress=False).fit(Logs(), ROWS, batch_size=3, shuffle=False)
    assert result.metrics["rows"] == pytest.approx((3 * 3 + 3 * 3 + 2 * 2) / 8)
    assert result.metrics["first"] == pytest.approx((3 * 0 + 3 * 3 + 2 * 6) / 8)
    assert result.metrics["count"] == 8
    assert result.metrics["own"] == 6


def test_logging_holds_no_graph() -> None:
    class Logs(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            self.log("loss_again", loss)
            assert not self._logged[0][1].requires_grad
            return loss

    assert _fit(Logs(), log_every=1).metrics["loss_again"] > 0


def test_a_hook_of_the_module_may_log() -> None:
    class Logs(Regression):
        def on_step(self) -> None:
            self.log("five", 5)

    assert _fit(Logs(), max_steps=3, log_every=3).metrics["five"] == 5


# ------------------------------------------------------------------------------------------------------- recorded arguments, loading


def test_arguments_that_json_holds_are_recorded() -> None:
    given: dict[str, Any] = {"rate": 0.5, "depth": 3, "names": ["a"], "pair": (1, 2)}
    values, lost = recorded(Regression(8, act=torch.nn.ReLU(), deep=(1, (2,)), **given))
    assert values == {"width": 8, **given}
    assert lost == ["act", "deep"]


def test_arguments_left_out_are_not_recorded() -> None:
    assert recorded(Regression()) == ({}, [])


def test_numbers_of_numpy_are_recorded_as_pythons_and_a_fit_saves_them(tmp_path: Path) -> None:
    arguments = {"rate": numpy.logspace(-4, -3, 2)[0], "width": numpy.int64(6), "sizes": [numpy.float32(0.5)]}
    _fit(Regression(**arguments), run_dir=tmp_path)
    again = Regression.load_from_checkpoint(tmp_path)
    assert (again.rate, again.layers[0].out_features, again.rest) == (1e-4, 6, {"sizes": [0.5]})
    assert type(again.rate) is float


def test_a_tuple_is_recorded_and_comes_back_as_one(tmp_path: Path) -> None:
    _fit(Regression(pair=(8, 4)), run_dir=tmp_path)
    assert Regression.load_from_checkpoint(tmp_path).rest == {"pair": (8, 4)}
    for same in ((8, 4), [8, 4]):
        _fit(Regression(pair=same), run_dir=tmp_path, max_steps=2)
    with pytest.raises(CheckpointError, match=r"argument pair of Regression \[8, 4\] -> \[8, 5\]"):
        _fit(Regression(pair=(8, 5)), run_dir=tmp_path, max_steps=3)


class Columns(TrainModule):
    """Concatenates embeddings in the order of its columns."""

    def __init__(self, sizes: dict[str, int], **more: int) -> None:
        super().__init__()
        self.columns = sizes | more
        self.embeddings = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(size, 2) for name, size in self.columns.items()}
        )
        self.head = torch.nn.Linear(2 * len(self.columns), 1)

    def forward(self, batch: Any) -> torch.Tensor:
        parts = [embedding(batch[name]) for name, embedding in self.embeddings.items()]
        out: torch.Tensor = self.head(torch.cat(parts, 1))
        return out

    def training_step(self, batch: Any) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_order_of_a_mapping_and_of_keyword_arguments_is_recorded(tmp_path: Path) -> None:
    module = Columns({"work": 3, "age": 5, "city": 2}, size=4, colour=2)
    rows = [{name: torch.tensor(n % 2) for name in module.columns} for n in range(4)]
    Trainer(max_steps=1, run_dir=tmp_path, progress=False).fit(module, rows, batch_size=4)
    again = Columns.load_from_checkpoint(tmp_path)
    assert list(again.columns) == ["work", "age", "city", "size", "colour"]
    batch = torch.utils.data.default_collate(rows)
    assert torch.equal(again(batch), module(batch))


def test_a_whole_number_of_any_size_is_recorded(tmp_path: Path) -> None:
    _fit(Regression(6, large=2**70), run_dir=tmp_path)
    assert Regression.load_from_checkpoint(tmp_path).rest == {"large": 2**70}


def test_arguments_are_recorded_where_a_class_with_its_own_new_passes_none_on(tmp_path: Path) -> None:
    class Own(Regression):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls)

    class Further(Own):
        pass

    for kind in (Own, Further):
        _fit(kind(6, depth=2), run_dir=tmp_path / kind.__name__)
        again = kind.load_from_checkpoint(tmp_path / kind.__name__)
        assert (again.layers[0].out_features, again.rest) == (6, {"depth": 2})


def test_arguments_in_a_checkpoint_of_an_earlier_version_are_read() -> None:
    entries = {"arguments": {"a": {"x": 1}, "pair": [8, 4]}, "tuples": ["pair"], "unrecorded": ["act"]}
    assert read(entries) == ({"a": {"x": 1}, "pair": (8, 4)}, ["act"])


def test_an_enumeration_is_not_recorded_because_it_would_come_back_as_a_text() -> None:
    for given in (Kind.WIDE, [Kind.WIDE], {"a": [Kind.WIDE]}, {Kind.WIDE: 1}):
        assert recorded(Regression(act=given)) == ({}, ["act"])


@pytest.mark.parametrize("given", [Counter("aab"), defaultdict(int, a=1), {"a": Counter("aab")}])
def test_a_dict_with_values_of_its_own_is_not_recorded_because_it_would_come_back_without_them(given: Any) -> None:
    assert recorded(Regression(act=given)) == ({}, ["act"])


def test_an_argument_whose_name_is_a_further_keyword_argument_too_is_not_recorded() -> None:
    class Positional(Regression):
        def __init__(self, width: int, /, **rest: Any) -> None:
            super().__init__(width)
            self.rest = rest

    assert recorded(Positional(6, depth=2)) == ({"width": 6, "depth": 2}, [])
    assert recorded(Positional(6, width=5, depth=2)) == ({"depth": 2}, ["width"])


def test_an_entry_that_json_cannot_hold_is_missed_though_the_constructor_takes_it_out() -> None:
    class Takes(Regression):
        def __init__(self, options: Any) -> None:
            super().__init__()
            self.act = options.pop("act", None) or options["inside"].pop("act")

    for options in ({"act": torch.nn.Tanh, "width": 3}, {"inside": {"act": torch.nn.Tanh}}):
        assert recorded(Takes(options)) == ({}, ["options"])


def test_a_configuration_whose_entries_are_attributes_is_taken_and_recorded() -> None:
    class Attributes(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]  # a KeyError where an AttributeError is usual

    given = Attributes(width=6, inside=Attributes(depth=2))
    assert recorded(Regression(act=given)) == ({"act": given}, [])


def test_a_mapping_is_recorded_as_it_was_given_though_the_constructor_takes_from_it(tmp_path: Path) -> None:
    _fit(Configured({"width": 6}), run_dir=tmp_path)
    assert Configured.load_from_checkpoint(tmp_path).layers[0].out_features == 6


def test_a_module_is_loaded_with_its_recorded_arguments(tmp_path: Path) -> None:
    module = Regression(6, depth=2)
    checkpoint = _fit(module, run_dir=tmp_path).checkpoint
    for path in (checkpoint, tmp_path, str(tmp_path)):
        again = Regression.load_from_checkpoint(path)
        assert again.layers[0].out_features == 6
        assert again.rest == {"depth": 2}
        assert _same(module, again)


def test_overrides_win_over_recorded_arguments(tmp_path: Path) -> None:
    _fit(Regression(6, rate=0.5, depth=2), run_dir=tmp_path)
    again = Regression.load_from_checkpoint(tmp_path, rate=0.25, depth=5, new=1)
    assert (again.rate, again.rest) == (0.25, {"depth": 5, "new": 1})


def test_an_argument_that_was_not_recorded_has_to_be_given(tmp_path: Path) -> None:
    _fit(Regression(act=torch.nn.ReLU()), run_dir=tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"the constructor arguments act of Regression could not be recorded; pass them as well: load_from_checkpoint\(\.\.\., act=\.",
    ):
        Regression.load_from_checkpoint(tmp_path)
    assert Regression.load_from_checkpoint(tmp_path, act=3).act == 3


def test_arguments_without_a_name_are_recorded_too(tmp_path: Path) -> None:
    module = Perceptron(3, 5, 1, bias=False)
    _fit(module, run_dir=tmp_path)
    assert _same(module, Perceptron.load_from_checkpoint(tmp_path))


def test_an_override_that_the_constructor_lacks_is_refused(tmp_path: Path) -> None:
    _fit(Perceptron(3, 1), run_dir=tmp_path)
    with pytest.raises(
        ConfigurationError,
        match="load_from_checkpoint: Perceptron has no constructor argument 'bia'; did you mean 'bias'",
    ):
        Perceptron.load_from_checkpoint(tmp_path, bia=False)


def test_a_recorded_argument_that_the_class_no_longer_has_is_left_out(tmp_path: Path) -> None:
    _fit(Perceptron(3, 1, bias=True), run_dir=tmp_path)

    class Later(Perceptron):
        def __init__(self, first: int, *sizes: int) -> None:
            super().__init__(first, *sizes)

    assert Later.load_from_checkpoint(tmp_path).layers[0].in_features == 3


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    _fit(Regression(6), run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"model/layers.0.weight has shape \(6, 3\), but \(9, 3\) in this module"):
        Regression.load_from_checkpoint(tmp_path, width=9)


def test_a_model_built_late_is_loaded(tmp_path: Path) -> None:
    class Late(Regression):
        def __init__(self) -> None:
            TrainModule.__init__(self)
            self.rate = 0.001

        def configure_model(self) -> None:
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 1))

    module = Late()
    _fit(module, run_dir=tmp_path)
    assert _same(module, Late.load_from_checkpoint(tmp_path))


def test_loading_on_a_module_instead_of_its_class_is_refused(tmp_path: Path) -> None:
    module = Perceptron(2, 1)
    with pytest.raises(ConfigurationError, match=r"module = Perceptron\.load_from_checkpoint\(path\)"):
        module.load_from_checkpoint(tmp_path)
    assert hasattr(module, "load_from_checkpoint")
    assert "the checkpoint at `path`" in (Perceptron.load_from_checkpoint.__doc__ or "")
