"""Every public name of `accelerate.Accelerator`, read or called on `trainer.accelerator` in a fit, and compared with the expected value.

A cell is "right" if the value equals one from another source (weights and norms from the same updates in plain torch, rows from the data,
ranks from the launcher), and "error" if an error names what to use instead. Anything else is wrong. This script writes the table under
"Every name" in `docs/accelerator.md`.

    python -m campaigns.accelerator --out docs/accelerator.md
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import AutocastKwargs, ProfileKwargs
from safetensors.torch import load_file
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabricate import Callback, FabricateError, Trainer, TrainModule
from fabricate.testing import close_pools, run_ranks

CASES = (("single", 1), *((strategy, ranks) for strategy in ("ddp", "fsdp", "zero2", "zero3") for ranks in (1, 2)))
"""The strategies with their numbers of ranks."""
ROWS, WINDOW, RATE = 9, 8, 0.1
"""On two ranks with two micro-batches of two rows: one whole window, and one further row, with which the other rank runs a stand-in."""
TYPES = {"single": "NO", "ddp": "MULTI_CPU", "fsdp": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
RIGHT, ABSENT = "right", "absent"
HEADING = "## Every name\n"
INTRODUCTION = """
Each name was read or called in `on_step`, unless the row names another place.

- "right": the answer equals the expected one. Expected weights and norms come from the same updates in plain PyTorch,
  expected rows from the data.
- "error": the call raises the error in the last column.
- "absent": the attribute does not exist, as in Accelerate, where only DeepSpeed sets it.
- "-": not observed, because the strategy needs two ranks or refuses the hook.
"""


def public_names() -> set[str]:
    """The public methods and properties of Accelerate's class, and the attributes that its code assigns to `self`."""
    code = ast.parse(inspect.getsource(sys.modules[Accelerator.__module__]))
    (own,) = [node for node in code.body if isinstance(node, ast.ClassDef) and node.name == "Accelerator"]
    stores = [n for n in ast.walk(own) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assigned = {node.attr for node in stores if ast.unparse(node.value) == "self"}
    return {name for name in assigned | set(dir(Accelerator)) if not name.startswith("_")}


def net() -> torch.nn.Sequential:
    """A small network, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(600, 4), torch.nn.Linear(4, 1))


def data() -> TensorDataset:
    """Inputs, targets, and the number of each row."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(ROWS, 600, generator=generator), torch.randn(ROWS, 1, generator=generator), torch.arange(ROWS)
    )


class Reference:
    """The same two updates by hand: the weights after the first, and the gradient's norm in the second."""

    def __init__(self) -> None:
        x, y, _ = data().tensors
        model = net()
        mse_loss(model(x[:WINDOW]), y[:WINDOW]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
        self.weights = {f"net.{name}": value.detach().clone() for name, value in model.state_dict().items()}
        mse_loss(model(x[WINDOW:]), y[WINDOW:]).backward()
        self.norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


class Recorder(GeneralTracker):  # type: ignore[misc]
    name, requires_logging_directory = "recorder", False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    @property
    def tracker(self) -> list[dict[str, Any]]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.configuration = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append(values)


@dataclass
class Context:
    """The values that a check may use."""

    strategy: str
    rank: int
    ranks: int
    folder: Path
    reference: Reference
    recorder: Recorder
    trainer: Any = None
    module: Any = None
    batch: Any = None
    loss: Any = None
    optimizer: Any = None
    is_last: bool = True
    gathered: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)

    @property
    def accelerator(self) -> Any:
        return self.trainer.accelerator

    @property
    def hidden(self) -> bool:
        """Whether the strategy's engine hides the gradients."""
        return self.strategy.startswith("zero")


Check = Callable[[Context], None]
CHECKS: dict[str, dict[str, Check]] = {}
"""The checks by moment and name."""


