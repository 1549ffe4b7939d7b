"""One test per wrong optimizer, data, place or moment: the message, and that no step ran before it if possible."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pandas
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from fabricate import (
    BatchSizeFinder,
    Callback,
    CheckpointError,
    ConfigurationError,
    EarlyStopping,
    FabricateError,
    Trainer,
    TrainModule,
)
from fabricate.training.process import environment_restored
from tests.support.wrong import ROWS, Regression, answering, refused, wrong_module

# ------------------------------------------------------------------------------------------------------------------- optimizers


def _optimizers(
    configure: Callable[[Any], Any], answer: Callable[[Any, torch.Tensor], Any] = lambda self, loss: loss
) -> Any:
    module = answering(answer)
    type(module).configure_optimizers = configure
    return module


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class _Wrapper(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda self: None, "configure_optimizers returned NoneType"),
        (lambda self: {}, "configure_optimizers returned no optimizer"),
        (lambda self: [_sgd(self.parameters())] * 3, "optimizer 'main.SGD2' is listed twice"),
        (lambda self: [_sgd(self.parameters()), 0.5, 1, 2], "configure_optimizers returned list"),
        (
            lambda self: {"optimizer": _sgd(self.parameters()), "lr_scheduler": {}},
            "returned a form that only Lightning accepts. Return (opt",
        ),
        (
            lambda self: ([_sgd(self.parameters())], []),
            "configure_optimizers returned a form that only Lightning accepts",
        ),
        (
            lambda self: (_sgd(self.parameters()), {"scheduler": 1}),
            "configure_optimizers returned a form that only Lightning accepts",
        ),
        (
            lambda self: [{"optimizer": _sgd(self.parameters()), "lr_scheduler": {}}, {"optimizer": 1}],
            "configure_optimizers returned a form that only Lightning accepts",
        ),
        (
            lambda self: (_sgd(self.parameters()), torch.optim.lr_scheduler.StepLR),
            "the scheduler of 'main' is the class StepLR; return an object, StepLR(optimizer, ...)",
        ),
        (lambda self: {"a": "adam"}, "configure_optimizers returned str for 'a'"),
        (lambda self: (_sgd(self.parameters()), 0.5), "the scheduler of 'main' is float; it needs step()"),
        (lambda self: torch.optim.LBFGS(self.parameters()), "LBFGS evaluates the loss several times per update"),
        (
            lambda self: _sgd([torch.zeros(2, requires_grad=True)]),
            "optimizer 'main' holds a parameter of shape (2,) that the module does not have",
        ),
        (
            lambda self: _sgd([p.requires_grad_(p.ndim > 5) for p in self.parameters()]),
            "optimizer 'main' holds no trainable parameter",
        ),
        (lambda self: dict.fromkeys(("a", "b"), _sgd(self.parameters())), "optimizer 'b' is listed twice"),
        (
            lambda self: _Wrapper(_sgd(self.parameters())),
            "optimizer 'main', _Wrapper, is not complete ('_Wrapper' object has no attribute",
        ),
    ],
)
def test_a_wrong_optimizer_is_refused_before_the_first_step(configure: Any, message: str) -> None:
    refused(message, module=_optimizers(configure))


@pytest.mark.parametrize("recurse", [True, False])
def test_a_module_whose_parameters_method_leaves_some_out_is_refused(recurse: bool) -> None:
    class Trained(Regression):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([self.layer.weight])

    class OfItself(Regression):
        def parameters(self) -> Any:  # type: ignore[override]
            return super().parameters()

    kind = Trained if recurse else OfItself
    refused(
        f"{kind.__name__} overrides parameters(): torch, Accelerate and fabricate expect all parameters", module=kind()
    )


def test_a_module_whose_parameters_method_gives_all_is_trained() -> None:
    class Counting(Regression):
        def parameters(self, recurse: bool = True) -> Any:
            yield from super().parameters(recurse)

    module = Counting()
    Trainer(max_steps=1, progress=False).fit(module, ROWS, batch_size=2)
    assert module.ran


@pytest.mark.parametrize("which", ["optimizer", "scheduler"])
def test_what_accelerate_prepared_for_training_is_refused(which: str) -> None:
    def configure(self: Any) -> Any:
        optimizer = _sgd(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        prepared = accelerate.optimizer.AcceleratedOptimizer(optimizer)
        if which == "optimizer":
            return prepared
        return optimizer, accelerate.scheduler.AcceleratedScheduler(schedule, prepared)

    kind = "optimizer 'main' is AcceleratedO" if which == "optimizer" else "the scheduler of 'main' is AcceleratedS"
    try:
        refused(f"configure_optimizers: {kind}", module=_optimizers(configure))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_an_optimizer_over_no_parameters_is_refused_with_the_number_there_is() -> None:
    message = (
        "optimizer without parameters (optimizer got an empty parameter list), although the module has 2 trainable ones"
    )
    refused(message, module=_optimizers(lambda self: _sgd([])))


def _two(self: Any) -> dict[str, torch.optim.Optimizer]:
    return {"weight": _sgd([self.layer.weight]), "bias": _sgd([self.layer.bias])}


def test_several_optimizers_that_share_a_parameter_need_a_name_from_training_step() -> None:
    message = (
        "the optimizers are weight, all, and weight and all both hold layer.weight, so they cannot step together: return "
        "{'loss': ..., 'optimizer': name} from training_step"
    )
    overlapping = _optimizers(lambda self: {"weight": _sgd([self.layer.weight]), "all": _sgd(self.parameters())})
    refused(message, module=overlapping, forwards=1)


def test_a_wrong_optimizer_name_is_refused_with_the_nearest() -> None:
    module = _optimizers(_two, lambda self, loss: {"loss": loss, "optimizer": "weights"})
    refused("returned optimizer='weights'; did you mean 'weight'?; there are weight, bias", module=module, forwards=1)


def test_an_optimizer_that_changes_inside_a_window_is_refused() -> None:
    module = _optimizers(_two, lambda self, loss: {"loss": loss, "optimizer": "weight" if self.ran % 2 else "bias"})
    message = "training_step returned optimizer='bias', but earlier micro-batches of this update have"
    refused(message, module=module, forwards=2, gradient_accumulation_steps=2)


def test_total_steps_of_data_without_length_is_an_error() -> None:
    module = _optimizers(lambda self: _sgd(self.parameters()) if self.trainer.total_steps else None)
    refused(
        "total_steps is not known: train has no length; set max_steps in the Trainer",
        module=module,
        train=(row for row in ROWS),
        max_steps=None,
        max_epochs=1,
    )


def test_a_plateau_scheduler_without_val_loss_is_an_error() -> None:
    def configure(self: Any) -> Any:
        optimizer = _sgd(self.parameters())
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    module = _optimizers(configure)
    type(module).validation_step = lambda self, batch: {"accuracy": 1.0}
    message = "ReduceLROnPlateau needs val_loss and validation gave val_accuracy; return it from validation_step, or name another"
    refused(message, module=module, val=ROWS[:2], validate_every=1, forwards=1)


# --------------------------------------------------------------------------------------------------------------------- the data


@pytest.mark.parametrize(
    ("train", "fit", "message"),
    [
        (None, {}, "train=None: give a DataLoader, a dataset or an iterable of batches"),
        (
            torch.utils.data.DataLoader([], batch_size=2),
            {},
            "train has no rows. Check the path, the split, and any filter",
        ),
        (torch.utils.data.TensorDataset(torch.zeros(0, 3)), {"batch_size": 2}, "train has no rows"),
        ([], {}, "train has no rows"),
        (
            torch.utils.data.TensorDataset(torch.zeros(4, 3)),
            {},
            "train is a data set, so a batch size is needed. Pass batch_size=...",
        ),
        (torch.utils.data.DataLoader(ROWS, batch_size=2), {"batch_size": 4}, "batch_size=4 has no effect"),
        ({"a": 1}, {}, "train is a dict, which holds no rows to read"),
        ((torch.zeros(4, 3), torch.zeros(4, 1)), {"batch_size": 2}, "train is a tuple of 2 tensors or arrays"),
        ([torch.zeros(9, 3), np.zeros(9)], {"batch_size": 2}, "train is a list of 2 tensors or arrays"),
        (
            pandas.DataFrame({"a": [1.0, 2.0]}),
            {"batch_size": 2},
            "train is a DataFrame, whose rows cannot be read by",
        ),
        ("train.csv", {}, "train is a str, which holds no rows to read"),
        (3, {}, "train is a int"),
        (ROWS, {"batch_size": 0}, "batch_size=0 (for train) must be a whole number, 1 or more"),
        (ROWS, {"num_workers": -1}, "num_workers=-1 (for train) must be a whole number, 0 or more"),
    ],
)
def test_wrong_training_data_is_refused_before_the_first_step(train: Any, fit: dict[str, Any], message: str) -> None:
    refused(message, train=train, fit=fit)


def test_a_batch_size_beside_a_training_loader_is_that_of_the_validation_set() -> None:
    class Sizes(Regression):
        def validation_step(self, batch: Any) -> Any:
            self.sizes.append(len(batch[0]))
            return {"loss": self.training_step(batch)}

    module, rows = Sizes(), torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.zeros(4, 1))
    module.sizes = []
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    Trainer(max_steps=1, progress=False).fit(module, loader, rows, batch_size=2)
    assert set(module.sizes) == {2}


def test_a_search_for_the_batch_size_of_a_loader_is_refused_also_beside_a_validation_set() -> None:
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    with pytest.raises(
        ConfigurationError, match=r"batch_size=BatchSizeFinder\(\) has no effect: train is a DataLoader"
    ):
        Trainer(max_steps=1, progress=False).fit(Regression(), loader, ROWS, batch_size=BatchSizeFinder())


def test_a_validation_after_the_fit_needs_no_metric_of_early_stopping() -> None:
    class Evaluated(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": self.training_step(batch)}

    trainer = Trainer(max_steps=1, validate_every=1, progress=False, plugins=[EarlyStopping("val_a_loss")])
    module = Evaluated()
    trainer.fit(module, ROWS, {"a": ROWS, "b": ROWS}, batch_size=4)
    assert trainer.validate(module, ROWS, batch_size=4).keys() == {"val_loss"}


class Growing(torch.utils.data.Dataset):  # type: ignore[type-arg]
    rows = 4

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return ROWS[index % len(ROWS)]


def test_columns_of_one_shape_that_are_read_as_rows_get_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Counts(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            assert batch.shape[1:] == (9, 3)
            return self.layer.weight.square().sum()

    for columns, noted in (([torch.zeros(9, 3)] * 2, True), ([torch.zeros(9, 3)] * 5, False)):
        Trainer(max_steps=1, progress=False).fit(Counts(), columns, batch_size=2)
        assert ("is read as one row. If they are columns, pass" in capsys.readouterr().out) == noted


def test_data_that_grows_during_a_fit_gets_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Grow(Callback):
        def on_epoch_end(self) -> None:
            data.rows = 6

    data = Growing()
    result = Trainer(max_epochs=3, progress=False, plugins=[Grow()]).fit(Regression(), data, batch_size=2)
    assert result.steps == 6
    text = "note: train has 6 rows now, but had 4 when the fit began. The fit does not read the rows that were added"
    assert capsys.readouterr().err.count(text) == 1


def test_an_iterator_that_gives_nothing_is_an_error() -> None:
    refused("train has no rows. Check the path", train=iter([]))


def test_an_iterator_that_is_used_up_is_an_error() -> None:
    batches = iter([(torch.zeros(2, 3), torch.zeros(2, 1))])
    refused("train is a one-shot iterator (list_iterator), which its first pass uses up", train=batches, forwards=1)


def test_an_iterator_that_later_epochs_would_read_again_is_refused_before_the_first_step() -> None:
    batches = [(torch.zeros(2, 3), torch.zeros(2, 1))]
    message = "is a one-shot iterator (list_iterator), and max_epochs=2 reads it more than once"
    refused(f"train {message}", train=iter(batches), max_steps=None, max_epochs=2)
    module = wrong_module(validation_step=lambda self, batch: None)
    refused(f"val {message}", module=module, train=batches, val=iter(batches), max_steps=None, max_epochs=2)


def test_validation_data_without_validation_step_is_refused() -> None:
    refused("val is given and Regression has no validation_step; define validation_step(self, batch)", val=ROWS)


def test_empty_validation_data_is_refused() -> None:
    module = wrong_module(validation_step=lambda self, batch: None)
    refused("val has no rows", module=module, val=torch.utils.data.DataLoader([], batch_size=2))
    refused("val['extra'] has no rows", module=module, val={"extra": torch.utils.data.DataLoader([], batch_size=2)})


def test_a_validation_step_that_returns_no_mapping_is_an_error() -> None:
    module = wrong_module(validation_step=lambda self, batch: self.loss(batch).expand(2))
    message = "Wrong.validation_step returned Tensor; return a mapping of metrics, the loss as one number, or nothing"
    refused(message, module=module, val=ROWS[:2], validate_first=True)


def test_an_evaluation_of_no_data_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"data=\{\}: name at least one data set"):
        Trainer().validate(wrong_module(validation_step=lambda self, batch: None), {})


@pytest.mark.parametrize(
    ("stage", "step"), [("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")]
)
def test_an_evaluation_without_its_step_is_refused(stage: str, step: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Regression has no {step}; define {step}\\(self, batch\\)"):
        getattr(Trainer(), stage)(Regression(), ROWS, batch_size=2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            torch.zeros(3),
            r"predict_step returned \(3,\) for a batch of 2 rows; the leading dimension has to be the rows",
        ),
        (torch.tensor(0.0), r"predict_step returned \(\) for a batch of 2 rows"),
        ([1], "predict_step returned 1 for a batch of 2 rows"),
        ("text", "predict_step returned str; return a tensor, an array, a list, or a mapping or tuple of them"),
    ],
)
def test_predictions_that_do_not_fit_the_rows_are_an_error(answer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer().predict(wrong_module(predict_step=lambda self, batch: answer), ROWS, batch_size=2)


# ------------------------------------------------------------------------------------------------------------- places and paths


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("")
    refused(f"run_dir='{file}' is a file; give a directory", run_dir=file)


def test_a_checkpoint_to_resume_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    message = f"resume='{tmp_path / 'gone'}' does not exist; give 'auto', 'never' or the path of a checkpoint"
    refused(message, error=CheckpointError, fit={"resume": tmp_path / "gone"})


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    message = f"resume: '{tmp_path}' is neither a checkpoint nor a run directory with one. Give RUN_DIR or"
    refused(message, error=CheckpointError, fit={"resume": str(tmp_path)})


def test_weights_of_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither a checkpoint nor a run directory with one"):
        Regression.load_from_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors holds weights only: import_checkpoint\(.*load_from_checkpoint\(out\) loads this into a module",
    ):
        Regression.load_from_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"neither a checkpoint nor a run directory.*model\.safetensors holds weights only"
    ):
        Regression.load_from_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("which", ["best", "last"])
def test_best_or_last_without_a_run_dir_is_refused(which: str) -> None:
    module = wrong_module(validation_step=lambda self, batch: None)
    with pytest.raises(
        ConfigurationError, match=f"checkpoint='{which}' means a checkpoint in run_dir, but run_dir is not set; give"
    ):
        Trainer().validate(module, ROWS, which, batch_size=2)


@pytest.mark.parametrize("which", ["best", "last"])
def test_best_or_last_of_an_empty_run_dir_is_refused(which: str, tmp_path: Path) -> None:
    module = wrong_module(validation_step=lambda self, batch: None)
    with pytest.raises(CheckpointError, match=f"checkpoint='{which}': .* has no checkpoint"):
        Trainer(run_dir=tmp_path).validate(module, ROWS, which, batch_size=2)


def test_saving_over_something_is_refused(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_step(self, trainer: Trainer) -> None:
            trainer.save(tmp_path)

    refused(
        f"save('{tmp_path}'): this path exists already; give a new one",
        error=CheckpointError,
        plugins=[Saves()],
        forwards=1,
    )


# --------------------------------------------------------------------------------------------------- at the wrong time or place


@pytest.mark.parametrize("name", ["accelerator", "step", "epoch", "progress", "metrics", "total_steps", "optimizers"])
def test_attributes_of_a_run_do_not_exist_before_it(name: str) -> None:
    with pytest.raises(FabricateError, match="while fit, validate, test or predict is running"):
        getattr(Trainer(max_steps=1), name)


@pytest.mark.parametrize("call", [Trainer.request_save, Trainer.request_eval, Trainer.stop])
def test_requests_outside_of_a_run_are_refused(call: Any) -> None:
    with pytest.raises(FabricateError, match="while fit, validate, test or predict is running"):
        call(Trainer(max_steps=1))


def test_a_modules_trainer_does_not_exist_before_a_run() -> None:
    with pytest.raises(FabricateError, match=r"Regression\.trainer exists only while a Trainer runs the module"):
        _ = Regression().trainer


def test_a_fit_inside_a_fit_is_refused() -> None:
    class Nests(Callback):
        def on_step(self, trainer: Trainer) -> None:
            trainer.fit(Regression(), ROWS, batch_size=2)

    refused(
        "one fit at a time. A hook asks for an evaluation with trainer.request_eval()",
        error=FabricateError,
        plugins=[Nests()],
        forwards=1,
    )


def test_another_trainer_takes_no_module_out_of_a_fit() -> None:
    class Nests(Callback):
        def on_step(self, module: TrainModule) -> None:
            Trainer(progress=False).validate(copy.deepcopy(module), ROWS, batch_size=2)
            module.log("still", 1.0)
            Trainer(progress=False).validate(module, ROWS, batch_size=2)

    refused(
        "Wrong is in use by the running fit or evaluation of another Trainer: pass copy.deepcopy",
        module=wrong_module(validation_step=lambda self, batch: {"loss": self.loss(batch)}),
        error=FabricateError,
        plugins=[Nests()],
        forwards=1,
    )


def test_a_fit_beside_one_of_another_thread_is_refused() -> None:
    messages: list[str] = []

    def fit(*plugins: object) -> int:
        return Trainer(max_steps=1, progress=False, plugins=plugins).fit(Regression(), ROWS, batch_size=2).steps

    def other() -> None:
        with pytest.raises(FabricateError) as caught:
            fit()
        messages.append(str(caught.value))

    class Beside(Callback):
        def on_step(self) -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    assert fit(Beside()) == 1
    assert "running in another thread of this process" in messages[0]
    thread = threading.Thread(target=lambda: messages.append(str(fit())))
    thread.start()
    thread.join()
    assert messages[1:] == ["1"]


def test_a_loader_that_accelerate_prepared_is_refused() -> None:
    loader = accelerate.data_loader.prepare_data_loader(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3)), batch_size=2),
        num_processes=1, process_index=0, put_on_device=False,
    )  # fmt: skip
    try:
        refused("that accelerate has already split over the ranks", train=loader)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_a_launcher_that_tells_another_strategy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRICATE_STRATEGY", "single")
    refused("strategy='ddp' is set in the Trainer and 'single' by", strategy="ddp")


def test_a_launcher_that_tells_another_accumulation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    refused("gradient_accumulation_steps=2", gradient_accumulation_steps=2)


# ------------------------------------------------------------------------------------------------ what the loop does and users may not


def _own_backward(self: Any, loss: torch.Tensor) -> torch.Tensor:
    loss.backward(retain_graph=True)
    return loss


def _own_zero_grad(self: Any, loss: torch.Tensor) -> torch.Tensor:
    self.zero_grad()
    return loss


def test_a_backward_of_the_users_own_is_refused() -> None:
    message = "Wrong.training_step, or a hook before it, calls backward, and the gradients would be added twice"
    refused(message, module=answering(_own_backward), forwards=1)


def test_a_step_of_the_users_own_is_refused() -> None:
    class Steps(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.optimizer.step()
            return super().training_step(batch)

        def configure_optimizers(self) -> Any:
            self.optimizer = super().configure_optimizers()
            return self.optimizer

    with pytest.raises(
        ConfigurationError, match=r"Steps\.training_step, or a hook before it, calls step of an optimizer\."
    ):
        Trainer(max_steps=1, progress=False).fit(Steps(), ROWS, batch_size=2)


@pytest.mark.parametrize("sanity_batches", [0, 2])
def test_a_step_of_an_optimizer_in_an_evaluation_is_refused(sanity_batches: int) -> None:
    class Steps(Regression):
        def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
            self.optimizer.step()
            return {"loss": self.training_step(batch)}

        def configure_optimizers(self) -> Any:
            self.optimizer = super().configure_optimizers()
            return self.optimizer

    trainer = Trainer(max_steps=1, progress=False, sanity_batches=sanity_batches, validate_every=1)
    with pytest.raises(
        ConfigurationError, match=r"Steps steps an optimizer in an evaluation \(validate\), so it would"
    ):
        trainer.fit(Steps(), ROWS, ROWS, batch_size=2)


def test_a_module_that_an_evaluation_puts_in_training_mode_gets_a_note_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Trains(Regression):
        def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
            self.train()
            return {"loss": self.training_step(batch)}

    Trainer(max_steps=4, progress=False, validate_every=1).fit(Trains(), ROWS, ROWS, batch_size=2)
    assert capsys.readouterr().err.count("note: Trains is in training mode at the end of an evaluation (validate)") == 1


class Clips(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        self.clip()
        return super().training_step(batch)

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class ClipsValues(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        for parameter in self.parameters():
            with contextlib.suppress(RuntimeError):  # torch refuses a parameter without gradient
                torch.nn.utils.clip_grad_value_(parameter, 1.0)
        return super().training_step(batch)


class ClipsItsOwn(Clips):
    def training_step(self, batch: Any) -> torch.Tensor:
        probe = torch.nn.Linear(1, 1)
        probe(torch.ones(1)).backward()
        torch.nn.utils.clip_grad_norm_(probe.parameters(), 1.0)
        return Regression.training_step(self, batch)


class ClipsLater(Regression):
    def on_before_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


@pytest.mark.parametrize(
    ("kind", "called"),
    [(Clips, "clip_grad_norm_"), (ClipsValues, "clip_grad_value_"), (ClipsItsOwn, ""), (ClipsLater, "")],
)
def test_gradients_that_a_step_clips_too_early_get_a_note(
    kind: Any, called: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(max_steps=1, progress=False).fit(kind(), ROWS, batch_size=2)
    found = [line for line in capsys.readouterr().out.splitlines() if "but gradients are computed after" in line]
    assert len(found) == bool(called)
    assert not found or f"note: {kind.__name__}.training_step calls {called}, but" in found[0]


@pytest.mark.parametrize(("divisor", "accumulation", "noted"), [(2, 2, True), (2, 4, False), (1, 1, False)])
def test_a_loss_that_is_divided_by_the_accumulation_gets_a_note(
    divisor: int, accumulation: int, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def halved(self: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss / 2

    class Divides(Regression):
        accumulation_steps = divisor

        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch) / self.accumulation_steps

    trainer = Trainer(max_steps=1, progress=False, gradient_accumulation_steps=accumulation)
    for module in (Divides(), answering(halved)):  # a loss may be halved for another reason
        trainer.fit(module, ROWS, batch_size=1)
    notes = [line for line in capsys.readouterr().err.splitlines() if "divides its loss" in line]
    assert len(notes) == noted
    assert (
        not notes or "note: Divides.training_step divides its loss by 2 (accumulation_steps), and the loop" in notes[0]
    )


def test_gradients_that_are_cleared_between_micro_batches_are_refused() -> None:
    message = "the gradients of earlier micro-batches of this update are gone: Wrong.training_step, or"
    refused(message, module=answering(_own_zero_grad), forwards=2, gradient_accumulation_steps=2)
    Trainer(max_steps=2, progress=False).fit(
        answering(_own_zero_grad), ROWS, batch_size=2
    )  # nothing is lost without accumulation


def test_a_step_that_returns_nothing_for_a_later_batch_is_refused() -> None:
    module = answering(lambda self, loss: loss if self.trainer.step == 0 else None)
    refused("Wrong.training_step returned nothing; return the loss", module=module, forwards=2, max_steps=2)


def test_a_module_that_stays_in_eval_mode_gets_a_note_once(capsys: pytest.CaptureFixture[str]) -> None:
    module = answering(lambda self, loss: self.eval() and loss)
    Trainer(max_steps=3, progress=False).fit(module, ROWS, batch_size=2)
    assert (
        capsys.readouterr().err.count("note: Wrong is in eval mode since step 1, because a step or a hook called") == 1
    )


@pytest.mark.parametrize(("hook", "forwards"), [("on_fit_start", 0), ("on_step", 2)])
def test_a_parameter_that_a_hook_replaces_is_refused(hook: str, forwards: int) -> None:
    def replace(self: Any) -> None:
        self.layer = torch.nn.Linear(3, 1)

    refused(
        "that the module does not have. Make it (or its layer) an attribute of the module",
        module=wrong_module(**{hook: replace}),
        forwards=forwards,
    )


def test_parameters_that_look_trained_and_are_not_are_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    def training_step(self: Any, batch: Any) -> torch.Tensor:
        return self.loss(batch) + self.head(self.towers[0](batch[0])).square().mean()

    module = wrong_module(training_step=training_step, configure_optimizers=lambda self: _sgd(self.layer.parameters()))
    module.head, module.towers, module.teachers = (
        torch.nn.Linear(3, 1),
        [torch.nn.Linear(3, 3)],
        {"a": torch.nn.Linear(3, 3)},
    )
    module.teachers["a"].requires_grad_(False)
    Trainer(max_steps=1, progress=False).fit(module, ROWS, batch_size=2)
    printed = capsys.readouterr().out
    assert "note: not in any optimizer, so they are not trained: head.weight, head.bias; pass them to one" in printed
    assert (
        "note: Wrong.towers is a list of layers, which torch does not see: they are not trained, moved or saved"
        in printed
    )
    assert "teachers" not in printed


def test_a_row_that_cannot_be_read_is_not_blamed_on_the_batch_before() -> None:
    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise ValueError("row 3")
            return ROWS[index]

    with pytest.raises(ValueError, match="row 3") as caught:
        Trainer(max_steps=2, progress=False, gradient_accumulation_steps=2).fit(
            Regression(), Broken(), batch_size=1, shuffle=False
        )
    assert caught.value.__notes__ == [
        "while reading row 3 of train",
        "while training: rank 0, epoch 0, step 2, micro-batch 3",
    ]


def test_a_layer_that_is_wrapped_for_several_devices_gets_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    module = Regression()
    name, layer = next(iter(module.named_children()))
    for wrapped in (torch.nn.DataParallel(layer), layer):
        setattr(module, name, wrapped)
        Trainer(max_steps=1, progress=False).fit(module, ROWS, batch_size=2)
        note = f"note: Regression.{name} is a DataParallel, but fabricate itself divides the work over the ranks."
        assert (note in capsys.readouterr().out) is (wrapped is not layer)


def test_a_loop_over_fit_is_told_that_each_fit_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    def notes(lengths: list[int], **options: Any) -> list[str]:
        module, lines = Regression(), []
        for length in lengths:
            Trainer(max_epochs=1, progress=False).fit(module, ROWS[:length], batch_size=2, **options)
            lines += [line for line in capsys.readouterr().out.splitlines() if "is fitted for the third time" in line]
        return lines

    (note,) = notes([4, 4, 4, 4])
    assert "Each fit begins with new optimizers and schedules, and with rows in the same order. To train" in note
    (note,) = notes([4, 4, 4], shuffle=False)
    assert "Each fit begins with new optimizers and schedules. To train for several epochs, call fit once" in note
    assert notes([4, 4, 6, 6]) == []


ACC = 2


def test_a_loss_that_is_divided_by_a_constant_acc_gets_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Divides(Regression):
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch) / ACC

    Trainer(max_steps=1, progress=False, gradient_accumulation_steps=ACC).fit(Divides(), ROWS, batch_size=2)
    assert "note: Divides.training_step divides its loss by 2 (ACC)" in capsys.readouterr().err


def test_a_loss_that_is_scaled_by_a_grad_scaler_is_refused() -> None:
    class Scales(Regression):
        def __init__(self, enabled: bool) -> None:
            super().__init__()
            self.scaler = torch.amp.GradScaler("cpu", enabled=enabled)

        def training_step(self, batch: Any) -> Any:
            return self.scaler.scale(super().training_step(batch))

    refused(
        "training_step calls scale of the GradScaler scaler, but nothing divides the gradients", module=Scales(True)
    )
    Trainer(max_steps=1, progress=False).fit(Scales(False), ROWS, batch_size=2)


@pytest.mark.parametrize(("frozen", "notes"), [(False, 1), (True, 0)])
def test_a_part_that_an_evaluation_by_hand_leaves_in_eval_mode_gets_a_note(
    frozen: bool, notes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Evaluates(Regression):
        def on_epoch_end(self) -> None:
            self.part.eval()

    module = Evaluates()
    module.part = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())
    module.part.requires_grad_(not frozen)
    Trainer(max_epochs=3, progress=False).fit(module, ROWS, batch_size=2)
    text = "note: part, part.0 went into eval mode up to step"
    assert capsys.readouterr().err.count(text) == notes


# ---------------------------------------------------------------------------------------------------------------- wrong objects


def test_a_list_of_loaders_is_refused_with_what_to_do() -> None:
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"val is a list of 2 DataLoader objects. Name them in a mapping"):
        Trainer(max_steps=2, progress=False).fit(Regression(), ROWS, [loader, loader], batch_size=2)
    with pytest.raises(
        ConfigurationError,
        match=r"train is a list of 2 DataLoader objects. Pass one that gives the rows or batches of all",
    ):
        Trainer(max_steps=2, progress=False).fit(Regression(), [loader, loader])


def test_a_compiled_module_is_refused_with_what_to_do() -> None:
    with environment_restored():
        compiled: Any = torch.compile(Regression(), backend="eager")
    with pytest.raises(ConfigurationError, match=r"pass the module as it was before, and set Trainer\(compile=True\)"):
        Trainer(max_steps=1).fit(compiled, ROWS, batch_size=2)


def test_whether_a_module_has_a_trainer_can_be_asked() -> None:
    module = Regression()
    assert not hasattr(module, "trainer")
    with pytest.raises(FabricateError, match="exists only while a Trainer runs the module"):
        module.trainer  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'trainr'"):
        module.trainr  # noqa: B018


@pytest.mark.parametrize("setting", ["collate_fn", "batch_size", "drop_last", "sampler"])
@pytest.mark.parametrize("argument", ["train", "val"])
def test_a_setting_of_a_loader_that_changes_in_a_fit_is_noted(
    setting: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    sampler = torch.utils.data.RandomSampler(rows)
    changed = {"collate_fn": lambda drawn: loader, "batch_size": 2, "drop_last": True, "sampler": sampler}

    class Changes(Callback):
        def on_epoch_start(self, epoch: int) -> None:
            if epoch == 1:
                setattr(loader if setting == "collate_fn" else loader.batch_sampler, setting, changed[setting])

    train, val = (loader, None) if argument == "train" else (list(rows), loader)
    trainer = Trainer(max_epochs=2, progress=False, plugins=[Changes()])
    trainer.fit(Validates(), train, val, **({} if argument == "train" else {"batch_size": 4}))
    text = f"note: {argument}: {setting} of the DataLoader changed after the fit began, which has no effect"
    assert capsys.readouterr().err.count(text) == 1


class Validates(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_step_that_is_assigned_in_a_fit_is_noted_and_one_assigned_before_runs(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Switches(Validates):
        def on_epoch_start(self, epoch: int) -> None:
            if epoch == 1:
                setattr(self, step, lambda batch: self.layer(batch[0]).square().mean())

    rows = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
    Trainer(max_epochs=2, progress=False).fit(Switches(), rows, rows, batch_size=4)
    assert (
        capsys.readouterr().err.count(f"note: {step} of Switches was assigned after the fit began, which has no effect")
        == 1
    )
    module = Validates()
    setattr(module, step, lambda batch: module.layer(batch[0]).square().mean() * 0 + 7)
    result = Trainer(max_epochs=1, progress=False).fit(module, rows, rows, batch_size=4)
    assert result.metrics["loss" if step == "training_step" else "val_loss"] == 7
    assert "was assigned" not in capsys.readouterr().err
