"""Every public name of `accelerate.Accelerator`, read or called on `trainer.accelerator` in a fit, against the truth.

A cell says "right" where the answer was compared with what is known from elsewhere (weights and norms from the same updates by hand in
plain torch, rows from the data, ranks from the launcher), and "error" where an error said what to use instead. Anything else is
wrong. The table under "Every name" in `docs/accelerator.md` is written here.

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
"""Strategies with numbers of ranks."""
ROWS, WINDOW, RATE = 9, 8, 0.1
"""Of two ranks with two micro-batches of two rows: one whole window, and one row, beside which a stand-in runs."""
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
    """Methods and properties of Accelerate's class, and what its code assigns to itself."""
    code = ast.parse(inspect.getsource(sys.modules[Accelerator.__module__]))
    (own,) = [node for node in code.body if isinstance(node, ast.ClassDef) and node.name == "Accelerator"]
    stores = [n for n in ast.walk(own) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assigned = {node.attr for node in stores if ast.unparse(node.value) == "self"}
    return {name for name in assigned | set(dir(Accelerator)) if not name.startswith("_")}


def net() -> torch.nn.Sequential:
    """The same values each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(600, 4), torch.nn.Linear(4, 1))


def data() -> TensorDataset:
    """Inputs, targets, and the number of each row."""
    made = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(ROWS, 600, generator=made), torch.randn(ROWS, 1, generator=made), torch.arange(ROWS)
    )


class Reference:
    """The same updates by hand: weights after the first, and the gradient's norm in the second."""

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
class Seen:
    """What a check may compare with."""

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
        """Whether gradients are the engine's."""
        return self.strategy.startswith("zero")


Check = Callable[[Seen], None]
CHECKS: dict[str, dict[str, Check]] = {}
"""By moment and name."""


def check(moment: str, *names: str) -> Callable[[Check], Check]:
    """The function below looks at `names`."""

    def keep(function: Check) -> Check:
        CHECKS.setdefault(moment, {}).update(dict.fromkeys(names or (function.__name__,), function))
        return function

    return keep


def same(found: object, expected: object) -> None:
    """An AssertionError that says what was found."""
    assert found == expected, f"{found!r} instead of {expected!r}"


# -- values ---------------------------------------------------------------------------------------------------------------


def value(name: str, expected: Callable[[Seen], object]) -> None:
    """`name` has the value that `expected` says."""
    CHECKS.setdefault("on_step", {})[name] = lambda seen: same(getattr(seen.accelerator, name), expected(seen))


value("num_processes", lambda seen: seen.ranks)
value("process_index", lambda seen: seen.rank)
value("local_process_index", lambda seen: seen.rank)
value("is_main_process", lambda seen: seen.rank == 0)
value("is_local_main_process", lambda seen: seen.rank == 0)
value("is_last_process", lambda seen: seen.rank == seen.ranks - 1)
value("should_save_model", lambda seen: seen.rank == 0)
value("use_distributed", lambda seen: seen.ranks > 1)
value("mixed_precision", lambda seen: "no")
value("is_fsdp2", lambda seen: seen.strategy == "fsdp" and dist.is_initialized())
value("is_composable_parallelism_enabled", lambda seen: seen.strategy == "fsdp" and dist.is_initialized())
value("project_dir", lambda seen: str(seen.folder / "run" / "trackers"))
value("logging_dir", lambda seen: str(seen.folder / "run" / "trackers"))
value("fp8_backend", lambda seen: "NO")
value("gradient_accumulation_steps", lambda seen: 2)
for _name in ("parallelism_config", "torch_device_mesh", "scaler", "flag_tensor", "dispatch_batches"):
    value(_name, lambda seen: None)
for _name in ("scaler", "fp8_recipe", "ao_recipe", "te_recipe", "msamp_recipe", "autocast", "profile"):
    value(f"{_name}_handler", lambda seen: None)
for _name in (
    "native_amp",
    "fp8_enabled",
    "has_fp8_handler",
    "delayed_fp8_autocast",
    "has_lomo_optimizer",
    "multi_device",
):
    value(_name, lambda seen: False)
for _name in (
    "split_batches",
    "non_blocking",
    "use_seedable_sampler",
    "use_stateful_dataloader",
    "optimizer_step_was_skipped",
):
    value(_name, lambda seen: False)
for _name in ("even_batches", "device_placement", "step_scheduler_with_optimizer"):
    value(_name, lambda seen: True)
value("rng_types", lambda seen: ["generator"])
value("save_iteration", lambda seen: 0)
value("log_with", lambda seen: [seen.recorder])
value("trackers", lambda seen: [seen.recorder] if seen.rank == 0 else [])


@check("on_step")
def device(seen: Seen) -> None:
    same((seen.accelerator.device.type, seen.accelerator.device), ("cpu", seen.trainer._live().engine.device))


@check("on_step")
def distributed_type(seen: Seen) -> None:
    alone = seen.ranks == 1 and (seen.strategy == "ddp" or not dist.is_initialized())
    expected = ("NO", "MULTI_CPU") if alone else (TYPES[seen.strategy],)
    assert seen.accelerator.distributed_type.value in expected, seen.accelerator.distributed_type
    same(accelerate.PartialState().distributed_type, seen.accelerator.distributed_type)


@check("on_step")
def deepspeed_plugin(seen: Seen) -> None:
    plugin = seen.accelerator.deepspeed_plugin
    same(plugin.zero_stage if plugin is not None else None, {"zero2": 2, "zero3": 3}.get(seen.strategy))


@check("on_step")
def deepspeed_config(seen: Seen) -> None:
    same(seen.accelerator.deepspeed_config["zero_optimization"]["stage"], int(seen.strategy[-1]))
    same(seen.accelerator.deepspeed_config["gradient_accumulation_steps"], 2)


@check("on_step")
def state(seen: Seen) -> None:
    found = seen.accelerator.state
    plugin = getattr(found, "fsdp_plugin", None)
    same((found.num_processes, found.process_index), (seen.ranks, seen.rank))
    same(plugin is not None and plugin.fsdp_version == 2, seen.strategy == "fsdp")
    same(plugin is not None and plugin.reshard_after_forward, seen.strategy == "fsdp")


@check("on_step")
def gradient_state(seen: Seen) -> None:
    same((seen.accelerator.gradient_state.num_steps, seen.accelerator.gradient_state.sync_gradients), (2, True))


@check("on_step")
def ddp_handler(seen: Seen) -> None:
    found = seen.accelerator.ddp_handler
    same(found is not None and not found.find_unused_parameters, seen.strategy == "ddp")


@check("on_step", "init_handler", "dataloader_config", "project_configuration")
def kinds(seen: Seen) -> None:
    same(type(seen.accelerator.init_handler).__name__, "InitProcessGroupKwargs")
    same(seen.accelerator.dataloader_config.even_batches, True)
    same(seen.accelerator.project_configuration.project_dir, str(seen.folder / "run" / "trackers"))


@check("on_accumulate")
def sync_gradients(seen: Seen) -> None:
    same(seen.accelerator.sync_gradients, seen.is_last)


# -- between ranks --------------------------------------------------------------------------------------------------------


@check("training_step")
@check("on_step")
@check("on_eval_end")
@check("validation_step")
def gather(seen: Seen) -> None:
    mine = {"here": [torch.tensor([[seen.rank, 7]])], "loss": torch.tensor(float(seen.rank))}
    found = seen.accelerator.gather(mine)
    same(found["here"][0].tolist(), [[rank, 7] for rank in range(seen.ranks)])
    same(found["loss"].reshape(-1).tolist(), [float(rank) for rank in range(seen.ranks)])


@check("training_step", "gather_for_metrics")
def gather_for_metrics(seen: Seen) -> None:
    number = seen.batch[2]
    seen.gathered += seen.accelerator.gather_for_metrics({"number": number})["number"].tolist()
    seen.objects += [int(text) for text in seen.accelerator.gather_for_metrics([str(int(n)) for n in number])]


@check("on_step", "gather_for_metrics")
def gather_for_metrics_between_updates(seen: Seen) -> None:
    mine = torch.full((seen.rank + 1, 2), seen.rank)
    found = seen.accelerator.gather_for_metrics(mine)
    same(found.tolist(), [[rank, rank] for rank in range(seen.ranks) for _ in range(rank + 1)])


@check("validation_step", "gather_for_metrics")
def gather_for_metrics_in_evaluation(seen: Seen) -> None:
    same(seen.accelerator.gather_for_metrics(seen.batch[2]).tolist(), seen.batch[2].tolist())


@check("on_step", "reduce")
@check("validation_step", "reduce")
def reduce_(seen: Seen) -> None:
    mine, every = torch.tensor([seen.rank + 1.0, 1.0]), range(1, seen.ranks + 1)
    expected = {"sum": sum(every), "mean": sum(every) / seen.ranks, "max": seen.ranks, "none": seen.rank + 1}
    for reduction, first in expected.items():
        same(float(seen.accelerator.reduce(mine, reduction)[0]), float(first))


@check("on_step")
@check("validation_step")
def pad_across_processes(seen: Seen) -> None:
    mine = torch.ones(2, seen.rank + 1)
    found = seen.accelerator.pad_across_processes(mine, dim=1, pad_index=-1)
    same(found.tolist(), [[1.0] * (seen.rank + 1) + [-1.0] * (seen.ranks - seen.rank - 1)] * 2)


@check("on_step", "main_process_first", "local_main_process_first", "wait_for_everyone")
@check("validation_step", "main_process_first", "local_main_process_first", "wait_for_everyone")
def first(seen: Seen) -> None:
    for number, method in enumerate(("main_process_first", "local_main_process_first")):
        file = seen.folder / f"first-{number}-{seen.trainer.step}"
        with getattr(seen.accelerator, method)():
            assert seen.rank == 0 or file.exists(), "rank 1 did not wait"
            file.touch()
        seen.accelerator.wait_for_everyone()
        with getattr(accelerate.PartialState(), method)():  # Accelerate's own, beside it
            pass


@check("on_step")
def split_between_processes(seen: Seen) -> None:
    inputs = {"a": [1, 2, 3], "b": [4, 5, 6]}
    with seen.accelerator.split_between_processes(inputs, apply_padding=True) as share:
        same(share["a"], [1, 2, 3] if seen.ranks == 1 else [[1, 2], [3, 3]][seen.rank])
    same(inputs, {"a": [1, 2, 3], "b": [4, 5, 6]})


@check("on_step", "set_trigger", "check_trigger")
def trigger(seen: Seen) -> None:
    if seen.rank == seen.ranks - 1:
        seen.accelerator.set_trigger()
    same([seen.accelerator.check_trigger(), seen.accelerator.check_trigger()], [True, False])


@check("on_step", "on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process")
def decorators(seen: Seen) -> None:
    accelerator, last = seen.accelerator, seen.ranks - 1
    for made, where in (
        (accelerator.on_main_process, 0),
        (accelerator.on_local_main_process, 0),
        (accelerator.on_last_process, last),
        (accelerator.on_process(process_index=last), last),
        (accelerator.on_local_process(local_process_index=last), last),
    ):
        same(made(lambda: "ran")(), "ran" if seen.rank == where else None)


@check("on_step", "print")
def print_(seen: Seen) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        seen.accelerator.print("line", end="")
    same(output.getvalue(), "line" if seen.rank == 0 else "")


# -- weights --------------------------------------------------------------------------------------------------------------


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights, up to rounding."""
    same(sorted(found), sorted(expected))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].float(), weight, rtol=1e-5, atol=1e-6)


@check("on_step")
@check("validation_step")
@check("training_step")
def get_state_dict(seen: Seen) -> None:
    """Rank 0 has everything; the others too, or nothing."""
    found = seen.accelerator.get_state_dict(seen.module)
    of_part = seen.accelerator.get_state_dict(seen.module.net[0])
    if seen.rank > 0 and seen.strategy in ("fsdp", "zero3"):
        same((found, of_part), ({}, {}))
    elif seen.trainer.step == 1:
        close(found, seen.reference.weights)
        close(of_part, {name[6:]: weight for name, weight in seen.reference.weights.items() if name[:6] == "net.0."})
    else:
        same([tuple(weight.shape) for weight in found.values()], [(4, 600), (4,), (1, 4), (1,)])


@check("on_step")
def save_model(seen: Seen) -> None:
    for number, size in enumerate(("10GB", "1KB")):
        folder = seen.folder / f"saved-{number}"
        seen.accelerator.save_model(seen.module, folder, max_shard_size=size)
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) == (1, 2)[number], files
        close({name: weight for file in files for name, weight in load_file(file).items()}, seen.reference.weights)


@check("on_step")
def unwrap_model(seen: Seen) -> None:
    accelerator, run = seen.accelerator, seen.trainer._live()
    for wrapped in (seen.module, run.engine.model, run.engine.root):
        assert accelerator.unwrap_model(wrapped) is seen.module, type(wrapped)
    assert accelerator.unwrap_model(seen.module.net[0]) is seen.module.net[0]


@check("on_step")
def save(seen: Seen) -> None:
    seen.accelerator.save({"x": torch.tensor([1.0 + seen.rank])}, seen.folder / "x", safe_serialization=True)
    seen.accelerator.wait_for_everyone()
    same(float(load_file(seen.folder / "x")["x"]), 1.0)


# -- gradients ------------------------------------------------------------------------------------------------------------


@check("on_before_step")
@check("on_step")
def clip_grad_norm_(seen: Seen) -> None:
    accelerator, parameters = seen.accelerator, list(seen.module.parameters())
    norm = accelerator.clip_grad_norm_(seen.module.parameters(), seen.reference.norm / 2)
    again = accelerator.clip_grad_norm_(parameters, 1e9)
    torch.testing.assert_close(torch.tensor([float(norm), 2 * float(again)]), torch.full((2,), seen.reference.norm))


@check("on_before_step")
@check("on_step")
def clip_grad_value_(seen: Seen) -> None:
    seen.accelerator.clip_grad_value_(seen.module.parameters(), 1e-4)
    for parameter in seen.module.parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        assert 0 < float(gradient.abs().max()) <= 1.0001e-4


@check("on_before_step")
@check("on_step")
def unscale_gradients(seen: Seen) -> None:
    before = [p.grad.clone() for p in seen.module.parameters() if p.grad is not None]
    seen.accelerator.unscale_gradients(seen.optimizer)
    after = [p.grad for p in seen.module.parameters() if p.grad is not None]
    assert before
    assert all(bool((b == a).all()) for b, a in zip(before, after, strict=True))


@check("training_step")
@check("on_step")
def autocast(seen: Seen) -> None:
    with seen.accelerator.autocast():
        same(torch.is_autocast_enabled("cpu"), False)  # fp32
    with torch.autocast("cpu", torch.bfloat16), seen.accelerator.autocast(AutocastKwargs(enabled=False)):
        same(torch.is_autocast_enabled("cpu"), False)


# -- data, trackers, the rest ---------------------------------------------------------------------------------------------


@check("on_step", "prepare", "prepare_data_loader")
def prepare(seen: Seen) -> None:
    """A loader of the user's own; each row once."""
    accelerator = seen.accelerator
    for make in (accelerator.prepare, accelerator.prepare_data_loader):
        loader = make(DataLoader(data(), batch_size=2))
        rows = [int(n) for batch in loader for n in accelerator.gather_for_metrics(batch[2])]
        same(sorted(rows), list(range(ROWS)))


@check("on_step", "prepare of a model or an optimizer")
def prepare_model_or_optimizer(seen: Seen) -> None:
    seen.accelerator.prepare(seen.module, seen.optimizer)
    raise AssertionError("prepared")


@check("on_step")
def skip_first_batches(seen: Seen) -> None:
    left = seen.accelerator.skip_first_batches(DataLoader(data(), batch_size=2), 3)
    same([batch[2].tolist() for batch in left], [[6, 7], [8]])


@check("on_step")
def log(seen: Seen) -> None:
    seen.accelerator.log({"mine": 1.5})
    same({"mine": 1.5} in seen.recorder.logged, seen.rank == 0)


@check("on_step")
def get_tracker(seen: Seen) -> None:
    found = seen.accelerator.get_tracker("recorder")
    assert found is seen.recorder if seen.rank == 0 else type(found) is GeneralTracker


@check("on_step", "free_memory", "clear")
def free_memory(seen: Seen) -> None:
    for method in (seen.accelerator.free_memory, seen.accelerator.clear):
        same(method([1], [2]), [None, None])
    assert seen.accelerator.unwrap_model(seen.trainer._live().engine.model) is seen.module


@check("on_step")
def profile(seen: Seen) -> None:
    with seen.accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(seen.folder / "trace"))):
        torch.ones(2).sum()
    same(len(list((seen.folder / "trace").iterdir())), seen.ranks)


