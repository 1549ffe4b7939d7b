"""Names of Lightning, transformers and Accelerate: each is refused with what does the same here, and nothing else is suggested."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader

from fabricate import Callback, ConfigurationError, EarlyStopping, Trainer, TrainModule
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
TRANSFORMERS = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm
label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 gradient_checkpointing gradient_checkpointing_kwargs
torch_compile torch_compile_backend torch_compile_mode use_liger_kernel use_cache neftune_noise_alpha torch_empty_cache_steps
auto_find_batch_size logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen
log_level disable_tqdm report_to run_name project eval_strategy eval_steps eval_delay per_device_eval_batch_size
prediction_loss_only eval_on_start eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy
save_steps save_on_each_node save_total_limit push_to_hub hub_token hub_model_id hub_strategy load_best_model_at_end
metric_for_best_model greater_is_better ignore_data_skip full_determinism seed data_seed use_cpu accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
remove_unused_columns label_names train_sampling_strategy group_by_length length_column_name ddp_find_unused_parameters
ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank model args data_collator train_dataset
eval_dataset processing_class model_init compute_loss_func compute_metrics callbacks optimizers preprocess_logits_for_metrics
"""
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
    names = set(TRANSFORMERS.split()) | set(inspect.signature(accelerate.Accelerator.__init__).parameters) - {"self"}
    remedies = {name: foreign_names.hint(name, foreign_names.ARGUMENTS, OURS) for name in names - OURS}
    assert {name: text for name, text in remedies.items() if "did you mean" in text} == {}
    assert sum(map(bool, remedies.values())) > 60


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("eval_steps", "; use validate_every='500 steps'"),
        ("save_total_limit", "; use keep="),
        ("weight_decay", "; use configure_optimizers, which returns the optimizer with its options"),
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


def test_a_remedy_that_is_an_attribute_of_the_trainer_exists() -> None:
    remedies = [*foreign_names.TRAINER.values(), *foreign_names.MODULE.values()]
    named = {part.split()[0].rstrip(",;") for text in remedies for part in text.split("trainer.")[1:]}
    roots = {name.partition(".")[0].partition("(")[0] for name in named}
    assert {name for name in roots if not hasattr(Trainer, name) and name != "settings"} == set()


def test_stopping_by_an_attribute_is_refused_when_it_is_set() -> None:
    def stop() -> None:
        Trainer().should_stop = True

    assert error_of(stop) == "trainer.should_stop is not read; use trainer.stop('reason')"


def test_early_stopping_takes_lightnings_name_for_its_metric() -> None:
    assert (EarlyStopping(monitor="val_acc", mode="max").metric, EarlyStopping("val_x").metric) == ("val_acc", "val_x")


def test_loading_a_part_of_a_checkpoint_has_a_remedy(tmp_path: Any) -> None:
    fit(Regression(), run_dir=tmp_path)
    text = error_of(lambda: Regression.load_from_checkpoint(tmp_path, strict=False))
    assert text.startswith("load_from_checkpoint: Regression has no constructor argument 'strict'; leave it out: ")


# ------------------------------------------------------------------------------------------------------------- before the first step


def test_manual_optimization_is_refused_wherever_it_is_set() -> None:
    message = (
        "Wrong.automatic_optimization=False is not read; several optimizers: configure_optimizers returns them by name"
    )
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
        (DataModule(), "train is a DataModule (a DataModule): pass what its methods return"),
        (
            CombinedLoader(),
            "train is a CombinedLoader, which joins several loaders; pass one data set: torch.utils.data.StackDataset",
        ),
        (
            {"a": DataLoader(ROWS), "b": DataLoader(ROWS)},
            "train is a dict, which joins several loaders; pass one data set",
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
