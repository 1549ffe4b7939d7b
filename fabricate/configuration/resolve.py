"""From settings to a plan: which strategy and precision run, over which data, and where each choice came from.

Decides; builds nothing on a device, and no rank talks to another. Must not know: the engine, the loop, checkpoints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricate.configuration.arguments import Settings
from fabricate.configuration.plan import Plan, Setting
from fabricate.data.source import Loading, Source
from fabricate.data.user_data import open_source
from fabricate.errors import ConfigurationError, FabricateError, first_line, size_text
from fabricate.launch.ranks import Launch, detect
from fabricate.launch.settings import Request, requests
from fabricate.model.memory import Need, available, halved, need_ahead, total
from fabricate.module import TrainModule
from fabricate.optim.schedules import Schedule
from fabricate.precisions.base import Precision
from fabricate.registry.hook_calls import Origin
from fabricate.registry.registry import Registry, distribution_of
from fabricate.registry.validation import lines as lines_of
from fabricate.registry.validation import ranks_per_row
from fabricate.strategies.base import Strategy


@dataclass(frozen=True)
class Choice:
    """A strategy or precision with the reason it was taken and the plugin it came from."""

    made: Any
    source: str
    origin: Origin


@dataclass(frozen=True)
class Resolved:
    """What is going to run. Pairs of value and source are None when nobody set them; `batch_size` is what a strategy's file says."""

    launch: Launch
    registry: Registry
    device: torch.device
    choices: dict[str, Choice]
    accumulation: tuple[int, str] | None
    max_grad_norm: tuple[float, str] | None
    batch_size: tuple[int, str] | None
    global_batch_size: tuple[int, str] | None
    seed: tuple[int, str]
    plan_only: bool

    @property
    def strategy(self) -> Strategy:
        """The strategy object of this fit."""
        made: Strategy = self.choices["strategy"].made
        return made

    @property
    def precision(self) -> Precision:
        """The precision object of this fit."""
        made: Precision = self.choices["precision"].made
        return made


@dataclass(frozen=True)
class Data:
    """The opened data of a fit or an evaluation, and how many micro-batches make an update."""

    train: Source | None = None
    validation: dict[str, Source] = field(default_factory=dict)
    accumulation: tuple[int, str] = (1, "default")

    def total_steps(self, settings: Settings) -> int | None:
        """The number of updates of the whole fit; None when it cannot be known."""
        per_epoch = self.train.updates_per_epoch if self.train is not None else None
        epochs = settings.max_epochs
        known = [
            settings.max_steps,
            per_epoch * epochs if per_epoch is not None and epochs is not None else None,
        ]
        return min((n for n in known if n is not None), default=None)


def resolve(settings: Settings, module: TrainModule, training: bool = True) -> Resolved:
    """Names to objects, "auto" to a choice, the launcher's word against the Trainer's. Two set values that differ are an
    error that names both. `module` is measured where a choice needs it, not changed. All ranks, no collectives."""
    launch, asked = detect(os.environ), requests(os.environ)
    registry = Registry(settings.plugins)
    on_cpu = "cpu" in asked or not torch.cuda.is_available()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", launch.local_rank)
    choices: dict[str, Choice] = {}
    for kind, value in (("strategy", settings.strategy), ("precision", settings.precision)):
        chosen, source = _choose(kind, value, asked.get(kind), device)
        if chosen == "auto":
            chosen, source = _automatic(
                launch, device, registry, lambda: need_ahead(module, training, settings.max_steps)
            )
        made, offer = registry.resolve(kind, chosen)
        choices[kind] = Choice(made, source, offer.origin if offer is not None else distribution_of(made))
        if kind == "strategy":
            asked = _with_file(asked, made)
    strategy, max_grad_norm = choices["strategy"].made, _told("max_grad_norm", settings.max_grad_norm, asked, float)
    if settings.max_grad_value is not None:
        if max_grad_norm is not None:
            raise ConfigurationError(
                f"max_grad_value={settings.max_grad_value} is set in the Trainer and max_grad_norm={max_grad_norm[0]} by "
                f"{max_grad_norm[1]}; remove one"
            )
        if not strategy.exposes_gradients:
            raise ConfigurationError(
                f"max_grad_value={settings.max_grad_value}: strategy={strategy.name!r} keeps gradients to itself and cannot clip them "
                "by value; use max_grad_norm="
            )
    if settings.seed is not None:
        seed = (settings.seed, "argument")
    else:
        seed = (torch.initial_seed() % 2**32, "torch's initial seed; random generators are not seeded")
    return Resolved(
        launch=launch,
        registry=registry,
        device=device,
        choices=choices,
        accumulation=_told("gradient_accumulation_steps", settings.gradient_accumulation_steps, asked, int),
        max_grad_norm=max_grad_norm,
        batch_size=_told("batch_size", None, asked, int),
        global_batch_size=_told("global_batch_size", settings.global_batch_size, asked, int),
        seed=seed,
        plan_only="plan_only" in asked,
    )