@check("on_step")
def maybe_context_parallel(seen: Seen) -> None:
    """Without context parallelism it changes nothing, as Accelerate says."""
    whole = torch.ones(2, 4)
    with seen.accelerator.maybe_context_parallel(buffers=[whole], buffer_seq_dims=[1]):
        same(tuple(whole.shape), (2, 4))


@check("on_step")
def verify_device_map(seen: Seen) -> None:
    same(seen.accelerator.verify_device_map(seen.module), False)


def called(name: str, *arguments: Callable[[Seen], Any]) -> None:
    """A call that has no right answer in a fit."""

    def call(seen: Seen) -> None:
        found = getattr(seen.accelerator, name)
        result = found(*(argument(seen) for argument in arguments)) if callable(found) else found
        if hasattr(result, "__enter__"):
            result.__enter__()
        raise AssertionError(f"no error: {result!r}")

    CHECKS["on_step"][name] = call


def the_module(seen: Seen) -> Any:
    return seen.module


def the_optimizer(seen: Seen) -> Any:
    return seen.optimizer


def the_folder(seen: Seen) -> Any:
    return str(seen.folder / "state")


called("prepare_model", the_module)
called("prepare_optimizer", the_optimizer)
called("prepare_scheduler", lambda seen: torch.optim.lr_scheduler.ConstantLR(seen.optimizer))
called("backward", lambda seen: torch.ones((), requires_grad=True))
called("lomo_backward", lambda seen: torch.ones((), requires_grad=True), lambda seen: RATE)
called("accumulate", the_module)
called("no_sync", the_module)
called("trigger_sync_in_backward", the_module)
called("join_uneven_inputs", lambda seen: [seen.module])
called("save_state", the_folder)
called("load_state", the_folder)
called("register_for_checkpointing", the_optimizer)
called("register_save_state_pre_hook", lambda seen: print)
called("register_load_state_pre_hook", lambda seen: print)
called("init_trackers", lambda seen: "mine")
called("end_training")
called("deepspeed_ulysses_dl_adapter", lambda seen: None, the_module)
for _name in ("tensor", "pipeline", "context", "data"):
    called(f"{_name}_parallel_rank")