def check(moment: str, *names: str) -> Callable[[Check], Check]:
    """Register the decorated function as the check of `names` at `moment`; without names, of its own name."""

    def keep(function: Check) -> Check:
        CHECKS.setdefault(moment, {}).update(dict.fromkeys(names or (function.__name__,), function))
        return function

    return keep


def same(actual: object, expected: object) -> None:
    """Raise AssertionError with `actual` unless it equals `expected`."""
    assert actual == expected, f"{actual!r} instead of {expected!r}"


# -- values ---------------------------------------------------------------------------------------------------------------


def value(name: str, expected: Callable[[Context], object]) -> None:
    """Register a check that `name` has the value that `expected` returns."""
    CHECKS.setdefault("on_step", {})[name] = lambda context: same(getattr(context.accelerator, name), expected(context))


value("num_processes", lambda context: context.ranks)
value("process_index", lambda context: context.rank)
value("local_process_index", lambda context: context.rank)
value("is_main_process", lambda context: context.rank == 0)
value("is_local_main_process", lambda context: context.rank == 0)
value("is_last_process", lambda context: context.rank == context.ranks - 1)
value("should_save_model", lambda context: context.rank == 0)
value("use_distributed", lambda context: context.ranks > 1)
value("mixed_precision", lambda context: "no")
value("is_fsdp2", lambda context: context.strategy == "fsdp" and dist.is_initialized())
value("is_composable_parallelism_enabled", lambda context: context.strategy == "fsdp" and dist.is_initialized())
value("project_dir", lambda context: str(context.folder / "run" / "trackers"))
value("logging_dir", lambda context: str(context.folder / "run" / "trackers"))
value("fp8_backend", lambda context: "NO")
value("gradient_accumulation_steps", lambda context: 2)
for _name in ("parallelism_config", "torch_device_mesh", "scaler", "flag_tensor", "dispatch_batches"):
    value(_name, lambda context: None)
for _name in ("scaler", "fp8_recipe", "ao_recipe", "te_recipe", "msamp_recipe", "autocast", "profile"):
    value(f"{_name}_handler", lambda context: None)
for _name in (
    "native_amp",
    "fp8_enabled",
    "has_fp8_handler",
    "delayed_fp8_autocast",
    "has_lomo_optimizer",
    "multi_device",
):
    value(_name, lambda context: False)
for _name in (
    "split_batches",
    "non_blocking",
    "use_seedable_sampler",
    "use_stateful_dataloader",
    "optimizer_step_was_skipped",
):
    value(_name, lambda context: False)
for _name in ("even_batches", "device_placement", "step_scheduler_with_optimizer"):
    value(_name, lambda context: True)
value("rng_types", lambda context: ["generator"])
value("save_iteration", lambda context: 0)
value("log_with", lambda context: [context.recorder])
value("trackers", lambda context: [context.recorder] if context.rank == 0 else [])


@check("on_step")
def device(context: Context) -> None:
    same((context.accelerator.device.type, context.accelerator.device), ("cpu", context.trainer._live().engine.device))


@check("on_step")
def distributed_type(context: Context) -> None:
    alone = context.ranks == 1 and (context.strategy == "ddp" or not dist.is_initialized())
    expected = ("NO", "MULTI_CPU") if alone else (TYPES[context.strategy],)
    assert context.accelerator.distributed_type.value in expected, context.accelerator.distributed_type
    same(accelerate.PartialState().distributed_type, context.accelerator.distributed_type)


@check("on_step")
def deepspeed_plugin(context: Context) -> None:
    plugin = context.accelerator.deepspeed_plugin
    same(plugin.zero_stage if plugin is not None else None, {"zero2": 2, "zero3": 3}.get(context.strategy))


@check("on_step")
def deepspeed_config(context: Context) -> None:
    same(context.accelerator.deepspeed_config["zero_optimization"]["stage"], int(context.strategy[-1]))
    same(context.accelerator.deepspeed_config["gradient_accumulation_steps"], 2)


