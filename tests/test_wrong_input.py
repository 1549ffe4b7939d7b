"""One test per wrong input: what the message says, and that no step ran before it where that is possible."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from fabricate import (
    Callback,
    CheckpointError,
    ConfigurationError,
    EarlyStopping,
    FabricateError,
    PluginError,
    Single,
    Trainer,
    TrainModule,
)

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Regression(TrainModule):
    """Counts its forwards in `ran`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.ran = 0

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any) -> Any:
        self.ran += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def _refused(
    message: str,
    *,
    module: Any = None,
    train: Any = ROWS,
    val: Any = None,
    error: type[Exception] = ConfigurationError,
    forwards: int = 0,
    fit: dict[str, Any] | None = None,
    **arguments: Any,
) -> None:
    """A fit with these settings ends with `message` (a part of it) after `forwards` calls of training_step."""
    module = Regression() if module is None else module
    loading = {"batch_size": 2} if train is ROWS else {}
    with pytest.raises(error) as caught:
        Trainer(**{"max_steps": 2, "progress": False, **arguments}).fit(module, train, val, **(loading | (fit or {})))
    assert message in str(caught.value)
    assert type(caught.value) is error
    assert getattr(module, "ran", 0) == forwards


def _module(**methods: Any) -> Any:
    return type("Wrong", (Regression,), methods)()


