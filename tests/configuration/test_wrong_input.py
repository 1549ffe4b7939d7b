"""One test per wrong setting or module: the message, and that no step ran before it if possible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, ConfigurationError, EarlyStopping, PluginError, Single, Trainer, TrainModule
from tests.support.wrong import ROWS, Regression, answering, refused, wrong_module

# ---------------------------------------------------------------------------------------------------------- Trainer's arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "DDP"}, "strategy='DDP' is not known; did you mean 'ddp'?; known: "),
        ({"precision": "double"}, "precision='double' is not known; for float64 call module.double() before fit"),
        ({"strategy": "dpp"}, "strategy='dpp' is not known; did you mean 'ddp'?; known: "),
        (
            {"strategy": 3},
            "strategy=3: give a name (ddp, device_map, fsdp, single), a name with options ('fsdp:offload=cpu') or a Strategy object",
        ),
        ({"strategy": Single}, "strategy=Single is a class; pass an object, Single(), or a name"),
        ({"strategy": "fsdp:offlod=cpu"}, "strategy='fsdp' has no option 'offlod'; did you mean 'offload'?"),
        (
            {"strategy": "fsdp:shard=2"},
            "fsdp: shard=2: 2 is not a divisor of 1 process; choose a divisor, or leave shard out",
        ),
        (
            {"strategy": "fsdp:tp=2"},
            "2 ranks form a group that reads the same rows, so the number of ranks has to be a multiple of 2",
        ),
        ({"precision": "bf61"}, "precision='bf61' is not known; did you mean 'bf16'?; known: "),
        ({"precision": "fp16:init_scale=big"}, "precision='fp16': option init_scale='big' is not float"),
        ({"precision": "fp16:init_scale=0"}, "fp16: init_scale=0.0, growth_interval=2000: give at least 1 for both"),
        ({"global_batch_size": 3}, "global_batch_size=3 is not a multiple of batch_size (2) x ranks (1) = 2"),
        (
            {"global_batch_size": 4, "gradient_accumulation_steps": 4},
            "global_batch_size=4 means gradient_accumulation_steps=2, but 4 is set",
        ),
        (
            {"max_steps": None},
            "neither max_steps nor max_epochs is set; say how long to train, for instance Trainer(max_epochs=3)",
        ),
        ({"limit_train_batches": 0}, "limit=0 (for train) must be a number of micro-batches"),
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
    refused(message, **arguments)


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
        ({"epochs": 2}, "Trainer has no argument 'epochs'; use max_epochs="),
        ({"profiler": "simple"}, "Trainer has no argument 'profiler'; use plugins=[Profiler()]"),
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
            "max_grad_norm=1.0 and max_grad_value=0.5 are both set. Remove one of them",
        ),
        ({"nonfinite": "skipp"}, "nonfinite='skipp': give 'stop' or 'skip'; did you mean 'skip'?"),
        ({"nonfinite": None}, "nonfinite=None: give 'stop' or 'skip'"),
        ({"seed": -1}, "seed=-1: give a whole number from 0 to 4294967295, or None"),
        ({"seed": 2**32}, "seed=4294967296: give a whole number"),
        ({"seed": 1.0}, "seed=1.0: give a whole number"),
        ({"seed": True}, "seed=True: give a whole number"),
        ({"save_every": "weekly"}, "save_every='weekly' is not a duration: write '500 steps'"),
        ({"max_time": "00:12:00:00"}, "max_time='00:12:00:00': give a time, for instance '11 hours'"),
        ({"save_every": 0}, "save_every=0: give a duration such as '500 steps' or '1 epoch', or None for never"),
        ({"validate_every": False}, "validate_every=False: give a duration"),
        ({"log_every": "0 steps"}, "log_every='0 steps': Every(steps=0): the number has to be positive"),
        ({"run_dir": ""}, "run_dir='': give the path of a directory, or None to write nothing"),
        ({"run_dir": 3}, "run_dir=3: give the path of a directory"),
        ({"trackers": True}, "trackers=True: give names, trackers=['tensorboard']"),
        ({"accept_changes": True}, "accept_changes=True: name what may differ, accept_changes=('optimizer',)"),
        ({"accept_changes": "lr"}, "accept_changes='lr'; known: global_batch_size"),
        (
            {"keep": {"best": 1, "metric": "val_acc"}},
            "keep={'best': 1, 'metric': 'val_acc'}: is a higher or a lower 'val_acc' better?",
        ),
        (
            {"keep": {"last": 2, "metric": "val_acc"}},
            "keep={'last': 2, 'metric': 'val_acc'}: is a higher or a lower 'val_acc' better?",
        ),
        ({"validate_every": "1.5 epochs"}, "validate_every='1.5 epochs': Every(epochs=1.5): epochs are whole numbers"),
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


def test_positional_arguments_are_refused_with_where_they_belong() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^Trainer takes keyword arguments only, and fit takes module and data: "
    ):
        Trainer(Regression())  # type: ignore[misc]


@pytest.mark.parametrize("resume", [True, False, None])
def test_a_resume_that_is_no_path_is_refused(resume: Any) -> None:
    refused(f"resume={resume}: give 'auto' (continue from run_dir, the default), 'never'", fit={"resume": resume})


def test_a_run_dir_may_begin_with_the_home_directory() -> None:
    assert Trainer(run_dir="~/runs").run_dir == Path.home() / "runs"


def test_an_argument_that_is_set_on_a_trainer_is_refused() -> None:
    expected = r"^trainer.max_epochs was assigned, which has no effect; pass it when the Trainer is created"
    with pytest.raises(ConfigurationError, match=expected):
        Trainer(max_epochs=1).max_epochs = 5


def test_an_unknown_plugin_is_refused_before_the_first_step() -> None:
    refused(
        "plugins='no_such_plugin': no installed plugin has this name", error=PluginError, plugins=["no_such_plugin"]
    )
    message = "no installed plugin has this name; use the object: plugins=[EarlyStopping('val_loss', patience=3)]"
    refused(message, error=PluginError, plugins=["EarlyStopping"])


def test_a_misspelt_hook_is_refused_before_the_first_step() -> None:
    plugin = type("Watch", (Callback,), {"on_stepp": lambda self: None})()
    refused("Watch.on_stepp is not a hook of fabricate; did you mean 'on_step'?", error=PluginError, plugins=[plugin])
    refused("Wrong.on_stepp is not a hook", error=PluginError, module=wrong_module(on_stepp=lambda self: None))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"setup": lambda self, trainer, module, stage: None}, "Watch.setup would never be called; use on_fit_start()"),
        ({"state_dict": lambda self: {}}, "Watch.state_dict would never be called; use on_save(self, state)"),
        ({"load_state_dict": lambda self, state_dict: None}, "would never be called; use on_load(self, state)"),
    ],
)
def test_a_method_of_lightnings_callbacks_is_refused(method: dict[str, Any], message: str) -> None:
    plugin = type("Watch", (Callback,), {"on_step": lambda self: None, **method})()
    refused(message, error=PluginError, plugins=[plugin])


def test_a_class_as_plugin_is_refused() -> None:
    refused("EarlyStopping is a class; pass an instance: EarlyStopping()", error=PluginError, plugins=[EarlyStopping])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "lowest"}, "EarlyStopping('val_loss'): mode='lowest': give 'min' or 'max'"),
        ({"metric": "val_top1"}, "EarlyStopping('val_top1'): is a higher or a lower 'val_top1' better?"),
        ({"patience": 0}, "EarlyStopping(patience=0, min_delta=0.0): give a whole number of at least 1 for patience"),
        (
            {"patience": "3"},
            "EarlyStopping(patience='3', min_delta=0.0): give a whole number of at least 1 for patience",
        ),
        (
            {"min_delta": -1.0},
            "EarlyStopping(patience=3, min_delta=-1.0): give a whole number of at least 1 for patience and a number of at least 0",
        ),
    ],
)
def test_wrong_options_of_early_stopping_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        EarlyStopping(**arguments)


# ------------------------------------------------------------------------------------------------------------------- the module


def test_a_class_instead_of_a_module_is_refused() -> None:
    refused("module=Regression (a class; pass an instance) is not a fabricate.TrainModule", module=Regression)


@pytest.mark.parametrize("module", [torch.nn.Linear(1, 1), 3])
def test_what_is_no_train_module_is_refused(module: Any) -> None:
    refused(f"module={type(module).__name__} is not a fabricate.TrainModule; subclass TrainModule", module=module)


def test_a_module_without_super_init_is_refused() -> None:
    module = type("Forgets", (Regression,), {"__init__": lambda self: None})()
    with pytest.raises(
        ConfigurationError, match=r"^Forgets.__init__ does not call super\(\).__init__\(\); call it first$"
    ):
        Trainer(max_steps=1).fit(module, ROWS, batch_size=2)


@pytest.mark.parametrize("name", ["device", "trainer"])
def test_an_attribute_that_the_trainer_sets_cannot_be_the_users(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Regression.{name} is set by the Trainer that runs the module"):
        setattr(Regression(), name, "cpu")


def test_a_lazy_layer_without_a_shape_is_refused() -> None:
    module = Regression()
    module.late = torch.nn.LazyLinear(1)
    refused(
        "late.weight, late.bias: a lazy layer whose shape is not known yet; run one batch through it before fit",
        module=module,
    )


def test_a_missing_training_step_is_refused() -> None:
    refused(
        "Wrong has no training_step; define training_step(self, batch) and return the loss",
        module=wrong_module(training_step=TrainModule.training_step),
    )


def test_a_missing_configure_optimizers_is_refused() -> None:
    refused(
        "Wrong has no configure_optimizers; return an optimizer from it, for instance torch.optim.AdamW(self.parameters()",
        module=wrong_module(configure_optimizers=TrainModule.configure_optimizers),
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
    refused(
        f"Wrong.{method} would never be called; did you mean '{near}'?",
        module=wrong_module(**{method: lambda self: None}),
    )


def test_a_method_of_a_similar_name_that_the_module_calls_itself_is_its_own() -> None:
    class Two(Regression):
        def training_step(self, batch: Any) -> Any:
            return self.training_step2(batch)

        def training_step2(self, batch: Any) -> Any:
            return super().training_step(batch)

    Trainer(max_steps=1, progress=False).fit(Two(), ROWS, batch_size=2)


def test_lightnings_setup_is_refused() -> None:
    def setup(self: Any, stage: Any = None) -> None: ...

    refused(
        "Wrong.setup is a hook of another framework that fabricate does not call; use configure_model()",
        module=wrong_module(setup=setup),
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
        (lambda self, x, y: None, "define training_step(self, batch), and begin with x, y = batch"),
        (
            lambda self, batch, batch_idx, optimizer_idx: None,
            "a mapping of them by name, and define training_step(self, batch, optimizer), which is called with each name",
        ),
    ],
)
def test_a_training_step_with_other_arguments_is_refused(step: Any, message: str) -> None:
    refused(message, module=wrong_module(training_step=step))


def test_a_module_without_parameters_is_refused() -> None:
    module = wrong_module(__init__=lambda self: TrainModule.__init__(self))
    refused("Wrong has no trainable parameter; build layers in __init__ or configure_model", module=module)


# ------------------------------------------------------------------------------------------------- what training_step returns


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
        (
            lambda self, loss: {"loss": loss, "loss_boxes": loss, "loss_classes": loss},
            "it has to hold 'loss', one number to train on, and may hold 'weight' and 'optimizer'; record other values with self.log",
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
    refused(message, module=answering(answer), forwards=1)


def test_a_fit_inside_no_grad_is_refused_with_where_gradients_are_off() -> None:
    with torch.no_grad():
        refused("gradients are off around the whole fit", module=answering(lambda self, loss: loss), forwards=1)