@check("on_step")
def state(context: Context) -> None:
    accelerate_state = context.accelerator.state
    plugin = getattr(accelerate_state, "fsdp_plugin", None)
    same((accelerate_state.num_processes, accelerate_state.process_index), (context.ranks, context.rank))
    same(plugin is not None and plugin.fsdp_version == 2, context.strategy == "fsdp")
    same(plugin is not None and plugin.reshard_after_forward, context.strategy == "fsdp")


@check("on_step")
def gradient_state(context: Context) -> None:
    same((context.accelerator.gradient_state.num_steps, context.accelerator.gradient_state.sync_gradients), (2, True))


@check("on_step")
def ddp_handler(context: Context) -> None:
    handler = context.accelerator.ddp_handler
    same(handler is not None and not handler.find_unused_parameters, context.strategy == "ddp")


@check("on_step", "init_handler", "dataloader_config", "project_configuration")
def kinds(context: Context) -> None:
    same(type(context.accelerator.init_handler).__name__, "InitProcessGroupKwargs")
    same(context.accelerator.dataloader_config.even_batches, True)
    same(context.accelerator.project_configuration.project_dir, str(context.folder / "run" / "trackers"))


@check("on_accumulate")
def sync_gradients(context: Context) -> None:
    same(context.accelerator.sync_gradients, context.is_last)


# -- between ranks --------------------------------------------------------------------------------------------------------


@check("training_step")
@check("on_step")
@check("on_eval_end")
@check("validation_step")
def gather(context: Context) -> None:
    mine = {"here": [torch.tensor([[context.rank, 7]])], "loss": torch.tensor(float(context.rank))}
    gathered = context.accelerator.gather(mine)
    same(gathered["here"][0].tolist(), [[rank, 7] for rank in range(context.ranks)])
    same(gathered["loss"].reshape(-1).tolist(), [float(rank) for rank in range(context.ranks)])


@check("training_step", "gather_for_metrics")
def gather_for_metrics(context: Context) -> None:
    number = context.batch[2]
    context.gathered += context.accelerator.gather_for_metrics({"number": number})["number"].tolist()
    context.objects += [int(text) for text in context.accelerator.gather_for_metrics([str(int(n)) for n in number])]


@check("on_step", "gather_for_metrics")
def gather_for_metrics_between_updates(context: Context) -> None:
    mine = torch.full((context.rank + 1, 2), context.rank)
    gathered = context.accelerator.gather_for_metrics(mine)
    same(gathered.tolist(), [[rank, rank] for rank in range(context.ranks) for _ in range(rank + 1)])


@check("validation_step", "gather_for_metrics")
def gather_for_metrics_in_evaluation(context: Context) -> None:
    same(context.accelerator.gather_for_metrics(context.batch[2]).tolist(), context.batch[2].tolist())


@check("on_step", "reduce")
@check("validation_step", "reduce")
def reduce_(context: Context) -> None:
    mine, every = torch.tensor([context.rank + 1.0, 1.0]), range(1, context.ranks + 1)
    expected = {"sum": sum(every), "mean": sum(every) / context.ranks, "max": context.ranks, "none": context.rank + 1}
    for reduction, first in expected.items():
        same(float(context.accelerator.reduce(mine, reduction)[0]), float(first))


@check("on_step")
@check("validation_step")
def pad_across_processes(context: Context) -> None:
    mine = torch.ones(2, context.rank + 1)
    padded = context.accelerator.pad_across_processes(mine, dim=1, pad_index=-1)
    same(padded.tolist(), [[1.0] * (context.rank + 1) + [-1.0] * (context.ranks - context.rank - 1)] * 2)


@check("on_step", "main_process_first", "local_main_process_first", "wait_for_everyone")
@check("validation_step", "main_process_first", "local_main_process_first", "wait_for_everyone")
def first(context: Context) -> None:
    for number, method in enumerate(("main_process_first", "local_main_process_first")):
        file = context.folder / f"first-{number}-{context.trainer.step}"
        with getattr(context.accelerator, method)():
            assert context.rank == 0 or file.exists(), "rank 1 did not wait"
            file.touch()
        context.accelerator.wait_for_everyone()
        with getattr(accelerate.PartialState(), method)():  # Accelerate's own method, for comparison
            pass


