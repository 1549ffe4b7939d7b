"""The sections of the plan: each function returns the lines of one section, in the order in which they are printed.

Owns which settings the plan shows, and their texts. Decides nothing (`resolve` and `opened_data` do). Must not know: how a plan is printed
or stored (`plan`), the engine, the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fabricate.configuration.arguments import Settings
from fabricate.configuration.opened_data import Data, settled
from fabricate.configuration.plan import Plan, Setting
from fabricate.configuration.resolve import Resolved
from fabricate.data.source import Source
from fabricate.distributed.devices import distributed_type, note_on
from fabricate.errors import FabricateError, size_text
from fabricate.model.memory import Need, available, halved, total
from fabricate.optim.schedules import Schedule
from fabricate.registry.hook_calls import Origin
from fabricate.registry.validation import lines as lines_of
from fabricate.registry.validation import ranks_per_row
from fabricate.strategies.base import Strategy
from fabricate.strategies.quantised import quantised_weights


def make_plan(
    settings: Settings,
    resolved: Resolved,
    module: torch.nn.Module,
    data: Data,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    schedules: Mapping[str, Schedule] | None = None,
    notes: Sequence[str] = (),
    needed: Need | None = None,
) -> Plan:
    """The plan as data. `optimizers`: known once the module is built; without them, learning rates are left out. `needed`: the memory that
    `module` needs, if it is known."""
    lines = (
        Setting("module", type(module).__name__, "argument"),
        *_ranks(resolved),
        *_strategy_and_precision(resolved),
        *(_batches(settings, resolved, data, data.train) if data.train is not None else ()),
        *_length(settings),
        *_learning_rates(optimizers or {}, schedules or {}),
        *(_memory(resolved, needed, settled(settings, resolved, data)) if needed is not None else ()),
        *_parameters(resolved.strategy, module),
        *_update(settings, resolved),
        *_computation(settings, resolved),
        *_outputs(settings, bool(data.validation)),
    )
    sources = [source for source in (data.train, *data.validation.values()) if source is not None]
    batch_size_notes = (
        [f"batch_size={data.train.batch_size}: {data.found}"] if data.found and data.train is not None else []
    )
    all_notes = [
        *batch_size_notes,
        *(note for source in sources for note in source.notes),
        *notes,
        *_notes_on_ranks(resolved),
    ]
    lines = (*lines, *_other_arguments(settings, resolved, {line.name for line in lines}))
    lines = tuple(replace(line, source=_source(resolved, line)) for line in lines)
    return Plan(lines, tuple(_plugins(resolved)), tuple(dict.fromkeys(all_notes)), tuple(_adopted(resolved)))


def _ranks(resolved: Resolved) -> Iterator[Setting]:
    """The device and the number of ranks."""
    world_size, launcher = resolved.launch.world_size, resolved.launch.launcher
    yield Setting("device", str(resolved.device), resolved.device_source)
    yield Setting("world_size", world_size, f"launcher ({launcher})")
    kind, kinds = (
        distributed_type(resolved.device, resolved.strategy.in_group(world_size)),
        resolved.strategy.distributed_types,
    )
    kind = kind if kind in kinds else kinds[0]
    yield Setting("distributed_type", kind, "Accelerate")


def _notes_on_ranks(resolved: Resolved) -> Iterator[str]:
    """Notes about unexpected effects of the device or of the number of ranks."""
    if note := note_on(resolved.device):
        yield note
    if resolved.launch.world_size == 1 and resolved.strategy.in_group(1):
        yield f"strategy={resolved.strategy.name!r} on one process: nothing is divided between ranks"


def _strategy_and_precision(resolved: Resolved) -> Iterator[Setting]:
    """The strategy and the precision: their names, and the lines from their `describe()`."""
    strategy, precision = resolved.strategy, resolved.precision
    of_strategy = lines_of(strategy)
    yield Setting("strategy", strategy.name, resolved.choices["strategy"].source)
    for topic, text in of_strategy.items():
        yield Setting(topic, text, strategy.name)
    yield Setting("precision", precision.name, resolved.choices["precision"].source)
    yield Setting("compute_dtype", precision.compute_dtype, f"{precision.name}; verified before the first step")
    for topic, text in lines_of(precision).items():
        if topic not in of_strategy:  # the strategy's text wins over the precision's
            yield Setting(topic, text, precision.name)


def _batches(settings: Settings, resolved: Resolved, data: Data, train: Source) -> Iterator[Setting]:
    """The training data, and how its batches make updates."""
    world_size = resolved.launch.world_size
    readers = world_size // ranks_per_row(resolved.strategy, world_size)
    if train.batch_size is not None:
        per_rank, product = (
            "; ".join(filter(None, ("per rank", data.found))),
            f"{train.batch_size} x {data.accumulation[0]} x {readers}",
        )
    else:
        per_rank = product = "as the batches come"
    yield Setting(
        "train", train.kind, f"{train.num_samples:,} samples" if train.num_samples is not None else "no length"
    )
    order, why = {True: ("shuffled", "seed and epoch"), False: ("not shuffled", "data"), None: ("its own", "data")}[
        train.shuffle
    ]
    yield Setting("row_order", order, ", ".join(train.sampler_names) or why)
    yield Setting("micro_batch_size", train.batch_size, per_rank)
    yield Setting("gradient_accumulation_steps", *data.accumulation)
    yield Setting("global_batch_size", train.global_batch, product)
    yield Setting(
        "loss_weight", "as training_step says, else the labels its cross-entropy counts, else rows", "per batch"
    )
    yield Setting("updates_per_epoch", train.updates_per_epoch, "data")
    limits = [name for name in ("max_steps", "max_epochs") if getattr(settings, name) is not None]
    yield Setting("total_steps", data.total_steps(settings), " and ".join(limits))
    yield Setting("resumes", train.resumes, "data")


def _length(settings: Settings) -> Iterator[Setting]:
    """The limits at which the fit ends."""
    yield Setting("max_steps", settings.max_steps, "argument" if settings.max_steps is not None else "default")
    yield Setting("max_epochs", settings.max_epochs, "argument" if settings.max_epochs is not None else "default")
    for name in ("min_steps", "min_epochs"):
        if (least := getattr(settings, name)) is not None:
            yield Setting(name, least, "argument")
    if settings.max_time:
        yield Setting("max_time", str(settings.max_time), "argument")


def _learning_rates(
    optimizers: Mapping[str, torch.optim.Optimizer], schedules: Mapping[str, Schedule]
) -> Iterator[Setting]:
    for name, optimizer in optimizers.items():
        own = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
        rates = ["found by itself" if rate is None else float(rate) for rate in own]
        yield Setting(_of_optimizer("learning_rate", name), rates, f"{type(optimizer).__name__}, never scaled")
    for name, schedule in schedules.items():
        yield Setting(_of_optimizer("schedule", name), schedule.text, "configure_optimizers")


def _of_optimizer(topic: str, name: str) -> str:
    return topic if name == "main" else f"{topic} {name}"


def _parameters(strategy: Strategy, module: torch.nn.Module) -> Iterator[Setting]:
    numbers = strategy.numbers_of_weights(module)
    for topic, trainable in (("parameters_trainable", True), ("parameters_frozen", False)):
        yield Setting(topic, sum(number for p, number in numbers.items() if p.requires_grad is trainable), "module")
    if quantised := quantised_weights(module).values():
        kinds = Counter(each.kind for each in quantised)
        yield Setting(
            "quantised_weights",
            [f"{number} by {kind}" for kind, number in kinds.items()],
            "frozen; checkpoints hold what is trained, and a digest of what is not",
        )


def _update(settings: Settings, resolved: Resolved) -> Iterator[Setting]:
    """Clipping, and the treatment of gradients that are not finite."""
    yield _clipping(settings, resolved)
    costs = "one wait for the device per update" if settings.nonfinite == "skip" else "noticed at log boundaries"
    yield Setting("nonfinite", settings.nonfinite, f"{_by(settings, 'nonfinite')}; {costs}")


def _clipping(settings: Settings, resolved: Resolved) -> Setting:
    by = f"by {resolved.strategy.clips}, once per update"
    if resolved.max_grad_norm is not None:
        return Setting("clipping", f"to the norm {resolved.max_grad_norm[0]:g}", f"{by}; {resolved.max_grad_norm[1]}")
    if settings.max_grad_value is not None:
        return Setting("clipping", f"to the value {settings.max_grad_value:g}", f"{by}; argument")
    return Setting("clipping", None, "default")


def _computation(settings: Settings, resolved: Resolved) -> Iterator[Setting]:
    """Seed, compilation, the copy of batches to the device, and the switches of the computation."""
    yield Setting("seed", *resolved.seed)
    yield _compiling(settings.compile)
    if resolved.device.type == "cpu":
        yield Setting("batches", "used where they are", "no device to copy to")
    else:
        pinned = "data sets and DataLoaders over them: from pinned memory"
        yield Setting("batches", "copied beside the computation", pinned)
    if settings.activation_checkpointing:
        yield Setting("activation_checkpointing", True, "argument")
    if settings.detect_anomaly:
        yield Setting("detect_anomaly", True, "argument")
    yield Setting("deterministic", settings.deterministic, "argument" if settings.deterministic else "default")


def _compiling(argument: str | Mapping[str, Any] | None) -> Setting:
    if argument is None:
        return Setting("compile", None, "default")
    if isinstance(argument, Mapping):
        argument = ", ".join(f"{name}={value}" for name, value in argument.items())
    return Setting("compile", argument or "blocks, else layers", "argument")


def _outputs(settings: Settings, validates: bool) -> Iterator[Setting]:
    """The run directory, checkpoints, and the moments of saving, validation and logging."""
    written = settings.run_dir is not None
    yield Setting(
        "run_dir", str(settings.run_dir) if written else None, "argument" if written else "nothing is written"
    )
    if settings.save == "async":
        yield Setting("save", settings.save, "argument; copied, and written in the background")
    if settings.save_weights_only and settings.run_dir is not None:
        yield Setting("save_weights_only", True, "argument; nothing resumes from such checkpoints")
    if settings.load_best:
        yield Setting("load_best", True, "argument; the fit ends with the weights of its best checkpoint")
    if settings.save_frozen is False:
        yield Setting("save_frozen", False, "argument; a resume needs the same frozen weights")
    for name, takes_place in (("save_every", written), ("validate_every", validates), ("log_every", True)):
        every = getattr(settings, name)
        yield Setting(name, str(every) if every and takes_place else None, _by(settings, name))


def _other_arguments(settings: Settings, resolved: Resolved, shown: Collection[str]) -> Iterator[Setting]:
    """The arguments that the script or `fabricate run` gives and that no line above shows."""
    elsewhere = {"plugins", "max_grad_norm", "max_grad_value"} - resolved.launched.keys()
    for name in dict.fromkeys([*settings.given, *resolved.launched]):
        if name not in shown and name not in elsewhere:
            given = resolved.launched.get(name)
            value = getattr(settings, name) if given is None else given.value
            if isinstance(value, Mapping):
                value = [f"{key}={each}" for key, each in value.items()]
            elif isinstance(value, tuple):
                value = [str(each) for each in value]
            elif not isinstance(value, int | float | str | list | None):
                value = str(value)
            yield Setting(name, value, "argument")


def _by(settings: Settings, name: str) -> str:
    return "argument" if name in settings.given else "default"


def _plugins(resolved: Resolved) -> Iterator[dict[str, str]]:
    """The origin of the strategy, the precision and each plugin."""
    for kind, choice in resolved.choices.items():
        yield {"name": f"{kind} {choice.chosen.name}", "origin": str(choice.origin)}
    origins = resolved.registry.manager.origins
    for name, _ in resolved.registry.active:
        yield {"name": name, "origin": str(origins.get(name, Origin()))}


def _source(resolved: Resolved, line: Setting) -> str:
    """The source of a line's value; `fabricate run`, if it and not the script set the argument."""
    given = resolved.launched.get(line.name)
    return given.source if given is not None else line.source