# ---------------------------------------------------------------------------------------------------------- Trainer's arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "dpp"}, "strategy='dpp' is not known; did you mean 'ddp'?; known: "),
        (
            {"strategy": 3},
            "strategy=3: give a name (ddp, fsdp, single), a name with options ('fsdp:offload=cpu') or a Strategy object",
        ),
        ({"strategy": Single}, "strategy=Single is a class; pass an object, Single(), or a name"),
        ({"strategy": "fsdp:offlod=cpu"}, "strategy='fsdp' has no option 'offlod'; did you mean 'offload'?"),
        (
            {"strategy": "ddp"},
            "strategy='ddp' needs 2 or more processes and 1 was started; start them with `fabricate run",
        ),
        ({"strategy": "fsdp"}, "strategy='fsdp' needs 2 or more processes and 1 was started"),
        ({"precision": "bf61"}, "precision='bf61' is not known; did you mean 'bf16'?; known: "),
        ({"precision": "fp16:init_scale=big"}, "precision='fp16': option init_scale='big' is not float"),
        ({"precision": "fp16:init_scale=0"}, "fp16: init_scale=0.0, growth_interval=2000: both have to be at least 1"),
        ({"global_batch_size": 3}, "global_batch_size=3 is no multiple of batch_size 2 x 1 ranks = 2"),
        (
            {"global_batch_size": 4, "gradient_accumulation_steps": 4},
            "global_batch_size=4 means gradient_accumulation_steps=2, but 4 is set",
        ),
        (
            {"max_steps": None},
            "neither max_steps nor max_epochs is set; say how long to train, for instance Trainer(max_epochs=3)",
        ),
        ({"limit_train_batches": 0}, "limit=0 (for train) must be a number of micro-steps"),
        ({"limit_train_batches": 1.5}, "limit=1.5 (for train)"),
        ({"trackers": ["tensorbord"]}, "trackers='tensorbord' is not known; did you mean 'tensorboard'?"),
        ({"trackers": [3]}, "trackers=3: give a name"),
        ({"trackers": ["tensorboard"]}, "need a place to write; set run_dir="),
        (
            {"trackers": ["comet_ml"], "run_dir": "unused"},
            "trackers='comet_ml': its package is not installed; run pip install",
        ),
    ],
)
def test_a_setting_that_cannot_run_is_refused_before_the_first_step(arguments: dict[str, Any], message: str) -> None:
    _refused(message, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"callbacks": []}, "Trainer has no argument 'callbacks'; use plugins=[...]"),
        (
            {"accumulate_grad_batches": 2},
            "Trainer has no argument 'accumulate_grad_batches'; use gradient_accumulation_steps=",
        ),
        ({"gradient_clip_val": 1.0}, "use max_grad_norm="),
        ({"devices": 2}, "use the launcher (fabricate run --nproc N)"),
        ({"output_dir": "x"}, "use run_dir="),
        ({"max_step": 2}, "Trainer has no argument 'max_step'; did you mean 'max_steps'?"),
        ({"nonsense": 2}, "Trainer has no argument 'nonsense'"),
        ({"max_steps": -1}, "max_steps=-1: give a whole number of at least 0, or None"),
        ({"max_steps": 1.5}, "max_steps=1.5: give a whole number"),
        ({"max_epochs": "3"}, "max_epochs='3': give a whole number"),
        ({"max_steps": True}, "max_steps=True: give a whole number"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: give a whole number of at least 1"),
        ({"global_batch_size": 0}, "global_batch_size=0: give a whole number of at least 1"),
        ({"max_grad_norm": 0}, "max_grad_norm=0: give a positive number, or None not to clip"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1': give a positive number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan: give a positive number"),
        ({"max_grad_value": -1}, "max_grad_value=-1: give a positive number, or None not to clip"),
        (
            {"max_grad_norm": 1.0, "max_grad_value": 0.5},
            "max_grad_norm=1.0 and max_grad_value=0.5 are both set; choose one of them",
        ),
        ({"nonfinite": "skipp"}, "nonfinite='skipp'; did you mean 'skip'?; give 'stop' or 'skip'"),
        ({"nonfinite": None}, "nonfinite=None; give 'stop' or 'skip'"),
        ({"seed": -1}, "seed=-1: give a whole number from 0 to 4294967295, or None"),
        ({"seed": 2**32}, "seed=4294967296: give a whole number"),
        ({"seed": 1.0}, "seed=1.0: give a whole number"),
        ({"seed": True}, "seed=True: give a whole number"),
        ({"save_every": "weekly"}, "save_every='weekly' is not a duration: write '500 steps'"),
        ({"save_every": 0}, "save_every=0: Every(steps=0): the number has to be positive"),
        ({"validate_every": "0.5 epochs"}, "validate_every='0.5 epochs': Every(epochs=0.5): epochs are whole numbers"),
        ({"log_every": None}, "log_every=None is not a duration"),
        ({"keep": 0}, "keep=0: give a number of at least 1, 'all', or a mapping such as {'last': 2,"),
        ({"keep": "best"}, "keep='best': give a number"),
        ({"keep": {"best": 2, "metrics": "x"}}, "keep={'best': 2, 'metrics': 'x'}: give a number"),
        ({"keep": {"best": 1, "mode": "lowest"}}, "give a number of at least 1, 'all', or a mapping"),
        ({"plugins": "ema"}, "plugins='ema': give a list, plugins=[...]"),
        ({"plugins": None}, "plugins=None: give a list"),
        (
            {"accept_changes": ["global_batchsize"]},
            "accept_changes='global_batchsize'; did you mean 'global_batch_size'?",
        ),
    ],
)
def test_a_wrong_argument_is_refused_when_the_trainer_is_built(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(
        ConfigurationError, match="^" + re.escape(message) if message.startswith(tuple("TLS")) else re.escape(message)
    ):
        Trainer(**arguments)


def test_an_unknown_plugin_is_refused_before_the_first_step() -> None:
    _refused(
        "plugins='no_such_plugin': no installed plugin has this name", error=PluginError, plugins=["no_such_plugin"]
    )


def test_a_misspelt_hook_is_refused_before_the_first_step() -> None:
    plugin = type("Watch", (Callback,), {"on_stepp": lambda self: None})()
    _refused("Watch.on_stepp is not a hook of fabricate; did you mean 'on_step'?", error=PluginError, plugins=[plugin])
    _refused("Wrong.on_stepp is not a hook", error=PluginError, module=_module(on_stepp=lambda self: None))


def test_a_class_as_plugin_is_refused() -> None:
    _refused("EarlyStopping is a class; pass an instance: EarlyStopping()", error=PluginError, plugins=[EarlyStopping])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "lowest"}, "EarlyStopping(mode='lowest'): give 'min' or 'max'"),
        ({"patience": 0}, "EarlyStopping(patience=0, min_delta=0.0): at least 1"),
        ({"patience": "3"}, "EarlyStopping(patience='3', min_delta=0.0): at least 1"),
        ({"min_delta": -1.0}, "EarlyStopping(patience=3, min_delta=-1.0): at least 1"),
    ],
)
def test_wrong_options_of_early_stopping_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        EarlyStopping(**arguments)