def _with_file(asked: Mapping[str, Request], strategy: Strategy) -> dict[str, Request]:
    """What the launcher was told and what the strategy's configuration file says."""
    told = dict(asked)
    for name, (value, source) in strategy.asks().items():
        theirs = told.setdefault(name, Request(str(value), source))
        if type(value)(theirs.value) != value:
            raise ConfigurationError(
                f"{name}: {theirs.source} says {theirs.value!r} and {source} says {value!r}; remove one, or make them equal"
            )
    return told


def _automatic(launch: Launch, device: torch.device, registry: Registry, ahead: Callable[[], Need]) -> tuple[str, str]:
    """The strategy when nobody named one: replicas, or shards where the states of a replica do not fit."""
    if launch.world_size == 1:
        return "single", "auto: one process"
    reason = f"auto: {launch.world_size} processes"
    try:
        needed = ahead()
    except Exception as exc:  # whatever configure_model raises; if it matters, the fit raises it again
        return "ddp", f"{reason}; memory is not known before building ({first_line(exc)})"
    replica: Strategy = registry.resolve("strategy", "ddp")[0]
    takes = total(needed.per_rank(replica, launch.world_size), device.type != "cpu")
    room, where = available(device, launch.local_world_size)
    fits = f"{reason}; a replica takes {size_text(takes)}"
    if takes > room:
        return "fsdp", f"{fits}, more than {size_text(room)} ({where})"
    return "ddp", f"{fits} of {size_text(room)} ({where})"


def _choose(kind: str, value: Any, request: Request | None, device: torch.device) -> tuple[Any, str]:
    automatic = isinstance(value, str) and value == "auto"
    if request is not None:
        own = getattr(value, "name", value)
        names = {str(own), str(own).partition(":")[0]}  # options may be the Trainer's alone
        if not automatic and request.value not in (names | {"no"} if "fp32" in names else names):
            raise ConfigurationError(
                f"{kind}={own!r} is set in the Trainer and {request.value!r} by {request.source}; remove one, or make "
                "them equal"
            )
        return (request.value, request.source) if automatic else (value, "argument")
    if not automatic:
        return value, "argument"
    if kind == "strategy":
        return "auto", ""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", "auto: the device computes in bf16 natively"
    return "fp32", f"auto: {device.type} is not known to compute in bf16 natively"


def _told(argument: str, own: Any, asked: Mapping[str, Request], kind: type) -> tuple[Any, str] | None:
    request = asked.get(argument)
    if request is None:
        return (own, "argument") if own is not None else None
    told = kind(request.value)
    if own is not None and own != told:
        raise ConfigurationError(
            f"{argument}={own} is set in the Trainer and {told} by {request.source}; remove one, or make them equal"
        )
    return (told, request.source)


