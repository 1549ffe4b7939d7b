"""Translation of a `transformers.TrainingArguments` into arguments of a `Trainer`, loaders, an optimizer and its schedule.

Owns which fields have a counterpart in fabricate; `fabricate.registry.foreign_names` says what to use instead of the others. Must not know:
transformers. It is imported only for Adafactor and the default collator; the arguments are read as a dataclass.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricate.errors import ConfigurationError
from fabricate.launch.ranks import detect
from fabricate.optim.transformers_optimizers import Wanted, built, wanted
from fabricate.registry import foreign_names

_SHOWN = (
    *("num_train_epochs", "per_device_train_batch_size", "learning_rate", "lr_scheduler_type", "optim"),
    *("max_grad_norm", "seed", "eval_strategy", "save_steps", "logging_steps"),
)
"""Fields whose defaults affect the training: a printed line names those that are at their defaults."""
_DIFFERENT = (
    "Trainer differs from transformers.Trainer: columns that the model does not take are not removed (use remove_columns= of "
    "datasets.map); a loss that is not finite ends the fit (see nonfinite=); a fit resumes from the newest checkpoint in "
    "run_dir (prevented by resume='never')"
)
_OPTIMIZER = (
    *("learning_rate", "weight_decay", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
)
_LOADERS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "train_sampling_strategy", "dataloader_drop_last"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order"),
)
_SILENT = (
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "logging_dir", "use_cpu"),
    *("do_train", "do_eval", "do_predict"),
)
"""Fields that are ignored: copies of other fields, flags for scripts, and `use_cpu`, which TrainingArguments applies itself."""


@dataclass(frozen=True)
class FromTransformers:
    """The translation of a `TrainingArguments`, from `from_training_arguments`.

    trainer: arguments of `Trainer`. resume: for `fit`. lines: the printed lines.

        settings = from_training_arguments(args)
        Trainer(**settings.trainer).fit(module, *settings.loaders(train, val, collate_fn), resume=settings.resume)
    """

    trainer: dict[str, Any]
    resume: str
    lines: tuple[str, ...]
    _loading: dict[str, Any]
    _optimizer: Wanted

    def loaders(self, train: Any, val: Any = None, collate_fn: Any = None) -> tuple[Any, Any]:
        """Loaders for `fit`: one of `train` with per_device_train_batch_size rows, shuffled unless train_sampling_strategy is "sequential",
        and one of `val`, or of each set in a mapping, with per_device_eval_batch_size rows. None if `train` or `val` is None. collate_fn:
        by default transformers' `default_data_collator`."""
        if collate_fn is None:
            from transformers import default_data_collator as collate_fn
        each = {**self._loading, "collate_fn": collate_fn}
        rows, eval_rows = each.pop("batch_size"), each.pop("eval_batch_size")
        shuffle, drop_last = each.pop("shuffle"), each.pop("drop_last")
        shuffle = shuffle and hasattr(train, "__len__") and not isinstance(train, IterableDataset)

        def evaluated(data: Any) -> Any:
            return DataLoader(data, batch_size=eval_rows, **each)

        trained = None
        if train is not None:
            trained = DataLoader(train, batch_size=rows, shuffle=shuffle, drop_last=drop_last, **each)
        if isinstance(val, Mapping) and not isinstance(val, Dataset):
            return trained, {name: evaluated(data) for name, data in val.items()}
        return trained, None if val is None else evaluated(val)

    def optimizers(self, module: torch.nn.Module) -> tuple[Any, ...]:
        """The return value for `configure_optimizers`: the optimizer, without weight decay for biases and norms, and the schedule with its
        warm-up."""
        return built(self._optimizer, module)