# ------------------------------------------------------------------------------------------------------------------- the module


def test_a_class_instead_of_a_module_is_refused() -> None:
    _refused("module=Regression (a class; pass an instance) is not a fabricate.TrainModule", module=Regression)


@pytest.mark.parametrize("module", [torch.nn.Linear(1, 1), 3])
def test_what_is_no_train_module_is_refused(module: Any) -> None:
    _refused(f"module={type(module).__name__} is not a fabricate.TrainModule; subclass TrainModule", module=module)


def test_a_module_without_super_init_is_refused() -> None:
    module = type("Forgets", (Regression,), {"__init__": lambda self: None})()
    with pytest.raises(
        ConfigurationError, match=r"^Forgets.__init__ does not call super\(\).__init__\(\); call it first$"
    ):
        Trainer(max_steps=1).fit(module, ROWS, batch_size=2)


def test_a_lazy_layer_without_a_shape_is_refused() -> None:
    module = Regression()
    module.late = torch.nn.LazyLinear(1)
    _refused("late.weight, late.bias: a lazy layer without a shape; run one batch through it before fit", module=module)


def test_a_missing_training_step_is_refused() -> None:
    _refused(
        "Wrong has no training_step; define training_step(self, batch) and return the loss",
        module=_module(training_step=TrainModule.training_step),
    )


def test_a_missing_configure_optimizers_is_refused() -> None:
    _refused(
        "Wrong has no configure_optimizers; return an optimizer from it, for instance torch.optim.AdamW(self.parameters()",
        module=_module(configure_optimizers=TrainModule.configure_optimizers),
    )


@pytest.mark.parametrize(
    ("method", "near"),
    [
        ("training_steps", "training_step"),
        ("configure_optimizer", "configure_optimizers"),
        ("validation_steps", "validation_step"),
    ],
)
def test_a_misspelt_method_is_refused(method: str, near: str) -> None:
    _refused(
        f"Wrong.{method} would never be called; did you mean '{near}'?", module=_module(**{method: lambda self: None})
    )


def test_lightnings_setup_is_refused() -> None:
    def setup(self: Any, stage: Any = None) -> None: ...

    _refused(
        "Wrong.setup is a Lightning hook that fabricate does not call; use configure_model()",
        module=_module(setup=setup),
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda self: None, "Wrong.training_step() takes no batch; define training_step(self, batch)"),
        (
            lambda self, batch, batch_idx, more: None,
            "the loop passes (batch) or (batch, batch_idx); remove the other arguments",
        ),
        (
            lambda self, batch, *, more: None,
            "the loop passes (batch) or (batch, batch_idx); remove the other arguments",
        ),
    ],
)
def test_a_training_step_with_other_arguments_is_refused(step: Any, message: str) -> None:
    _refused(message, module=_module(training_step=step))


def test_a_module_without_parameters_is_refused() -> None:
    module = _module(__init__=lambda self: TrainModule.__init__(self))
    _refused("Wrong has no trainable parameter; build layers in __init__ or configure_model", module=module)


# ------------------------------------------------------------------------------------------------- what training_step returns