@check("on_step")
def split_between_processes(context: Context) -> None:
    inputs = {"a": [1, 2, 3], "b": [4, 5, 6]}
    with context.accelerator.split_between_processes(inputs, apply_padding=True) as share:
        same(share["a"], [1, 2, 3] if context.ranks == 1 else [[1, 2], [3, 3]][context.rank])
    same(inputs, {"a": [1, 2, 3], "b": [4, 5, 6]})


@check("on_step", "set_trigger", "check_trigger")
def trigger(context: Context) -> None:
    if context.rank == context.ranks - 1:
        context.accelerator.set_trigger()
    same([context.accelerator.check_trigger(), context.accelerator.check_trigger()], [True, False])


@check("on_step", "on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process")
def decorators(context: Context) -> None:
    accelerator, last = context.accelerator, context.ranks - 1
    for decorator, where in (
        (accelerator.on_main_process, 0),
        (accelerator.on_local_main_process, 0),
        (accelerator.on_last_process, last),
        (accelerator.on_process(process_index=last), last),
        (accelerator.on_local_process(local_process_index=last), last),
    ):
        same(decorator(lambda: "ran")(), "ran" if context.rank == where else None)


@check("on_step", "print")
def print_(context: Context) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        context.accelerator.print("line", end="")
    same(output.getvalue(), "line" if context.rank == 0 else "")


# -- weights --------------------------------------------------------------------------------------------------------------


def close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError unless the weights are equal up to rounding."""
    same(sorted(weights), sorted(expected))
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name].float(), weight, rtol=1e-5, atol=1e-6)


@check("on_step")
@check("validation_step")
@check("training_step")
def get_state_dict(context: Context) -> None:
    """Rank 0 gets all weights; the other ranks get all or none."""
    weights = context.accelerator.get_state_dict(context.module)
    of_part = context.accelerator.get_state_dict(context.module.net[0])
    if context.rank > 0 and context.strategy in ("fsdp", "zero3"):
        same((weights, of_part), ({}, {}))
    elif context.trainer.step == 1:
        close(weights, context.reference.weights)
        close(of_part, {name[6:]: weight for name, weight in context.reference.weights.items() if name[:6] == "net.0."})
    else:
        same([tuple(weight.shape) for weight in weights.values()], [(4, 600), (4,), (1, 4), (1,)])


@check("on_step")
def save_model(context: Context) -> None:
    for number, size in enumerate(("10GB", "1KB")):
        folder = context.folder / f"saved-{number}"
        context.accelerator.save_model(context.module, folder, max_shard_size=size)
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) == (1, 2)[number], files
        close({name: weight for file in files for name, weight in load_file(file).items()}, context.reference.weights)


@check("on_step")
def unwrap_model(context: Context) -> None:
    accelerator, run = context.accelerator, context.trainer._live()
    for wrapped in (context.module, run.engine.model, run.engine.root):
        assert accelerator.unwrap_model(wrapped) is context.module, type(wrapped)
    assert accelerator.unwrap_model(context.module.net[0]) is context.module.net[0]


@check("on_step")
def save(context: Context) -> None:
    context.accelerator.save({"x": torch.tensor([1.0 + context.rank])}, context.folder / "x", safe_serialization=True)
    context.accelerator.wait_for_everyone()
    same(float(load_file(context.folder / "x")["x"]), 1.0)


# -- gradients ------------------------------------------------------------------------------------------------------------


@check("on_before_step")
@check("on_step")
def clip_grad_norm_(context: Context) -> None:
    accelerator, parameters = context.accelerator, list(context.module.parameters())
    norm = accelerator.clip_grad_norm_(context.module.parameters(), context.reference.norm / 2)
    again = accelerator.clip_grad_norm_(parameters, 1e9)
    torch.testing.assert_close(torch.tensor([float(norm), 2 * float(again)]), torch.full((2,), context.reference.norm))


@check("on_before_step")
@check("on_step")
def clip_grad_value_(context: Context) -> None:
    context.accelerator.clip_grad_value_(context.module.parameters(), 1e-4)
    for parameter in context.module.parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        assert 0 < float(gradient.abs().max()) <= 1.0001e-4


@check("on_before_step")
@check("on_step")
def unscale_gradients(context: Context) -> None:
    part_of, parameters = context.trainer.strategy.local_part, list(context.module.parameters())
    before = [part_of(p.grad).memory.clone() for p in parameters if p.grad is not None]
    context.accelerator.unscale_gradients(context.optimizer)
    after = [part_of(p.grad).memory for p in parameters if p.grad is not None]
    assert before
    assert all(map(torch.equal, before, after))


@check("training_step")
@check("on_step")
def autocast(context: Context) -> None:
    with context.accelerator.autocast():
        same(torch.is_autocast_enabled("cpu"), False)  # fp32
    with torch.autocast("cpu", torch.bfloat16), context.accelerator.autocast(AutocastKwargs(enabled=False)):
        same(torch.is_autocast_enabled("cpu"), False)


# -- data, trackers, the rest ---------------------------------------------------------------------------------------------


@check("on_step", "prepare", "prepare_data_loader")
def prepare(context: Context) -> None:
    """`prepare` of a user's loader: each row is read once."""
    accelerator = context.accelerator
    for make in (accelerator.prepare, accelerator.prepare_data_loader):
        loader = make(DataLoader(data(), batch_size=2))
        rows = [int(n) for batch in loader for n in accelerator.gather_for_metrics(batch[2])]
        same(sorted(rows), list(range(ROWS)))