def _adopted(resolved: Resolved) -> Iterator[str]:
    """The settings whose values come from a launcher's variable or the strategy's file."""
    values: dict[str, tuple[Any, str] | None] = {
        **{kind: (choice.chosen.name, choice.source) for kind, choice in resolved.choices.items()},
        "gradient_accumulation_steps": resolved.accumulation,
        "batch_size": resolved.batch_size,
        "global_batch_size": resolved.global_batch_size,
        "max_grad_norm": resolved.max_grad_norm,
    }
    for name, given in resolved.launched.items():
        yield f"{name}={given.value} ({given.source})"
    for name, setting in values.items():
        if name in resolved.launched:
            continue
        if setting is not None and setting[1] != "argument" and not setting[1].startswith("auto: "):
            yield f"{name}={setting[0]} ({setting[1]})"


def _memory(resolved: Resolved, needed: Need, settled: Strategy.Settled) -> Iterator[Setting]:
    """The memory that a rank needs under this strategy, and under the others."""
    world_size, on_device = resolved.launch.world_size, resolved.device.type != "cpu"
    room, where = available(resolved.device, resolved.launch.local_world_size)
    needed = needed.computed_in(resolved.precision)
    per_rank = needed.per_rank(resolved.strategy, world_size)
    has = f"{size_text(room)} ({where})"
    yield Setting(
        "memory_per_rank",
        {"total": total(per_rank, on_device), **per_rank},
        f"estimate, {needed.counted}, activations not counted; a rank has {has}",
    )
    if world_size > 1:
        others = _other_strategies(resolved)
        if resolved.plan_only:
            yield from _tutorial_counts(resolved, needed, others)
        by_name = {}
        for name, other in (others | {resolved.strategy.name: resolved.strategy}).items():
            try:
                if other is not resolved.strategy:
                    other.settle(settled)
                by_name[name] = total(needed.per_rank(other, world_size), on_device)
            except FabricateError:
                continue  # this strategy does not run with these settings
        too_big = [name for name, takes in by_name.items() if takes > room]
        fits = f"{' and '.join(too_big)} not within {has}" if too_big else f"all within {has}"
        yield Setting("memory_by_strategy", by_name, fits)