def open_data(settings: Settings, found: Resolved, train: object, val: object, loading: Loading) -> Data:
    """Open training and validation data for this rank; a global batch is turned into accumulation steps."""
    per_row, seed = ranks_per_row(found.strategy, found.launch.world_size), found.seed[0]
    rank, world_size = found.launch.rank // per_row, found.launch.world_size // per_row

    def opened(data: object, argument: str, how: Loading, training: bool, accumulation: int = 1) -> Source:
        limit = settings.limit_train_batches if training else settings.limit_val_batches
        return open_source(
            data,
            argument=argument,
            loading=replace(how, pin_memory=found.device.type == "cuda"),
            training=training,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
            seed=seed,
            limit=limit,
        )

    accumulation = found.accumulation or (1, "default")
    source = (
        opened(train, "train", _with_size(train, loading, found), True, accumulation[0]) if train is not None else None
    )
    if source is not None and found.batch_size is not None and source.batch_size not in (None, found.batch_size[0]):
        raise ConfigurationError(
            f"train has batches of {source.batch_size} rows per rank and {found.batch_size[1]} says {found.batch_size[0]}; remove one, "
            "or make them equal"
        )
    if source is not None and found.global_batch_size is not None:
        accumulation = _accumulation(source, found, world_size)
        source = opened(train, "train", _with_size(train, loading, found), True, accumulation[0])
    sets = val if isinstance(val, Mapping) else {"": val} if val is not None else {}
    validation = {
        str(name): opened(
            data,
            f"val[{name!r}]" if name else "val",
            _for_evaluation(data, _with_size(data, loading, found)),
            False,
        )
        for name, data in sets.items()
    }
    return Data(source, validation, accumulation)


def _accumulation(source: Source, found: Resolved, world_size: int) -> tuple[int, str]:
    """How many micro-batches make the global batch that was asked for."""
    assert found.global_batch_size is not None
    size, told_by = found.global_batch_size
    asked = f"global_batch_size={size}" + ("" if told_by == "argument" else f" ({told_by})")
    if source.batch_size is None:
        raise ConfigurationError(
            f"{asked} needs rows that can be counted ahead: pass a dataset with batch_size=..., or set "
            "gradient_accumulation_steps"
        )
    per_step = source.batch_size * world_size
    number, rest = divmod(size, per_step)
    if rest or not number:
        raise ConfigurationError(
            f"{asked} is no multiple of batch_size {source.batch_size} x {world_size} ranks = {per_step}"
        )
    if found.accumulation is not None and found.accumulation[0] != number:
        raise ConfigurationError(
            f"{asked} means gradient_accumulation_steps={number}, but {found.accumulation[0]} is set "
            f"({found.accumulation[1]}); remove one"
        )
    return number, "from global_batch_size" if told_by == "argument" else f"from {told_by}"


def _with_size(data: object, loading: Loading, found: Resolved) -> Loading:
    """`loading` with the batch size of the strategy's file, for data sets whose batch size nobody set."""
    if loading.batch_size is not None or found.batch_size is None or isinstance(data, DataLoader | list | tuple):
        return loading
    return replace(loading, batch_size=found.batch_size[0]) if _rows(data) else loading


def _rows(data: object) -> bool:
    """Whether `data` is rows that `batch_size` makes batches of."""
    return _stream(data) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _stream(data: object) -> bool:
    """Whether `data` can only be read from its beginning: torch's or Hugging Face's iterable data set."""
    return isinstance(data, IterableDataset) or type(data).__name__ == "IterableDataset"


def settle(settings: Settings, found: Resolved, data: Data) -> None:
    """Tell the strategy what came out of all settings. Pure."""
    found.strategy.settle(_settled(settings, found, data))


def _settled(settings: Settings, found: Resolved, data: Data) -> Strategy.Settled:
    return Strategy.Settled(
        world_size=found.launch.world_size,
        device=found.device,
        precision=found.precision,
        micro_batch_size=data.train.batch_size if data.train is not None else None,
        gradient_accumulation_steps=data.accumulation[0],
        max_grad_norm=found.max_grad_norm[0] if found.max_grad_norm else None,
        nonfinite=settings.nonfinite,
    )