@check("on_step", "prepare of a model or an optimizer")
def prepare_model_or_optimizer(context: Context) -> None:
    context.accelerator.prepare(context.module, context.optimizer)
    raise AssertionError("prepared")


@check("on_step")
def skip_first_batches(context: Context) -> None:
    batches = context.accelerator.skip_first_batches(DataLoader(data(), batch_size=2), 3)
    same([batch[2].tolist() for batch in batches], [[6, 7], [8]])


@check("on_step")
def log(context: Context) -> None:
    context.accelerator.log({"mine": 1.5})
    same({"mine": 1.5} in context.recorder.logged, context.rank == 0)


@check("on_step")
def get_tracker(context: Context) -> None:
    tracker = context.accelerator.get_tracker("recorder")
    assert tracker is context.recorder if context.rank == 0 else type(tracker) is GeneralTracker


@check("on_step", "free_memory", "clear")
def free_memory(context: Context) -> None:
    for method in (context.accelerator.free_memory, context.accelerator.clear):
        same(method([1], [2]), [None, None])
    assert context.accelerator.unwrap_model(context.trainer._live().engine.model) is context.module


@check("on_step")
def profile(context: Context) -> None:
    with context.accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(context.folder / "trace"))):
        torch.ones(2).sum()
    same(len(list((context.folder / "trace").iterdir())), context.ranks)


@check("on_step")
def maybe_context_parallel(context: Context) -> None:
    """Without context parallelism it changes nothing, as in Accelerate."""
    whole = torch.ones(2, 4)
    with context.accelerator.maybe_context_parallel(buffers=[whole], buffer_seq_dims=[1]):
        same(tuple(whole.shape), (2, 4))


@check("on_step")
def verify_device_map(context: Context) -> None:
    same(context.accelerator.verify_device_map(context.module), False)


def called(name: str, *arguments: Callable[[Context], Any]) -> None:
    """Register a check that `name` raises an error, because it has no meaning in a fit."""

    def call(context: Context) -> None:
        attribute = getattr(context.accelerator, name)
        result = attribute(*(argument(context) for argument in arguments)) if callable(attribute) else attribute
        if hasattr(result, "__enter__"):
            result.__enter__()
        raise AssertionError(f"no error: {result!r}")

    CHECKS["on_step"][name] = call