called("data_parallel_shard_rank")
called("deepspeed_engine_wrapped")
called("step")


# -- the fit that looks ---------------------------------------------------------------------------------------------------


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

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.outcomes: dict[str, str] = {}

    def at(self, moment: str, **known: Any) -> None:
        for name, thing in known.items():
            setattr(self.seen, name, thing)
        for name, function in CHECKS[moment].items():
            key = name if moment == "on_step" and not self._elsewhere(name) else f"{name}, in {moment}"
            found = outcome(function, self.seen)
            if rank_of(found) >= rank_of(self.outcomes.get(key, RIGHT)):
                self.outcomes[key] = found

    @staticmethod
    def _elsewhere(name: str) -> bool:
        return any(name in checks for moment, checks in CHECKS.items() if moment != "on_step")

    def on_accumulate(self, trainer: Trainer, module: TrainModule, is_last: bool) -> None:
        self.at("on_accumulate", is_last=is_last)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.seen.trainer, self.seen.module = trainer, module

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == 1:
            self.at("on_step", optimizer=next(iter(trainer.optimizers.values())))

    def on_eval_end(self) -> None:
        self.at("on_eval_end")

    def on_epoch_end(self) -> None:
        if not self.outcomes["gather_for_metrics, in training_step"].startswith("wrong"):
            kept = outcome(
                lambda seen: same((sorted(seen.gathered), sorted(seen.objects)), (list(range(ROWS)),) * 2), self.seen
            )
            self.outcomes["gather_for_metrics, in training_step"] = kept