def _memory(found: Resolved, needed: Need, settled: Strategy.Settled) -> Iterator[Setting]:
    """What a rank needs under the strategy of this run, and under the others."""
    world_size, on_device = found.launch.world_size, found.device.type != "cpu"
    room, where = available(found.device, found.launch.local_world_size)
    per_rank = needed.per_rank(found.strategy, world_size)
    has = f"{size_text(room)} ({where})"
    yield Setting(
        "memory_per_rank",
        {"total": total(per_rank, on_device), **per_rank},
        f"estimate, {needed.counted}, activations not counted; a rank has {has}",
    )
    if world_size > 1:
        others = _others(found)
        if found.precision.mixed_precision in ("bf16", "fp16") and found.plan_only and "gradients" in needed.whole:
            counts = {name: halved(needed, other, world_size) for name, other in others.items()}
            for number, (name, what) in enumerate(_COUNTED):
                yield Setting(name, [f"{strategy} {c[number] / 1e9:.1f} GB" for strategy, c in counts.items()], what)
        by_name = {}
        for name, other in (others | {found.strategy.name: found.strategy}).items():
            try:
                if other is not found.strategy:
                    other.settle(settled)
                by_name[name] = total(needed.per_rank(other, world_size), on_device)
            except FabricateError:
                continue  # it does not run with these settings
        too_big = [name for name, takes in by_name.items() if takes > room]
        fits = f"{' and '.join(too_big)} not within {has}" if too_big else f"all within {has}"
        yield Setting("memory_by_strategy", by_name, fits)


_COUNTED = (
    ("memory_in_tutorials", "half precision without float32 master weights, as many tutorials count"),
    ("memory_with_masters", "the same with float32 master weights, which training keeps"),
)


def _others(found: Resolved) -> dict[str, Strategy]:
    """The strategies that could run in the place of this one: the built-in ones; under `fabricate plan` those of installed
    plugins as well, which are imported for it. They are not settled."""
    offered = [offer.name for offer in found.registry.offered("strategy")] if found.plan_only else ["ddp", "fsdp"]
    others = {}
    for name in offered:
        try:
            other: Strategy = found.registry.resolve("strategy", name)[0]
        except Exception:  # of a plugin that nobody asked for
            continue
        if not any(other.check(found.launch.world_size, found.device)):
            others[name] = other
    return others


def _for_evaluation(data: object, loading: Loading) -> Loading:
    """What of the training data's loading applies to a validation set: nothing for loaders and iterables of batches."""
    if isinstance(data, DataLoader) or not _rows(data):
        return Loading()
    workers = min(loading.num_workers, 1) if _stream(data) else loading.num_workers
    return Loading(loading.batch_size, workers, loading.collate_fn, None if _stream(data) else False)


def _compiling(asked: str | Mapping[str, Any] | None) -> tuple[str | None, str]:
    if asked is None:
        return None, "default"
    options = ", ".join(f"{name}={value}" for name, value in asked.items()) if isinstance(asked, Mapping) else asked
    return options or "blocks, else layers", "argument"


def _copying(device: torch.device) -> tuple[str, str]:
    if device.type == "cpu":
        return "used where they are", "no device to copy to"
    return "copied beside the computation", "data sets and DataLoaders over them: from pinned memory"


