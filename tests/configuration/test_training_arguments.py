"""`from_training_arguments`: every field of transformers' TrainingArguments has a counterpart or is refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from transformers import Trainer as TheirTrainer  # at once: what it imports sets variables of the environment

from fabricate import ConfigurationError, Trainer, TrainModule, from_training_arguments
from fabricate.configuration.training_arguments import FromTransformers
from fabricate.registry import foreign_names

FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}
"""Those of TrainingArguments, and five more."""
MAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "output_dir": ({"output_dir": "runs/one"}, {"run_dir": "runs/one"}),
    "num_train_epochs": ({"num_train_epochs": 5}, {"max_epochs": 5}),
    "max_steps": ({"max_steps": 70}, {"max_steps": 70}),
    "seed": ({"seed": 7}, {"seed": 7}),
    "data_seed": ({"data_seed": 42}, {"seed": 42}),
    "ddp_timeout": ({"ddp_timeout": 600}, {"timeout": "10 minutes"}),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
    "max_grad_norm": ({"max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
    "full_determinism": ({"full_determinism": True}, {"deterministic": True}),
    "disable_tqdm": ({"disable_tqdm": True}, {"progress": False}),
    "bf16": ({"bf16": True, "use_cpu": True}, {"precision": "bf16"}),
    "fp16": ({"fp16": True}, {"precision": "fp16"}),
    "activation_checkpointing": ({"activation_checkpointing": True}, {"activation_checkpointing": True}),
    "activation_checkpointing_kwargs": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        {"activation_checkpointing": True},
    ),
    "torch_compile": ({"torch_compile": True}, {"compile": {"backend": "inductor"}}),
    "torch_compile_backend": ({"torch_compile_backend": "aot_eager"}, {"compile": {"backend": "aot_eager"}}),
    "torch_compile_mode": (
        {"torch_compile_mode": "max-autotune"},
        {"compile": {"backend": "inductor", "mode": "max-autotune"}},
    ),
    "eval_strategy": ({"eval_strategy": "epoch"}, {"validate_every": "1 epoch"}),
    "eval_steps": ({"eval_strategy": "steps", "eval_steps": 20}, {"validate_every": "20 steps"}),
    "eval_on_start": ({"eval_on_start": True}, {"validate_first": True}),
    "logging_strategy": ({"logging_strategy": "epoch"}, {"log_every": "1 epoch"}),
    "logging_steps": ({"logging_steps": 5}, {"log_every": "5 steps"}),
    "save_strategy": ({"save_strategy": "no"}, {"save_every": None}),
    "save_steps": ({"save_steps": 50}, {"save_every": "50 steps"}),
    "save_total_limit": ({"save_total_limit": 2}, {"keep": 2}),
    "save_only_model": ({"save_only_model": True}, {"save_weights_only": True}),
    "load_best_model_at_end": (
        {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 3},
        {"load_best": True, "keep": {"last": 2, "best": 1, "metric": "val_loss", "mode": "min"}},
    ),
    "metric_for_best_model": (
        {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "eval_accuracy"},
        {"save_every": None, "keep": {"last": "all", "best": 1, "metric": "val_accuracy", "mode": "max"}},
    ),
    "greater_is_better": (
        {"eval_strategy": "epoch", "metric_for_best_model": "wer", "greater_is_better": False},
        {"keep": {"last": "all", "best": 1, "metric": "val_wer", "mode": "min"}},
    ),
    "report_to": ({"report_to": ["tensorboard"]}, {"trackers": ["tensorboard"]}),
    "run_name": ({"report_to": ["wandb"], "run_name": "wide"}, {"trackers": ["wandb:name=wide"]}),
    "project": ({"report_to": "trackio", "project": "mine"}, {"trackers": ["trackio:project=mine"]}),
    "ddp_find_unused_parameters": (
        {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 10},
        {"strategy": "ddp:find_unused_parameters=true,bucket_cap_mb=10"},
    ),
    "ddp_static_graph": ({"ddp_static_graph": True}, {"strategy": "ddp:static_graph=true"}),
    "ddp_bucket_cap_mb": ({"ddp_bucket_cap_mb": 50}, {"strategy": "ddp:bucket_cap_mb=50"}),
}
"""By field: what is set, and the arguments of the Trainer that come of it."""
ELSEWHERE = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "train_sampling_strategy", "dataloader_drop_last"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order", "resume_from_checkpoint"),
    *("learning_rate", "weight_decay", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *(
        "do_train",
        "do_eval",
        "do_predict",
        "tf32",
        "use_cpu",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "ddp_broadcast_buffers",
    ),
}
"""Fields that loaders, the optimizer, fit or the device take; the tests below have each of them."""
OTHERS: dict[str, Any] = {
    "deepspeed": "ds.json",
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2},
    "debug": "underflow_overflow",
    "include_num_input_tokens_seen": "all",
    "log_level": "info",
    "hub_strategy": "end",
    "include_for_metrics": ["loss"],
    "length_column_name": "size",
    "generation_config": "folder",
    "log_level_replica": "info",
}
"""Of fields without a counterpart, values where another number, a text or the opposite will not do."""


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """TrainingArguments make Accelerate's PartialState, and the schedules of transformers its GradientState."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def arguments(**fields: Any) -> TrainingArguments:
    return TrainingArguments(**fields)