def _step(answer: Callable[[Any, torch.Tensor], Any]) -> Any:
    def training_step(self: Any, batch: Any) -> Any:
        self.ran += 1
        return answer(self, self.loss(batch))

    return _module(training_step=training_step)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda self, loss: None, "Wrong.training_step returned nothing; return the loss"),
        (
            lambda self, loss: loss.item(),
            "Wrong.training_step returned float; return the loss as a 0-dim tensor, or a mapping with 'loss'",
        ),
        (lambda self, loss: (loss, 1), "Wrong.training_step returned tuple; return the loss as a 0-dim tensor"),
        (
            lambda self, loss: loss.repeat(2),
            "a tensor of shape (2,); reduce it to one number, for instance with .mean()",
        ),
        (
            lambda self, loss: loss.detach(),
            "a loss without gradient; compute it from the module's parameters, without detach() or no_grad()",
        ),
        (lambda self, loss: {"los": loss}, "returned a mapping with the keys ['los']; it has to hold 'loss'"),
        (
            lambda self, loss: {"loss": loss, "weigth": 1},
            "did you mean 'weight'?; record other values with self.log(name, value)",
        ),
        (lambda self, loss: {"loss": None}, "Wrong.training_step returned nothing; return the loss"),
        (
            lambda self, loss: self.log("a", torch.zeros(2)),
            "log('a'): a metric is one number, this tensor has shape (2,); reduce it first",
        ),
        (
            lambda self, loss: self.log("a", "text"),
            "log('a'): give a number, a 0-dim tensor or a torchmetrics object, not str",
        ),
        (lambda self, loss: self.log("a", 1, reduce="max"), "log('a'): reduce='max': give 'mean' or 'sum'"),
    ],
)
def test_a_wrong_answer_of_training_step_is_refused_at_the_first(answer: Any, message: str) -> None:
    _refused(message, module=_step(answer), forwards=1)


# ------------------------------------------------------------------------------------------------------------------- optimizers


def _optimizers(
    configure: Callable[[Any], Any], answer: Callable[[Any, torch.Tensor], Any] = lambda self, loss: loss
) -> Any:
    module = _step(answer)
    type(module).configure_optimizers = configure
    return module


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda self: None, "configure_optimizers returned NoneType"),
        (lambda self: {}, "configure_optimizers returned no optimizer"),
        (lambda self: [_sgd(self.parameters())] * 3, "configure_optimizers returned list"),
        (lambda self: {"a": "adam"}, "configure_optimizers returned str for 'a'"),
        (lambda self: (_sgd(self.parameters()), 0.5), "the scheduler of 'main' is float; it needs step()"),
        (lambda self: torch.optim.LBFGS(self.parameters()), "LBFGS evaluates the loss several times per update"),
        (
            lambda self: _sgd([torch.zeros(2, requires_grad=True)]),
            "optimizer 'main' holds a parameter of shape (2,) that is not a parameter of the module",
        ),
        (
            lambda self: _sgd([p.requires_grad_(p.ndim > 5) for p in self.parameters()]),
            "optimizer 'main' holds no trainable parameter",
        ),
        (lambda self: dict.fromkeys(("a", "b"), _sgd(self.parameters())), "optimizer 'b' is listed twice"),
    ],
)
def test_a_wrong_optimizer_is_refused_before_the_first_step(configure: Any, message: str) -> None:
    _refused(message, module=_optimizers(configure))


def test_an_optimizer_over_no_parameters_is_refused_with_the_number_there_is() -> None:
    message = (
        "optimizer over no parameters (optimizer got an empty parameter list), and the module has 2 trainable ones"
    )
    _refused(message, module=_optimizers(lambda self: _sgd([])))


def _two(self: Any) -> dict[str, torch.optim.Optimizer]:
    return {"weight": _sgd([self.layer.weight]), "bias": _sgd([self.layer.bias])}


def test_several_optimizers_need_a_name_from_training_step() -> None:
    message = (
        "there are several optimizers (weight, bias); training_step has to return {'loss': ..., 'optimizer': name}"
    )
    _refused(message, module=_optimizers(_two), forwards=1)