def make_plan(
    settings: Settings,
    found: Resolved,
    module: torch.nn.Module,
    data: Data,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    schedules: Mapping[str, Schedule] | None = None,
    notes: Sequence[str] = (),
    needed: Need | None = None,
) -> Plan:
    """The plan as data. `optimizers` are known once the module is built; without them the learning rates are left out.
    `needed`: what `module` takes, where that is known."""
    world_size, strategy, precision, source = found.launch.world_size, found.strategy, found.precision, data.train
    kind = "NO" if world_size == 1 else "MULTI_CPU" if found.device.type == "cpu" else "MULTI_GPU"
    written = settings.run_dir is not None

    def count(trainable: bool) -> int:
        return sum(math.prod(strategy.local_part(p).shape) for p in module.parameters() if p.requires_grad is trainable)

    def by_argument(value: object) -> str:
        return "argument" if value is not None else "default"

    lines = [
        Setting(
            "device", str(found.device), "detected" if torch.cuda.is_available() or kind == "NO" else "no GPU here"
        ),
        Setting("world_size", world_size, f"launcher ({found.launch.launcher})"),
        Setting("distributed_type", kind, "Accelerate"),
        Setting("strategy", strategy.name, found.choices["strategy"].source),
        *(Setting(topic, text, strategy.name) for topic, text in lines_of(strategy).items()),
        Setting("precision", precision.name, found.choices["precision"].source),
        Setting("compute_dtype", precision.compute_dtype, f"{precision.name}; verified before the first step"),
        *(
            Setting(topic, text, precision.name)
            for topic, text in lines_of(precision).items()
            if topic not in lines_of(strategy)  # an engine that does it itself knows better
        ),
    ]
    if source is not None:
        size = f"{source.num_samples:,} samples" if source.num_samples is not None else "no length"
        readers = world_size // ranks_per_row(strategy, world_size)
        product = f"{source.batch_size} x {data.accumulation[0]} x {readers}"
        counted = source.batch_size is not None
        lines += [
            Setting("train", source.kind, size),
            Setting("micro_batch_size", source.batch_size, "per rank" if counted else "as the batches come"),
            Setting("gradient_accumulation_steps", *data.accumulation),
            Setting("global_batch_size", source.global_batch, product if counted else "as the batches come"),
            Setting(
                "loss_weight", "as training_step says, else the labels its cross-entropy counts, else rows", "per batch"
            ),
            Setting("updates_per_epoch", source.updates_per_epoch, "data"),
            Setting("total_steps", data.total_steps(settings), "max_steps and max_epochs"),
            Setting("resumes", source.resumes, "data"),
        ]
    lines += [
        Setting("max_steps", settings.max_steps, by_argument(settings.max_steps)),
        Setting("max_epochs", settings.max_epochs, by_argument(settings.max_epochs)),
        *([Setting("max_time", str(settings.max_time), "argument")] if settings.max_time else []),
        *(
            Setting(
                "learning_rate" if name == "main" else f"learning_rate {name}",
                [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups],
                f"{type(optimizer).__name__}, never scaled",
            )
            for name, optimizer in (optimizers or {}).items()
        ),
        *(
            Setting("schedule" if name == "main" else f"schedule {name}", schedule.text, "configure_optimizers")
            for name, schedule in (schedules or {}).items()
        ),
        *(_memory(found, needed, _settled(settings, found, data)) if needed is not None else ()),
        Setting("parameters_trainable", count(True), "module"),
        Setting("parameters_frozen", count(False), "module"),
        _clipping(settings, found),
        Setting(
            "nonfinite",
            settings.nonfinite,
            "one wait for the device per update" if settings.nonfinite == "skip" else "noticed at log boundaries",
        ),
        Setting("seed", *found.seed),
        Setting("compile", *_compiling(settings.compile)),
        Setting("batches", *_copying(found.device)),
        Setting("deterministic", settings.deterministic, "argument" if settings.deterministic else "default"),
        Setting("run_dir", str(settings.run_dir) if written else None, "argument" if written else "nothing is written"),
        *(
            [Setting("save", settings.save, "copied, and written beside the training")]
            if settings.save == "async"
            else []
        ),
        *(
            []
            if settings.save_frozen
            else [Setting("save_frozen", False, "argument; a resume needs the same frozen weights")]
        ),
        Setting("save_every", str(settings.save_every) if settings.save_every and written else None, ""),
        Setting(
            "validate_every", str(settings.validate_every) if settings.validate_every and data.validation else None
        ),
        Setting("log_every", str(settings.log_every)),
    ]
    plugins = [
        {"name": f"{kind} {choice.made.name}", "origin": str(choice.origin)} for kind, choice in found.choices.items()
    ]
    origins = found.registry.manager.origins
    plugins += [{"name": name, "origin": str(origins.get(name, Origin()))} for name, _ in found.registry.active]
    sources = [s for s in (source, *data.validation.values()) if s is not None]
    every = [*notes, *(note for s in sources for note in s.notes)]
    return Plan(tuple(lines), tuple(plugins), tuple(dict.fromkeys(every)))


def _clipping(settings: Settings, found: Resolved) -> Setting:
    by = f"by {found.strategy.clips}, once per update"
    if found.max_grad_norm is not None:
        return Setting("clipping", f"to the norm {found.max_grad_norm[0]:g}", f"{by}; {found.max_grad_norm[1]}")
    if settings.max_grad_value is not None:
        return Setting("clipping", f"to the value {settings.max_grad_value:g}", f"{by}; argument")
    return Setting("clipping", None, "default")