def from_training_arguments(args: Any, *, handled: Collection[str] = ()) -> FromTransformers:
    """Translate `args` for a `Trainer`; rank 0 prints the result.

    args: a `transformers.TrainingArguments`, or the tuple of `HfArgumentParser.parse_args_into_dataclasses`, which holds one. handled:
    names of fields that the script itself handles, such as "label_smoothing_factor"; they are treated as if they were at their defaults.
    Raises `ConfigurationError` for a field that is not at its default and has no counterpart.
    """
    args = _training_arguments(args)
    unknown = set(handled) - {field.name for field in dataclasses.fields(args)}
    if unknown:
        raise ConfigurationError(
            f"handled={sorted(handled)}: {type(args).__name__} has no field {', '.join(sorted(unknown))}. "
            "Give names of its fields"
        )
    args = _without(args, handled)
    given: dict[str, Any] = {}
    taken = {*_OPTIMIZER, *_LOADERS, *_SILENT, "resume_from_checkpoint"}
    for names, part in _PARTS.items():
        given |= part(args)
        taken |= set(names)
    lines = _lines(args, handled, given, [*_checked_others(args, taken), *_beside(args)])
    translated = FromTransformers(given, _resume(args), lines, _loading(args), wanted(args))
    if detect(os.environ).rank == 0:
        print(*translated.lines, sep="\n", flush=True)
    return translated


def _training_arguments(args: Any) -> Any:
    """The only TrainingArguments in `args`."""
    several = args if isinstance(args, tuple | list) else (args,)
    instances = [each for each in several if not isinstance(each, type) and _base(type(each)) is not None]
    if len(instances) != 1:
        kinds = ", ".join(type(each).__name__ for each in several)
        raise ConfigurationError(
            f"args={kinds}: give a transformers.TrainingArguments, or what HfArgumentParser(...).parse_args_into_dataclasses() returned"
        )
    return instances[0]


def _without(args: Any, handled: Collection[str]) -> Any:
    """A copy of `args` with the fields `handled` at their defaults."""
    defaults, copied = _defaults(args), copy.copy(args)
    for name in handled:
        setattr(copied, name, defaults[name])
    return copied


def _base(kind: type) -> type | None:
    """The class `TrainingArguments` of transformers among the bases of `kind`; None if `kind` is not derived from it."""
    bases = (base for base in kind.__mro__ if base.__name__ == "TrainingArguments")
    return next((base for base in bases if base.__module__.partition(".")[0] == "transformers"), None)


# ------------------------------------------------------------------------------------------------ fields without a counterpart


def _checked_others(args: Any, taken: Collection[str]) -> Iterator[str]:
    """A line for each changed field that can be left out. Raises `ConfigurationError` for other changed fields, except those in `taken`."""
    for name, value in _changed(args):
        if name in taken:
            continue
        remedy = foreign_names.ARGUMENTS.get(name, "")
        verb, colon, why = remedy.partition("nothing: ")
        if colon and not verb:
            yield f"{name}={_shown(value)} is left out: {why}"
            continue
        raise _refusal(args, name, f"use {remedy}" if remedy else "only your class has this field")


def _refusal(args: Any, name: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"TrainingArguments.{name}={_shown(getattr(args, name))} has no counterpart in a Trainer; {remedy}. Leave it at its default, "
        f"or if the script reads it itself, name it: from_training_arguments(args, handled=[{name!r}])"
    )


def _changed(args: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of the fields that are not at their default. Defaults are as in `_defaults`."""
    for name, default in _defaults(args).items():
        value = getattr(args, name, default)
        neutral = (name == "debug" and not value) or (name == "accelerator_config" and value == type(value)())
        if value != default and not neutral:
            yield name, value


def _defaults(args: Any) -> dict[str, Any]:
    """The defaults by field: those of transformers' own class, and of the class of `args` for fields that it adds."""
    kinds = [kind for kind in (type(args), _base(type(args))) if kind is not None]
    fields: list[Any] = [field for kind in kinds for field in dataclasses.fields(kind)]
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default for field in fields
    }


def _text(value: Any) -> Any:
    """The value of an enumeration's member; other values unchanged."""
    return getattr(value, "value", value)


def _shown(value: Any) -> str:
    return repr(_text(value))


# --------------------------------------------------------------------------------- fields that become arguments of a Trainer