def the_module(context: Context) -> Any:
    return context.module


def the_optimizer(context: Context) -> Any:
    return context.optimizer


def the_folder(context: Context) -> Any:
    return str(context.folder / "state")


called("prepare_model", the_module)
called("prepare_optimizer", the_optimizer)
called("prepare_scheduler", lambda context: torch.optim.lr_scheduler.ConstantLR(context.optimizer))
called("backward", lambda context: torch.ones((), requires_grad=True))
called("lomo_backward", lambda context: torch.ones((), requires_grad=True), lambda context: RATE)
called("accumulate", the_module)
called("no_sync", the_module)
called("trigger_sync_in_backward", the_module)
called("join_uneven_inputs", lambda context: [context.module])
called("save_state", the_folder)
called("load_state", the_folder)
called("register_for_checkpointing", the_optimizer)
called("register_save_state_pre_hook", lambda context: print)
called("register_load_state_pre_hook", lambda context: print)
called("init_trackers", lambda context: "mine")
called("end_training")
called("deepspeed_ulysses_dl_adapter", lambda context: None, the_module)
for _name in ("tensor", "pipeline", "context", "data"):
    called(f"{_name}_parallel_rank")
called("data_parallel_shard_rank")
called("deepspeed_engine_wrapped")
called("step")


# -- the fit with the checks ----------------------------------------------------------------------------------------------


class Net(TrainModule):
    def __init__(self, look: Look) -> None:
        super().__init__()
        self.net = net()
        self.look = look

    def training_step(self, batch: Any) -> torch.Tensor:
        self.look.at("training_step", batch=batch)
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        self.look.at("validation_step", batch=batch)
        return {"loss": mse_loss(self.net(batch[0]), batch[1])}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