def _tutorial_counts(resolved: Resolved, needed: Need, others: Mapping[str, Strategy]) -> Iterator[Setting]:
    """The memory of training in half precision: without float32 master weights (the number in many tutorials), and with them."""
    if resolved.precision.mixed_precision not in ("bf16", "fp16") or "gradients" not in needed.whole:
        return
    counts = {name: halved(needed, other, resolved.launch.world_size) for name, other in others.items()}
    for number, (topic, text) in enumerate(
        (
            ("memory_in_tutorials", "half precision without float32 master weights, as many tutorials count"),
            ("memory_with_masters", "the same with float32 master weights, which training keeps"),
        )
    ):
        yield Setting(topic, [f"{strategy} {count[number] / 1e9:.1f} GB" for strategy, count in counts.items()], text)


def _other_strategies(resolved: Resolved) -> dict[str, Strategy]:
    """The strategies that could replace this one: "ddp" and "fsdp"; under `fabricate plan`, all that are offered, also by installed
    plugins, which this imports. They are not settled."""
    registry = resolved.registry
    offered = [offer.name for offer in registry.offered("strategy")] if resolved.plan_only else ["ddp", "fsdp"]
    others = {}
    for name in offered:
        try:
            other: Strategy = registry.resolve("strategy", name)[0]
        except Exception:  # a fault of a plugin that the run does not use
            continue
        if not any(other.check(resolved.launch.world_size, resolved.device)):
            others[name] = other
    return others
