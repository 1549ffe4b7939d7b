"""Names of Lightning, transformers and Accelerate: each is refused with its counterpart here, and nothing else is suggested."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainingArguments

from fabricate import Callback, ConfigurationError, EarlyStopping, PluginError, Trainer, TrainModule
from fabricate.registry import foreign_names
from tests.support.wrong import ROWS, Regression, refused, wrong_module

LIGHTNING_TRAINER = """
accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs max_steps min_steps max_time
limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches val_check_interval
check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary
accumulate_grad_batches gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler
profiler detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams
"""
LIGHTNING_MODULE = """
all_gather clip_gradients current_epoch fabric freeze global_rank global_step hparams local_rank log_dict logger loggers
lr_schedulers manual_backward on_gpu optimizers save_hyperparameters to_onnx to_torchscript toggle_optimizer toggled_optimizer
unfreeze untoggle_optimizer
"""
LIGHTNING_LOG = """
prog_bar logger on_step on_epoch reduce_fx enable_graph sync_dist sync_dist_group add_dataloader_idx batch_size rank_zero_only
"""
LIGHTNING_STATE = """
callback_metrics checkpoint_callback current_epoch datamodule default_root_dir early_stopping_callback estimated_stepping_batches
global_rank global_step is_global_zero lightning_module local_rank log_dir logged_metrics logger loggers lr_scheduler_configs
max_epochs max_steps model num_devices num_training_batches print progress_bar_metrics sanity_checking save_checkpoint should_stop
testing train_dataloader training val_dataloaders validating world_size
"""
TRANSFORMERS = {
    *(field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)),
    *(inspect.signature(transformers.Trainer.__init__).parameters.keys() - {"self"}),
    *("warmup_ratio", "group_by_length", "logging_dir", "overwrite_output_dir", "evaluation_strategy", "no_cuda"),
}
"""Fields of its arguments, arguments of its Trainer, and names of earlier versions."""
TRANSFORMERS_TRAINER = {name for name in dir(transformers.Trainer) if not name.startswith("_")}
# Helpers that subclasses override for a device or a mesh; what does the same is part of the loop.
TRANSFORMERS_TRAINER -= {
    *("autocast_smart_context_manager", "compute_loss_context_manager", "create_accelerator_and_postprocess", "end"),
    *("call_model_init", "get_batch_samples", "get_cp_size", "get_sp_size", "get_tp_size"),
    *(
        "get_learning_rates",
        "get_num_trainable_parameters",
        "get_optimizer_group",
        "loss_is_scaled_for_ga",
        "metrics_format",
        "set_initial_training_values",
        "store_flos",
    ),
}
OURS = set(inspect.signature(Trainer).parameters)


def error_of(call: Callable[[], Any], kind: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(set(LIGHTNING_TRAINER.split()) - OURS))
def test_every_argument_of_lightnings_trainer_has_a_remedy(name: str) -> None:
    text = error_of(lambda: Trainer(**{name: 1}))
    assert text == f"Trainer has no argument {name!r}{foreign_names.use(name, foreign_names.ARGUMENTS)}"
    assert "; " in text


def test_an_argument_of_transformers_or_accelerate_is_never_taken_for_another() -> None:
    names = TRANSFORMERS | set(inspect.signature(accelerate.Accelerator.__init__).parameters) - {"self"}
    remedies = {name: foreign_names.hint(name, foreign_names.ARGUMENTS, OURS) for name in names - OURS}
    assert {name: text for name, text in remedies.items() if "did you mean" in text} == {}
    assert {name for name in TRANSFORMERS - OURS if not remedies[name]} == set()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("eval_steps", "; use validate_every='500 steps'"),
        ("save_total_limit", "; use keep="),
        ("weight_decay", "; use configure_optimizers, which returns the optimizer with its options"),
        ("auto_scale_batch_size", "; use fit(..., batch_size=BatchSizeFinder())"),
        ("auto_find_batch_size", "; use fit(..., batch_size=BatchSizeFinder())"),
        ("model_summary", "; use plugins=[ModelSummary()]"),
        ("device", "; use the launcher, or ACCELERATE_USE_CPU=true"),
        ("patience", "; use plugins=[EarlyStopping('val_loss', patience=3)]"),
        ("inference_mode", "; leave it out: evaluations run without gradients"),
        ("max_step", "; did you mean 'max_steps'?"),
        ("nonsense", ""),
    ],
)
def test_the_remedy_follows_the_name(name: str, remedy: str) -> None:
    assert error_of(lambda: Trainer(**{name: 1})) == f"Trainer has no argument {name!r}{remedy}"


@pytest.mark.parametrize("kind", ["precision", "strategy"])
def test_every_precision_and_strategy_that_is_named_exists(kind: str) -> None:
    names = {"precision": foreign_names.PRECISIONS, "strategy": foreign_names.STRATEGIES}[kind]
    for name, remedy in names.items():
        message = f"{kind}={name!r} is not known; use {kind}={remedy!r}; known: "
        refused(message, **{kind: name})
    for remedy in set(names.values()):
        text = ""
        try:
            Trainer(max_steps=1, **{kind: remedy.replace("=N", "=2")}).plan(Regression(), ROWS, batch_size=2)
        except ConfigurationError as exc:  # what needs several processes, or a device, exists too
            text = str(exc)
        assert not {part for part in ("is not known", "has no option") if part in text}


def test_a_precision_that_is_given_as_a_number_has_a_remedy() -> None:
    refused("precision=16; use precision='fp16': give a name", precision=16)
    refused("precision='64' is not known; for float64 call module.double() before fit", precision="64")


def test_a_tracker_that_does_not_exist_is_one_message_with_all_known_names() -> None:
    refused(
        "trackers='csv' is not known; leave it out: metrics.jsonl in run_dir has every value, a JSON object per line; known: ",
        trackers=["csv"],
    )
    assert "tensorboard" in error_of(lambda: fit(Regression(), trackers=["nonsense"]))


def fit(module: TrainModule, *, val: Any = None, **arguments: Any) -> Any:
    return Trainer(max_steps=1, progress=False, **arguments).fit(module, ROWS, val, batch_size=2)


# ------------------------------------------------------------------------------------------------------------ calls and attributes


@pytest.mark.parametrize(("method", "names"), [("fit", foreign_names.FIT), ("validate", foreign_names.EVALUATE)])
def test_a_keyword_of_other_trainers_is_refused_with_ours(method: str, names: Mapping[str, str]) -> None:
    trainer = Trainer(max_steps=1, progress=False)
    for name in names:
        text = error_of(lambda name=name: getattr(trainer, method)(Regression(), ROWS, **{name: 1}))  # type: ignore[misc]
        assert text == f"Trainer.{method} has no argument {name!r}{foreign_names.use(name, names)}"


@pytest.mark.parametrize("name", LIGHTNING_LOG.split())
def test_a_keyword_of_lightnings_log_is_refused_with_a_remedy(name: str) -> None:
    text = error_of(lambda: Regression().log("loss", 1.0, **{name: True}))
    assert text == f"log has no argument {name!r}{foreign_names.use(name, foreign_names.LOG)}"
    assert "; " in text


@pytest.mark.parametrize("name", LIGHTNING_MODULE.split())
def test_an_attribute_of_a_lightning_module_has_a_remedy(name: str) -> None:
    text = error_of(lambda: getattr(Regression(), name), AttributeError)
    assert text.startswith(f"Regression has no attribute {name!r}; ")
    assert not hasattr(Regression(), name)


def test_an_attribute_that_the_user_sets_is_the_users() -> None:
    module = Regression()
    module.hparams, module.logger = {"lr": 1}, "mine"
    assert (module.hparams, module.logger) == ({"lr": 1}, "mine")


def test_any_other_missing_attribute_is_torchs_error() -> None:
    assert error_of(lambda: Regression().nonsense, AttributeError) == "'Regression' object has no attribute 'nonsense'"
    assert error_of(lambda: Trainer().nonsense, AttributeError) == "Trainer has no attribute 'nonsense'"


@pytest.mark.parametrize("name", LIGHTNING_STATE.split())
def test_an_attribute_of_lightnings_trainer_has_a_remedy(name: str) -> None:
    text = error_of(lambda: getattr(Trainer(), name), AttributeError)
    assert text.startswith(f"Trainer has no attribute {name!r}; use ")


@pytest.mark.parametrize("name", sorted(name for name in TRANSFORMERS_TRAINER if not hasattr(Trainer, name)))
def test_a_method_of_transformers_trainer_has_a_remedy(name: str) -> None:
    assert error_of(lambda: getattr(Trainer(), name), AttributeError).startswith(
        f"Trainer has no attribute {name!r}; use "
    )


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (transformers.EarlyStoppingCallback(3), "; use the object: plugins=[EarlyStopping('val_loss', patience=3)]"),
        (transformers.ProgressCallback(), "; use progress=True"),
        (
            type("Own", (transformers.TrainerCallback,), {})(),
            "; inherit from fabricate.Callback, docs/from-transformers.md",
        ),
    ],
)
def test_a_callback_of_transformers_is_refused_with_what_does_the_same(callback: Any, remedy: str) -> None:
    text = error_of(lambda: fit(Regression(), plugins=[callback]), PluginError)
    name = type(callback).__name__
    assert text.startswith(
        f"plugin {name!r}: {name} is a callback of transformers, whose events are not called here{remedy}"
    )


def test_a_class_among_the_plugins_is_refused_with_what_does_the_same() -> None:
    text = error_of(lambda: fit(Regression(), plugins=[transformers.ProgressCallback]), PluginError)
    assert text == "plugins: ProgressCallback is a class; use progress=True"


def test_a_remedy_that_is_an_attribute_of_the_trainer_exists() -> None:
    remedies = [*foreign_names.TRAINER.values(), *foreign_names.MODULE.values()]
    named = {part.split()[0].rstrip(",;") for text in remedies for part in text.split("trainer.")[1:]}
    roots = {name.partition(".")[0].partition("(")[0] for name in named}
    assert {name for name in roots if not hasattr(Trainer, name) and name != "settings"} == set()


def test_every_argument_method_and_class_that_a_remedy_names_exists() -> None:
    import fabricate

    arguments = OURS | set(inspect.signature(Trainer.fit).parameters) | {"checkpoint", "reduce", "weight", "data"}
    remedies = [
        text
        for name, table in vars(foreign_names).items()
        if name.isupper() and isinstance(table, dict)
        for text in table.values()
        if isinstance(text, str)
    ]
    argument = re.compile(r"(?:^|fit\(\.\.\., |Trainer\(| (?:and|or|with) )([a-z_]+)=")
    of_class = re.compile(r"(?:plugins=\[|batch_size=)([A-Z]\w+)")
    named = {name for text in remedies for name in argument.findall(text)}
    assert len(named) > 25
    assert named - arguments == set()
    assert {name for text in remedies for name in of_class.findall(text) if not hasattr(fabricate, name)} == set()


@pytest.mark.parametrize("name", sorted(foreign_names.PLUGINS))
def test_the_name_of_a_callback_has_a_remedy(name: str) -> None:
    text = error_of(lambda: fit(Regression(), plugins=[name]), PluginError)
    assert (
        f"plugins={name!r}: no installed plugin has this name{foreign_names.use(name, foreign_names.PLUGINS)}" in text
    )


def test_stopping_by_an_attribute_is_refused_when_it_is_set() -> None:
    def stop() -> None:
        Trainer().should_stop = True

    assert (
        error_of(stop) == "trainer.should_stop was assigned, but fabricate does not read it; use trainer.stop('reason')"
    )


@pytest.mark.parametrize(
    "name", ["accumulate_grad_batches", "gradient_clip_val", "current_epoch", "callbacks", "num_train_epochs"]
)
def test_an_attribute_of_another_trainer_that_is_set_has_a_remedy(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"trainer\.{name} was assigned, but fabricate does not read it; use "
    ):
        setattr(Trainer(), name, 2)


def test_a_trainer_of_the_users_own_may_keep_attributes_of_such_names() -> None:
    class Own(Trainer):
        def __init__(self, model: Any, **arguments: Any) -> None:
            self.model = model
            super().__init__(**arguments)
            self.logger = "mine"

    assert Own("a model").logger == "mine"


def test_early_stopping_takes_lightnings_name_for_its_metric() -> None:
    assert (EarlyStopping(monitor="val_acc", mode="max").metric, EarlyStopping("val_x").metric) == ("val_acc", "val_x")


def test_loading_a_part_of_a_checkpoint_has_a_remedy(tmp_path: Any) -> None:
    fit(Regression(), run_dir=tmp_path)
    text = error_of(lambda: Regression.load_from_checkpoint(tmp_path, strict=False))
    assert text.startswith("load_from_checkpoint: Regression has no constructor argument 'strict'; leave it out: ")


# ------------------------------------------------------------------------------------------------------------- before the first step


def test_manual_optimization_is_refused_wherever_it_is_set() -> None:
    message = "Wrong.automatic_optimization=False has no effect; several optimizers: configure_optimizers returns them by name"
    refused(message, module=wrong_module(automatic_optimization=False))
    module = wrong_module()
    module.automatic_optimization = False
    refused(message, module=module)
    module.automatic_optimization = True
    fit(module)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("backward", ("loss",)), ("compute_loss", ("model", "inputs", "return_outputs")), ("teardown", ("stage",))],
)
def test_a_usual_name_is_refused_with_the_arguments_of_another_framework_only(
    name: str, parameters: tuple[str, ...]
) -> None:
    scope: dict[str, Any] = {}
    exec(f"def {name}(self, {', '.join(parameters)}): ...\ndef own(self, scores, labels): ...", scope)
    refused(
        f"Wrong.{name} is a hook of another framework that fabricate does not call; use ",
        module=wrong_module(**{name: scope[name]}),
    )
    fit(wrong_module(**{name: scope["own"]}))


def test_a_number_of_the_data_set_is_refused_where_there_are_several() -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"loss": self.loss(batch)}

    message = "Wrong.validation_step has the argument dataloader_idx, which is not passed; remove it: each metric gets the name"
    refused(message, module=wrong_module(validation_step=validation_step), val={"a": ROWS, "b": ROWS})
    fit(wrong_module(validation_step=validation_step), val=ROWS)


class DataModule:
    def train_dataloader(self) -> Any: ...


class CombinedLoader:
    def __iter__(self) -> Any: ...


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (DataModule(), "train is a DataModule (a DataModule). Call its prepare_data()"),
        (
            CombinedLoader(),
            "train is a CombinedLoader, which joins several loaders. Pass one data set: torch.utils.data.StackDataset",
        ),
        (
            {"a": DataLoader(ROWS), "b": DataLoader(ROWS)},
            "train is a dict, which joins several loaders. Pass one data set",
        ),  # type: ignore[arg-type]
    ],
)
def test_data_of_another_kind_is_refused_with_the_way_to_pass_it(train: Any, message: str) -> None:
    refused(message, train=train)


def test_a_callback_may_have_helpers_of_any_name() -> None:
    class Helps(Callback):
        def on_step(self) -> None: ...

        def compute_loss(self, scores: torch.Tensor) -> None: ...

    fit(Regression(), plugins=[Helps()])