class Look(Callback):
    """Runs the checks of each moment, and keeps the worst outcome of each."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.outcomes: dict[str, str] = {}

    def at(self, moment: str, **things: Any) -> None:
        for name, thing in things.items():
            setattr(self.context, name, thing)
        for name, function in CHECKS[moment].items():
            key = name if moment == "on_step" and not self._elsewhere(name) else f"{name}, in {moment}"
            answer = outcome(function, self.context)
            if rank_of(answer) >= rank_of(self.outcomes.get(key, RIGHT)):
                self.outcomes[key] = answer

    @staticmethod
    def _elsewhere(name: str) -> bool:
        return any(name in checks for moment, checks in CHECKS.items() if moment != "on_step")

    def on_accumulate(self, trainer: Trainer, module: TrainModule, is_last: bool) -> None:
        self.at("on_accumulate", is_last=is_last)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.context.trainer, self.context.module = trainer, module

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == 1:
            self.at("on_step", optimizer=next(iter(trainer.optimizers.values())))

    def on_eval_end(self) -> None:
        self.at("on_eval_end")

    def on_epoch_end(self) -> None:
        if not self.outcomes["gather_for_metrics, in training_step"].startswith("wrong"):
            answer = outcome(
                lambda context: same((sorted(context.gathered), sorted(context.objects)), (list(range(ROWS)),) * 2),
                self.context,
            )
            self.outcomes["gather_for_metrics, in training_step"] = answer


class LookAtGradients(Look):
    """`Look` with the hook that strategies with their own engine refuse."""

    def on_before_step(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        if trainer.step == 1:
            self.at("on_before_step", optimizer=optimizer)


def outcome(function: Check, context: Context) -> str:
    """The result of a check: "right", "absent", "error: MESSAGE" or "wrong: MESSAGE"."""
    try:
        function(context)
    except FabricateError as exc:
        return f"error: {exc}"
    except AttributeError as exc:
        return ABSENT if "has no attribute" in str(exc) else f"wrong: {exc}"
    except Exception as exc:
        return f"wrong: {type(exc).__name__}: {exc}"
    return RIGHT


def rank_of(answer: str) -> int:
    """The severity of an outcome; a larger number is worse."""
    return ("right", "absent", "error", "wrong").index(answer.partition(":")[0])


def observe_here(strategies: Iterable[str], folder: str) -> dict[str, dict[str, str]]:
    """The outcomes on this rank by strategy and name. All ranks; one fit for each strategy."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    by_strategy = {}
    for strategy in strategies:
        place = Path(folder, f"{strategy}-{ranks}")
        place.mkdir(exist_ok=True)
        context = Context(strategy, rank, ranks, place, Reference(), Recorder())
        look = (Look if context.hidden else LookAtGradients)(context)
        trainer = Trainer(
            strategy=strategy, max_epochs=1, seed=0, progress=False, plugins=[look], run_dir=place / "run", keep=1,
            gradient_accumulation_steps=2, trackers=[context.recorder],
        )  # fmt: skip
        try:
            trainer.fit(Net(look), data(), data(), batch_size=WINDOW // 2 // ranks, shuffle=False)
        except FabricateError as exc:
            if look.outcomes or "processes" not in str(exc):
                raise
            look.outcomes = {"": f"error: {exc}"}
        by_strategy[strategy] = look.outcomes
    return by_strategy


def observe(cases: Iterable[tuple[str, int]] = CASES) -> dict[tuple[str, int], dict[str, str]]:
    """The worst outcome of the ranks by case and name. A case that a strategy refuses is left out."""
    by_case: dict[tuple[str, int], dict[str, str]] = {}
    cases = list(cases)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({ranks for _, ranks in cases}):
            strategies = [strategy for strategy, number in cases if number == ranks]
            for each in run_ranks(observe_here, ranks, strategies, folder, timeout=600):
                for strategy, outcomes in each.items():
                    worst = by_case.setdefault((strategy, ranks), {})
                    for name, one in outcomes.items():
                        worst[name] = max(worst.get(name, RIGHT), one, key=rank_of)
    return {case: outcomes for case, outcomes in by_case.items() if "" not in outcomes}


def rows(by_case: dict[tuple[str, int], dict[str, str]]) -> list[str]:
    """The lines of the table: the name, the moment, the outcome of each case, and the error messages."""
    lines = []
    keys = list(dict.fromkeys(key for outcomes in by_case.values() for key in outcomes))
    for key in sorted(keys, key=str.lower):
        name, _, moment = key.partition(", ")
        cells = [by_case.get(case, {}).get(key) for case in CASES]
        words = " | ".join("-" if cell is None else cell.partition(":")[0] for cell in cells)
        errors = [cell.partition(": trainer.accelerator.")[2] for cell in cells if (cell or "").startswith("error")]
        messages = "; or: ".join(dict.fromkeys(error.partition(": ")[2] or error for error in errors))
        lines.append(
            f"| `{name}`{', ' + moment if moment else ''} | {words} | {messages.replace('|', chr(92) + '|')} |"
        )
    return lines


def main() -> int:
    """Write the page; return 1 if an outcome is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    by_case = observe()
    close_pools()
    head = " | ".join(f"{strategy}, {ranks}" for strategy, ranks in CASES)
    lines = [
        INTRODUCTION,
        f"| name | {head} | what the error says |",
        "|---" * (len(CASES) + 2) + "|",
        *rows(by_case),
    ]
    wrong = [
        f"{case}: {name}: {answer}"
        for case, each in by_case.items()
        for name, answer in each.items()
        if answer[:5] == "wrong"
    ]
    counts = Counter(answer.partition(":")[0] for each in by_case.values() for answer in each.values())
    print("\n".join(wrong) or f"{sum(counts.values())} answers in {len(by_case)} cases: {dict(counts)}")
    if options.out is not None and not wrong:
        before, heading, _ = options.out.read_text(encoding="utf-8").partition(HEADING)
        options.out.write_text("\n".join([before + heading.rstrip("\n"), *lines, ""]), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