def test_a_wrong_optimizer_name_is_refused_with_the_nearest() -> None:
    module = _optimizers(_two, lambda self, loss: {"loss": loss, "optimizer": "weights"})
    _refused("returned optimizer='weights'; did you mean 'weight'?; there are weight, bias", module=module, forwards=1)


def test_an_optimizer_that_changes_inside_a_window_is_refused() -> None:
    module = _optimizers(_two, lambda self, loss: {"loss": loss, "optimizer": "weight" if self.ran % 2 else "bias"})
    message = "training_step returned optimizer='bias' in a window that began with 'weight'; one window is one update"
    _refused(message, module=module, forwards=2, gradient_accumulation_steps=2)


def test_total_steps_of_data_without_length_is_an_error() -> None:
    module = _optimizers(lambda self: _sgd(self.parameters()) if self.trainer.total_steps else None)
    _refused(
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
    _refused(message, module=module, val=ROWS[:2], validate_every=1, forwards=1)


# --------------------------------------------------------------------------------------------------------------------- the data


@pytest.mark.parametrize(
    ("train", "fit", "message"),
    [
        (None, {}, "train=None: give a DataLoader, a dataset or an iterable of batches"),
        (
            torch.utils.data.DataLoader([], batch_size=2),
            {},
            "train has no rows: check the path, the split and any filter",
        ),
        (torch.utils.data.TensorDataset(torch.zeros(0, 3)), {"batch_size": 2}, "train has no rows"),
        ([], {}, "train has no rows"),
        (torch.utils.data.TensorDataset(torch.zeros(4, 3)), {}, "train is a dataset: pass batch_size=..."),
        (torch.utils.data.DataLoader(ROWS, batch_size=2), {"batch_size": 4}, "batch_size=4 has no effect"),
        ({"a": 1}, {}, "train is a dict, which holds no rows to read"),
        ("train.csv", {}, "train is a str, which holds no rows to read"),
        (3, {}, "train is a int"),
        (ROWS, {"batch_size": 0}, "batch_size=0 (for train) must be a whole number, 1 or more"),
        (ROWS, {"num_workers": -1}, "num_workers=-1 (for train) must be a whole number, 0 or more"),
    ],
)
def test_wrong_training_data_is_refused_before_the_first_step(train: Any, fit: dict[str, Any], message: str) -> None:
    _refused(message, train=train, fit=fit)


def test_an_iterator_that_gives_nothing_is_an_error() -> None:
    _refused("train has no rows: check the path", train=iter([]))


def test_an_iterator_that_is_used_up_is_an_error() -> None:
    batches = iter([(torch.zeros(2, 3), torch.zeros(2, 1))])
    _refused("train is a one-shot iterator (list_iterator), which its first pass uses up", train=batches, forwards=1)


def test_validation_data_without_validation_step_is_refused() -> None:
    _refused("val is given and Regression has no validation_step; define validation_step(self, batch)", val=ROWS)


def test_empty_validation_data_is_refused() -> None:
    module = _module(validation_step=lambda self, batch: None)
    _refused("val has no rows", module=module, val=torch.utils.data.DataLoader([], batch_size=2))
    _refused("val['extra'] has no rows", module=module, val={"extra": torch.utils.data.DataLoader([], batch_size=2)})


def test_a_validation_step_that_returns_no_mapping_is_an_error() -> None:
    module = _module(validation_step=lambda self, batch: self.loss(batch))
    message = "Wrong.validation_step returned Tensor; return a mapping of metrics, or nothing"
    _refused(message, module=module, val=ROWS[:2], validate_first=True)


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
        ("text", "predict_step returned str; return a tensor, a list, or a mapping or tuple of them"),
    ],
)
def test_predictions_that_do_not_fit_the_rows_are_an_error(answer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer().predict(_module(predict_step=lambda self, batch: answer), ROWS, batch_size=2)


# ------------------------------------------------------------------------------------------------------------- places and paths


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("")
    _refused(f"run_dir='{file}' is a file; give a directory", run_dir=file)


def test_a_checkpoint_to_resume_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    message = f"resume='{tmp_path / 'gone'}' does not exist; give 'auto', 'never' or the path of a checkpoint"
    _refused(message, error=CheckpointError, fit={"resume": tmp_path / "gone"})


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    message = f"resume='{tmp_path}' is not a checkpoint (it has no manifest.json); give RUN_DIR/checkpoints/step-..."
    _refused(message, error=CheckpointError, fit={"resume": str(tmp_path)})


def test_weights_of_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither a checkpoint nor a run directory with one"):
        Regression.load_from_checkpoint(tmp_path)


@pytest.mark.parametrize("which", ["best", "last"])
def test_best_or_last_without_a_run_dir_is_refused(which: str) -> None:
    module = _module(validation_step=lambda self, batch: None)
    with pytest.raises(
        ConfigurationError, match=f"checkpoint='{which}' is looked up in run_dir, which is not set; give a path"
    ):
        Trainer().validate(module, ROWS, which, batch_size=2)


@pytest.mark.parametrize("which", ["best", "last"])
def test_best_or_last_of_an_empty_run_dir_is_refused(which: str, tmp_path: Path) -> None:
    module = _module(validation_step=lambda self, batch: None)
    with pytest.raises(CheckpointError, match=f"checkpoint='{which}': .* has no checkpoint"):
        Trainer(run_dir=tmp_path).validate(module, ROWS, which, batch_size=2)


def test_saving_over_something_is_refused(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_step(self, trainer: Trainer) -> None:
            trainer.save(tmp_path)

    _refused(
        f"save('{tmp_path}'): this exists already; give a new path",
        error=CheckpointError,
        plugins=[Saves()],
        forwards=1,
    )


# --------------------------------------------------------------------------------------------------- at the wrong time or place


@pytest.mark.parametrize("name", ["accelerator", "step", "epoch", "progress", "metrics", "total_steps", "optimizers"])
def test_what_a_run_has_does_not_exist_before_it(name: str) -> None:
    with pytest.raises(FabricateError, match="only while fit, validate, test or predict is running"):
        getattr(Trainer(max_steps=1), name)


@pytest.mark.parametrize("call", [Trainer.request_save, Trainer.request_eval, Trainer.stop])
def test_requests_need_a_run(call: Any) -> None:
    with pytest.raises(FabricateError, match="only while fit, validate, test or predict is running"):
        call(Trainer(max_steps=1))


def test_a_modules_trainer_does_not_exist_before_a_run() -> None:
    with pytest.raises(FabricateError, match=r"Regression\.trainer exists only while a Trainer runs the module"):
        _ = Regression().trainer


def test_a_fit_inside_a_fit_is_refused() -> None:
    class Nests(Callback):
        def on_step(self, trainer: Trainer) -> None:
            trainer.fit(Regression(), ROWS, batch_size=2)

    _refused("this Trainer is running already; one fit at a time", error=FabricateError, plugins=[Nests()], forwards=1)


def test_an_accelerator_that_exists_already_is_refused() -> None:
    accelerate.Accelerator(cpu=True)
    try:
        _refused(
            "an Accelerator (or PartialState) exists already in this process; fabricate's Trainer owns the Accelerator"
        )
        assert PartialState._shared_state, "the user's own Accelerator was taken down"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_a_loader_that_accelerate_prepared_is_refused() -> None:
    loader = accelerate.data_loader.prepare_data_loader(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3)), batch_size=2),
        num_processes=1, process_index=0, put_on_device=False,
    )  # fmt: skip
    try:
        _refused("that accelerate has already split over the ranks", train=loader)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_a_launcher_that_tells_another_strategy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRICATE_STRATEGY", "single")
    _refused("strategy='ddp' is set in the Trainer and 'single' by", strategy="ddp")


def test_a_launcher_that_tells_another_accumulation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    _refused("gradient_accumulation_steps=2", gradient_accumulation_steps=2)