def moved(**fields: Any) -> FromTransformers:
    return from_training_arguments(arguments(**fields))


def refused(args: Any, *parts: str, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        from_training_arguments(args, **options)
    assert all(part in str(caught.value) for part in parts), caught.value
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- field by field


@pytest.mark.parametrize("name", [name for name in MAPPED if name in FIELDS])  # earlier versions lack some
def test_a_field_becomes_the_argument_of_the_trainer(name: str) -> None:
    fields, wanted = MAPPED[name]
    arguments = moved(**fields).trainer
    assert {argument: arguments[argument] for argument in wanted} == wanted
    Trainer(**arguments)


def changed(name: str) -> Any:
    """Another value than the default."""
    field = FIELDS[name]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return {"torch_empty_cache_steps": 5, "eval_accumulation_steps": 4, "neftune_noise_alpha": 5.0}.get(name, "x")


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - MAPPED.keys() - ELSEWHERE))
def test_every_other_field_is_refused_by_name_or_needs_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = Seq2SeqTrainingArguments(output_dir="out")
    setattr(args, name, changed(name))  # some of them do something to the process when they are set in the constructor
    remedy = foreign_names.ARGUMENTS[name]
    if remedy.startswith("nothing: "):
        translation = from_training_arguments(args)
        assert [line for line in translation.lines if f" {name}=" in line and remedy.removeprefix("nothing: ") in line]
        assert translation.lines == tuple(capsys.readouterr().out.splitlines())
        return
    refused(args, f"TrainingArguments.{name}=", f"use {remedy}", f"handled=['{name}']")
    from_training_arguments(args, handled=[name])


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - inspect.signature(Trainer).parameters.keys()))
def test_a_field_that_is_given_to_the_trainer_itself_has_a_remedy(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(**{name: 1})
    assert str(caught.value) == f"Trainer has no argument {name!r}{foreign_names.use(name, foreign_names.ARGUMENTS)}"
    assert "; " in str(caught.value)


def test_accelerators_options_are_refused_where_one_is_set() -> None:
    args = arguments(accelerator_config={"split_batches": True})
    refused(args, "TrainingArguments.accelerator_config=AcceleratorConfig(split_batches=True", "batch_size=")
    moved(accelerator_config={"split_batches": False})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_train_epochs": 2.5}, "num_train_epochs=2.5: a fit has whole epochs. Give max_steps"),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, "eval_steps=0.1 is a share of all updates. Give a number"),
        ({"data_seed": 3}, "data_seed=3: a Trainer orders the data by seed=42"),
        ({"optim": "adamw_bnb_8bit"}, "optim='adamw_bnb_8bit' cannot be built from its name"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "momentun has no effect on optim='sgd'"),
        ({"optim_args": "foreach=true"}, "foreach has no effect on optim='adamw_torch_fused', whose options here are: none"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, "has no effect in transformers with lr_scheduler_type='constant'"),
        ({"lr_scheduler_kwargs": {"a": [1]}}, "lr_scheduler_kwargs: a=[1] cannot be written in a schedule's name"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' has no counterpart"),
        ({"ddp_broadcast_buffers": False}, "ddp_broadcast_buffers=False has no counterpart"),
        ({"report_to": "clearml", "run_name": "x"}, "run_name='x' has no counterpart"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
            "activation_checkpointing_kwargs={'every_n_layers': 2}: every_n_layers has no counterpart",
        ),
    ],
)  # fmt: skip
def test_a_value_without_a_counterpart_is_an_error(fields: dict[str, Any], message: str) -> None:
    assert refused(arguments(**fields), message).startswith("TrainingArguments.")