def _length(args: Any) -> dict[str, Any]:
    if args.max_steps > 0:
        return {"max_steps": args.max_steps}
    if args.num_train_epochs != int(args.num_train_epochs):
        raise ConfigurationError(
            f"TrainingArguments.num_train_epochs={args.num_train_epochs!r}: a fit has whole epochs. Give max_steps"
        )
    return {"max_epochs": int(args.num_train_epochs)}


def _same(args: Any) -> dict[str, Any]:
    """Arguments whose meaning is the same in transformers and fabricate."""
    given = {"run_dir": args.output_dir, "seed": args.seed, "timeout": f"{args.ddp_timeout / 60:g} minutes"}
    if args.data_seed not in (None, args.seed):
        raise ConfigurationError(
            f"TrainingArguments.data_seed={args.data_seed!r}: a Trainer orders the data by seed={args.seed!r}. Leave "
            "data_seed out, or give a sampler that has its own generator"
        )
    # The default 1 is not passed on, so that a launcher or a DeepSpeed file may set another number.
    if args.gradient_accumulation_steps != 1:
        given["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if args.max_grad_norm:
        given["max_grad_norm"] = float(args.max_grad_norm)
    if args.full_determinism:
        given["deterministic"] = True
    if args.disable_tqdm:
        given["progress"] = False
    return given


def _precision(args: Any) -> dict[str, Any]:
    if args.bf16 or args.fp16:
        return {"precision": "bf16" if args.bf16 else "fp16"}
    if args.tf32:
        return {"precision": "tf32"}
    # mixed_precision is the launcher's request. transformers sets "no" if there is no request.
    return {"precision": "fp32"} if args.mixed_precision == "no" else {}


def _compiling(args: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    if getattr(args, name):
        given["activation_checkpointing"] = True
        options = getattr(args, f"{name}_kwargs") or {}
        if others := sorted(option for option, value in options.items() if (option, value) != ("use_reentrant", False)):
            raise ConfigurationError(
                f"TrainingArguments.{name}_kwargs={options!r}: {', '.join(others)} has no counterpart in a Trainer. Blocks are "
                "always recomputed as with use_reentrant=False. Leave the option out"
            )
    if args.torch_compile:
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        given["compile"] = {option: value for option, value in options.items() if value}
    return given


def _every(args: Any, what: str) -> str | None:
    """`WHAT_strategy` and `WHAT_steps` as a duration, for `what` "eval", "save" or "logging"; None for never."""
    strategy, steps = _text(getattr(args, f"{what}_strategy")), getattr(args, f"{what}_steps")
    if strategy == "no":
        return None
    if strategy == "epoch":
        return "1 epoch"
    if steps < 1:
        raise ConfigurationError(
            f"TrainingArguments.{what}_steps={steps!r} is a share of all updates. Give a number of updates, or {what}_strategy='epoch'"
        )
    return f"{int(steps)} steps"


def _evaluating(args: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"validate_every": _every(args, "eval"), "log_every": _every(args, "logging") or "1 epoch"}
    if args.eval_on_start:
        given["validate_first"] = True
    return given


def _saving(args: Any) -> dict[str, Any]:
    best_only = _text(args.save_strategy) == "best"
    limit = args.save_total_limit
    given: dict[str, Any] = {"save_every": None if best_only else _every(args, "save"), "keep": limit or "all"}
    if args.metric_for_best_model is not None and _every(args, "eval") is not None:
        # The best checkpoint is saved at its validation. save_total_limit includes it; "last" of keep does not.
        last = max(limit - 1, 1) if limit else "all"
        metric = f"val_{args.metric_for_best_model.removeprefix('eval_')}"
        given["keep"] = {"last": last, "best": 1, "metric": metric, "mode": "max" if args.greater_is_better else "min"}
    if args.load_best_model_at_end:
        given["load_best"] = True
    if args.save_only_model:
        given["save_weights_only"] = True
    return given


_TRACKER_NAMES = {"wandb": "name", "trackio": "name", "mlflow": "run_name"}
"""The option of each tracker for the name of the run."""


def _trackers(args: Any) -> dict[str, Any]:
    trackers = []
    for name in [] if args.report_to == "none" else args.report_to:
        options = [f"{_TRACKER_NAMES[name]}={args.run_name}"] if args.run_name and name in _TRACKER_NAMES else []
        if args.run_name and name not in _TRACKER_NAMES:
            raise _refusal(args, "run_name", f"run_dir names the run of {name}, and an option of the tracker may")
        if name == "trackio":
            options.append(f"project={args.project}")
        trackers.append(name + (":" + ",".join(options) if options else ""))
    return {"trackers": trackers} if trackers else {}


def _ddp(args: Any) -> dict[str, Any]:
    names = ("find_unused_parameters", "static_graph", "bucket_cap_mb")
    options = {name: getattr(args, f"ddp_{name}") for name in names}
    if args.ddp_broadcast_buffers is False:
        raise _refusal(
            args, "ddp_broadcast_buffers", "rank 0 sends its buffers before each forward, as by default in torch"
        )
    text = ",".join(f"{name}={str(value).lower()}" for name, value in options.items() if value)
    return {"strategy": f"ddp:{text}"} if text else {}


_PARTS: dict[tuple[str, ...], Callable[[Any], dict[str, Any]]] = {
    ("num_train_epochs", "max_steps"): _length,
    (
        *("output_dir", "seed", "data_seed", "ddp_timeout", "gradient_accumulation_steps", "max_grad_norm"),
        *("full_determinism", "disable_tqdm"),
    ): _same,
    ("bf16", "fp16", "tf32"): _precision,
    (
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    ): _compiling,
    ("eval_strategy", "eval_steps", "eval_on_start", "logging_strategy", "logging_steps"): _evaluating,
    (
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ): _saving,
    ("report_to", "run_name", "project"): _trackers,
    ("ddp_find_unused_parameters", "ddp_static_graph", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"): _ddp,
}
"""Names of fields, and the function that translates them into arguments of a Trainer."""


# ------------------------------------------------------------------------------------------------------- data, resuming, lines


def _loading(args: Any) -> dict[str, Any]:
    """Options of a DataLoader, and the batch size of evaluations."""
    order = args.train_sampling_strategy
    if order not in ("random", "sequential"):
        raise _refusal(args, "train_sampling_strategy", f"use {foreign_names.ARGUMENTS['train_sampling_strategy']}")
    options: dict[str, Any] = {
        "batch_size": args.per_device_train_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size,
        "shuffle": order == "random",
        "drop_last": args.dataloader_drop_last,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
        "in_order": getattr(args, "dataloader_in_order", True),
        "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
    }
    if args.dataloader_num_workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
    return options


def _resume(args: Any) -> str:
    given = args.resume_from_checkpoint
    return str(given) if given is not None and str(given).lower() not in ("true", "false") else "auto"


def _beside(args: Any) -> Iterator[str]:
    """Lines about combinations of fields that have a different effect in fabricate."""
    if _text(args.logging_strategy) == "no":
        yield "logging_strategy='no': metrics are written to run_dir once an epoch"
    if args.run_name and not args.report_to:
        yield f"run_name={args.run_name!r} is left out: report_to names no tracker"
    if getattr(args, "n_gpu", 1) > 1:
        yield (
            f"{args.n_gpu} GPUs are visible, but a process uses one. Start one process for each: fabricate run script.py "
            f"--nproc {args.n_gpu}. (transformers divides the batch of one process over all visible GPUs.)"
        )


def _lines(args: Any, handled: Collection[str], given: Mapping[str, Any], notes: Collection[str]) -> tuple[str, ...]:
    others = {*dict(_changed(args)), *handled}
    left = [f"{name}={_shown(getattr(args, name))}" for name in _SHOWN if name not in others]
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return (
        f"TrainingArguments: Trainer({arguments})",
        f"TrainingArguments, fields at their defaults: {', '.join(left)}",
        *(f"TrainingArguments: {note}" for note in notes),
        f"TrainingArguments: {_DIFFERENT}",
    )