class LookAtGradients(Look):
    """With the hook that strategies with an engine of their own refuse."""

    def on_before_step(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        if trainer.step == 1:
            self.at("on_before_step", optimizer=optimizer)


def outcome(function: Check, seen: Seen) -> str:
    """ "right", "absent", "error: what it says" or "wrong: what was found"."""
    try:
        function(seen)
    except FabricateError as exc:
        return f"error: {exc}"
    except AttributeError as exc:
        return ABSENT if "has no attribute" in str(exc) else f"wrong: {exc}"
    except Exception as exc:
        return f"wrong: {type(exc).__name__}: {exc}"
    return RIGHT


def rank_of(found: str) -> int:
    """How bad an outcome is."""
    return ("right", "absent", "error", "wrong").index(found.partition(":")[0])


def observe_here(strategies: Iterable[str], folder: str) -> dict[str, dict[str, str]]:
    """By strategy and name what came out on this rank. Runs on each rank; one fit for each strategy."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {}
    for strategy in strategies:
        place = Path(folder, f"{strategy}-{ranks}")
        place.mkdir(exist_ok=True)
        seen = Seen(strategy, rank, ranks, place, Reference(), Recorder())
        look = (Look if seen.hidden else LookAtGradients)(seen)
        trainer = Trainer(
            strategy=strategy, max_epochs=1, seed=0, progress=False, plugins=[look], run_dir=place / "run", keep=1,
            gradient_accumulation_steps=2, trackers=[seen.recorder],
        )  # fmt: skip
        try:
            trainer.fit(Net(look), data(), data(), batch_size=WINDOW // 2 // ranks, shuffle=False)
        except FabricateError as exc:
            if look.outcomes or "processes" not in str(exc):
                raise
            look.outcomes = {"": f"error: {exc}"}
        found[strategy] = look.outcomes
    return found


def observe(cases: Iterable[tuple[str, int]] = CASES) -> dict[tuple[str, int], dict[str, str]]:
    """By case and name the worst outcome of its ranks. A case that a strategy refuses is left out."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    cases = list(cases)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({ranks for _, ranks in cases}):
            strategies = [strategy for strategy, number in cases if number == ranks]
            for each in run_ranks(observe_here, ranks, strategies, folder, timeout=600):
                for strategy, outcomes in each.items():
                    worst = found.setdefault((strategy, ranks), {})
                    for name, one in outcomes.items():
                        worst[name] = max(worst.get(name, RIGHT), one, key=rank_of)
    return {case: outcomes for case, outcomes in found.items() if "" not in outcomes}


def rows(found: dict[tuple[str, int], dict[str, str]]) -> list[str]:
    """The lines of the table: a name, at which moment, what each case gave, and what the errors say."""
    lines = []
    keys = list(dict.fromkeys(key for outcomes in found.values() for key in outcomes))
    for key in sorted(keys, key=str.lower):
        name, _, moment = key.partition(", ")
        cells = [found.get(case, {}).get(key) for case in CASES]
        words = " | ".join("-" if cell is None else cell.partition(":")[0] for cell in cells)
        errors = [cell.partition(": trainer.accelerator.")[2] for cell in cells if (cell or "").startswith("error")]
        said = "; or: ".join(dict.fromkeys(error.partition(": ")[2] or error for error in errors))
        lines.append(f"| `{name}`{', ' + moment if moment else ''} | {words} | {said.replace('|', chr(92) + '|')} |")
    return lines


def main() -> int:
    """Write the page; 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = observe()
    close_pools()
    head = " | ".join(f"{strategy}, {ranks}" for strategy, ranks in CASES)
    lines = [
        INTRODUCTION,
        f"| name | {head} | what the error says |",
        "|---" * (len(CASES) + 2) + "|",
        *rows(found),
    ]
    wrong = [
        f"{case}: {name}: {said}" for case, each in found.items() for name, said in each.items() if said[:5] == "wrong"
    ]
    counts = Counter(said.partition(":")[0] for each in found.values() for said in each.values())
    print("\n".join(wrong) or f"{sum(counts.values())} answers in {len(found)} cases: {dict(counts)}")
    if options.out is not None and not wrong:
        before, heading, _ = options.out.read_text(encoding="utf-8").partition(HEADING)
        options.out.write_text("\n".join([before + heading.rstrip("\n"), *lines, ""]), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