# ----------------------------------------------------------------------------------------------------------- what is accepted


def test_what_the_parser_returns_is_accepted_and_other_things_are_not() -> None:
    @dataclasses.dataclass
    class Own:
        width: int = 3

    parser = HfArgumentParser([Own, TrainingArguments])
    parsed = parser.parse_args_into_dataclasses(["--max_steps", "9", "--learning_rate", "0.1"])
    assert from_training_arguments(parsed).trainer["max_steps"] == 9
    refused(parsed[0], "args=Own: give a transformers.TrainingArguments")
    refused(TrainingArguments, "args=type: ")
    refused(arguments(), "TrainingArguments has no field label_smoothing", handled=["label_smoothing"])


def test_what_the_script_does_itself_is_read_as_if_it_were_at_its_default() -> None:
    args = arguments(
        optim="adamw_bnb_8bit", report_to="clearml", run_name="x", save_strategy="no", num_train_epochs=2.5
    )
    handled = ["optim", "report_to", "run_name", "save_strategy", "num_train_epochs"]
    translation = from_training_arguments(args, handled=handled)
    assert translation.trainer == moved().trainer
    assert "num_train_epochs" not in translation.lines[1]
    assert args.optim == "adamw_bnb_8bit"


def test_the_fields_of_a_subclass_are_the_scripts() -> None:
    @dataclasses.dataclass
    class Own(TrainingArguments):
        width: int = 3
        learning_rate: float = 1e-3

    assert from_training_arguments(Own())._optimizer.options["lr"] == 1e-3
    refused(Own(width=4), "TrainingArguments.width=4", "only your class has this field")
    from_training_arguments(Own(width=4), handled=["width"])


def test_defaults_that_mean_something_are_taken_over_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    translation = moved()
    assert translation.trainer == {
        "max_epochs": 3,
        "run_dir": "trainer_output",
        "seed": 42,
        "timeout": "30 minutes",
        "max_grad_norm": 1.0,
        "precision": "fp32",
        "validate_every": None,
        "log_every": "500 steps",
        "save_every": "500 steps",
        "keep": "all",
    }
    assert translation.resume == "auto"
    printed = capsys.readouterr().out
    assert (
        "num_train_epochs=3.0, per_device_train_batch_size=8, learning_rate=5e-05, lr_scheduler_type='linear'"
        in printed
    )
    assert "optim='adamw_torch_fused', max_grad_norm=1.0, seed=42, eval_strategy='no', save_steps=500" in printed
    assert moved(max_grad_norm=0.0).trainer.get("max_grad_norm") is None


def test_the_launchers_precision_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert "precision" not in moved().trainer


def test_a_checkpoint_to_resume_from_goes_to_fit() -> None:
    assert moved(resume_from_checkpoint="runs/a").resume == "runs/a"
    assert moved(resume_from_checkpoint="True").resume == "auto"


# ----------------------------------------------------------------------------------------------- loaders, optimizer, schedule


def test_loaders_have_the_rows_and_the_order_of_the_fields() -> None:
    data = TensorDataset(torch.arange(20.0))
    settings = moved(
        per_device_train_batch_size=4, per_device_eval_batch_size=16, dataloader_drop_last=True, dataloader_num_workers=1,
        dataloader_prefetch_factor=3, dataloader_persistent_workers=True, dataloader_multiprocessing_context="spawn",
    )  # fmt: skip
    train, val = settings.loaders(data, {"a": data}, torch.stack)
    assert (train.batch_size, train.drop_last, type(train.sampler).__name__) == (4, True, "RandomSampler")
    assert (val["a"].batch_size, val["a"].drop_last, type(val["a"].sampler).__name__) == (
        16,
        False,
        "SequentialSampler",
    )
    assert (train.num_workers, train.prefetch_factor, train.persistent_workers, train.collate_fn) == (
        1,
        3,
        True,
        torch.stack,
    )
    assert train.multiprocessing_context.get_start_method() == "spawn"
    train, none = moved(train_sampling_strategy="sequential", dataloader_in_order=False).loaders(data)
    assert (type(train.sampler).__name__, none, train.in_order) == ("SequentialSampler", None, False)
    assert train.collate_fn is transformers.default_data_collator
    assert type(moved(dataloader_pin_memory=False).loaders(None, data)[1]) is DataLoader


def test_a_stream_is_not_shuffled() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    train, _ = moved().loaders(Stream())
    assert train.batch_size == 8


class Tiny(TrainModule):
    def __init__(self, settings: FromTransformers) -> None:
        super().__init__()
        self.settings = settings
        config = transformers.BertConfig(
            vocab_size=16,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            pad_token_id=0,
        )
        self.model = transformers.BertForSequenceClassification(config)
        self.rates: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[1]).loss
        return loss

    def on_step(self) -> None:
        self.rates.append(self.trainer.optimizers["main"].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        return self.settings.optimizers(self)


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_decay": 0.1, "adam_beta2": 0.99, "adam_epsilon": 1e-6},
        {"optim": "adamw_torch"},
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
        {"optim": "rmsprop", "optim_args": "alpha=0.9,centered=1"},
        {"optim": "adagrad", "optim_args": "lr_decay=0.1"},
        {"optim": "adafactor"},
    ],
    ids=lambda fields: fields.get("optim", "default"),
)
def test_the_optimizer_and_its_groups_are_those_of_transformers(fields: dict[str, Any]) -> None:
    args = arguments(**fields, learning_rate=0.01)
    module = Tiny(from_training_arguments(args))
    module.model.bert.pooler.requires_grad_(False)
    optimizer, _ = module.configure_optimizers()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    theirs = TheirTrainer(module.model, args).create_optimizer()
    assert type(optimizer) is type(theirs)
    assert optimizer.defaults == theirs.defaults
    for mine, other in zip(optimizer.param_groups, theirs.param_groups, strict=True):
        assert [id(p) for p in mine["params"]] == [id(p) for p in other["params"]]
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"warmup_steps": 3},
        {"warmup_steps": 0.25, "lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "constant"},
        {"warmup_steps": 4, "lr_scheduler_type": "constant_with_warmup"},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-6}},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
        {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 2, "lr_scheduler_kwargs": {"num_decay_steps": 4}},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "linear",
)
def test_the_rates_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    args = arguments(**fields, learning_rate=0.01, output_dir=str(tmp_path), max_steps=12, save_strategy="no")
    module = Tiny(from_training_arguments(args))
    rows = TensorDataset(torch.ones(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long))
    trainer = Trainer(
        **from_training_arguments(args).trainer | {"run_dir": None, "progress": False, "print_plan": "none"}
    )
    trainer.fit(module, rows, batch_size=4)
    theirs = TheirTrainer(module.model, args)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scheduler = theirs.create_scheduler(12, optimizer)
    wanted = []
    for _ in range(12):
        optimizer.step()
        scheduler.step()
        wanted.append(optimizer.param_groups[0]["lr"])
    assert module.rates == pytest.approx(wanted, abs=1e-12)


def test_a_schedule_by_a_metric_follows_the_best_models() -> None:
    settings = moved(
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 3}, eval_strategy="epoch", metric_for_best_model="f1",
    )  # fmt: skip
    assert settings.optimizers(Tiny(settings))[1:] == ("reduce_lr_on_plateau:patience=3", "val_f1")
