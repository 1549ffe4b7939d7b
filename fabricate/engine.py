"""The one door to Accelerate: opens the Accelerator of a fit, prepares the model, and does the few things ranks do together.

Owns: the environment while the Accelerator is built, process groups, device, loss scaling, collectives on control data,
and leaving everything as it was. Must not know: hooks, data, checkpoints, the loop.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import send_to_device

from fabricate.construct import pretrained_models
from fabricate.errors import ConfigurationError, FabricateError, PluginError, RankError, did_you_mean
from fabricate.launch import Launch
from fabricate.module import TrainModule, step_function
from fabricate.precision import Precision
from fabricate.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

# Accelerate reads these while an Accelerator is built and would act on them behind the strategy's back.
_HIDDEN = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_DYNAMO_BACKEND",
)
_control_groups: dict[int, Any] = {}
_exit_handlers: list[object] = []
_failures: list[str] = []


def _leave_group_at_exit() -> None:
    """Close the process group when the interpreter ends, once: left open, a rank may be torn down in the midst of it."""
    if dist.is_initialized() and not _exit_handlers:
        _exit_handlers.append(atexit.register(_leave_group))


def _leave_group() -> None:
    if not dist.is_initialized() or _failures:  # after a failure others may be gone, and closing could wait for them
        return
    if dist.get_backend() == "gloo":
        with contextlib.suppress(RuntimeError):  # a rank that is gone breaks the connection: nothing to wait for
            dist.barrier()  # a rank that closes while another still talks to it aborts
    dist.destroy_process_group()


class Root(torch.nn.Module):
    """What the strategy prepares: its forward runs the module's steps, so that DDP and FSDP see every parameter's use.

    `config`, `_no_split_modules` and `tp_plan` are those of the one transformers model inside, if there is exactly one:
    Accelerate and transformers look for them on the prepared model.
    """

    def __init__(self, module: TrainModule, context: contextlib.AbstractContextManager[object] | None) -> None:
        super().__init__()
        self.module = module
        self._context = context
        self.steps: dict[str, Callable[[Any, int], Any]] = {}
        inner = pretrained_models(module)
        if len(inner) == 1:
            self.config = inner[0].config
            self._no_split_modules = getattr(inner[0], "_no_split_modules", None)
            self._tp_plan = getattr(inner[0], "_tp_plan", None)

    def forward(self, stage: str, batch: Any, batch_idx: int) -> Any:
        if self._context is None:
            return self.steps[stage](batch, batch_idx)
        with self._context:
            return self.steps[stage](batch, batch_idx)


class Engine:
    """An open Accelerator with one strategy and one precision. Use as a context manager; every rank opens its own."""

    def __init__(
        self,
        launch: Launch,
        strategy: Strategy,
        precision: Precision,
        device: torch.device,
        *,
        log_with: Sequence[Any] = (),
        logging_dir: str | None = None,
    ) -> None:
        self.launch = launch
        self.strategy = strategy
        self.precision = precision
        self._cpu = device.type == "cpu"
        self._log_with = [tracker for tracker in log_with if not inspect.isfunction(tracker)]
        self._made_later = [tracker for tracker in log_with if inspect.isfunction(tracker)]
        self._logging_dir = logging_dir
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.device = device
        self.scaler: torch.amp.GradScaler | None = None
        self.context: contextlib.AbstractContextManager[object] | None = None

    def check(self) -> None:
        """Refuse what cannot run here, before anything is built."""
        problems = [
            *self.strategy.check(self.world_size, self.device),
            *self.precision.check(self.device, self.strategy),
        ]
        if problems:
            raise ConfigurationError("; ".join(problems))

    def __enter__(self) -> Engine:
        self.check()
        arguments = self.strategy.accelerator_arguments()
        with self._environment():
            try:
                self.accelerator = Accelerator(
                    cpu=self._cpu,
                    mixed_precision=self.precision.mixed_precision,
                    log_with=self._log_with or None,
                    project_dir=self._logging_dir,
                    **arguments,
                )
            except (ValueError, ImportError, RuntimeError) as exc:
                self.__exit__()
                raise FabricateError(
                    f"Accelerate could not be set up for strategy {self.strategy.name!r}: {exc}"
                ) from exc
        try:
            _leave_group_at_exit()
            self._verify()
            self.device = self.accelerator.device
            self.context = self.precision.forward_context(self.device)
            self.scaler = self.precision.loss_scaler(self.device)
            self.accelerator.scaler = self.scaler
            self._verify_precision()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Forget Accelerate's shared state; the process group stays for the next fit of this process (see `_control_group`)."""
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """os.environ as the Accelerator should see it while it is built; exactly as before afterwards."""
        before = dict(os.environ)
        if PartialState._shared_state or AcceleratorState._shared_state:
            raise ConfigurationError(
                "an Accelerator (or PartialState) exists already in this process; fabricate's Trainer owns the Accelerator: "
                "remove yours and use trainer.accelerator inside the module's steps and hooks"
            )
        for name in _HIDDEN:
            os.environ.pop(name, None)
        os.environ.update(self.launch.environment)
        if self.world_size > 1:
            os.environ.setdefault(
                "OMP_NUM_THREADS", str(torch.get_num_threads())
            )  # else Accelerate changes torch's threads
        elif self._cpu:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name, None)  # torchrun with one process: no process group is needed
        try:
            yield
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})

    def _verify(self) -> None:
        """What Accelerate really built against what was asked for."""
        built = self.accelerator
        kind = str(getattr(built.distributed_type, "value", built.distributed_type))
        if built.num_processes != self.world_size or built.process_index != self.rank:
            raise RankError(
                f"rank {self.rank} of {self.world_size} was launched, but Accelerate sees rank {built.process_index} of "
                f"{built.num_processes}: these processes do not know of each other. Start them with torchrun or `fabricate run --nproc`"
            )
        if kind not in self.strategy.distributed_types:
            raise ConfigurationError(
                f"strategy={self.strategy.name!r} was asked for and Accelerate built {kind}; expected "
                f"{' or '.join(self.strategy.distributed_types)}: start the ranks that the strategy needs"
            )
        if self.world_size > 1:
            ranks = self.gather_json(self.rank)
            if ranks != list(range(self.world_size)):
                raise RankError(f"the process group holds the ranks {ranks}, expected 0 to {self.world_size - 1}")

    def _verify_precision(self) -> None:
        """The dtype that autocast really has inside the forward context."""
        with self.context or contextlib.nullcontext():
            on = torch.is_autocast_enabled(self.device.type)
            found = str(torch.get_autocast_dtype(self.device.type)).removeprefix("torch.") if on else "float32"
        if found != self.precision.compute_dtype:
            raise ConfigurationError(
                f"precision={self.precision.name!r} computes in {self.precision.compute_dtype}, but on {self.device} it would be {found}"
            )

    # -- building ------------------------------------------------------------------------------------------------------

    def prepare(self, module: TrainModule, stages: Iterable[str]) -> torch.nn.Module:
        """Place, convert and wrap `module`; returns the callable that runs `(stage, batch, batch_idx)`. All ranks."""
        steps = {stage: step_function(module, stage) for stage in stages}
        module.train()
        if any(isinstance(p, torch.distributed.tensor.DTensor) for p in module.parameters()):
            return self._reuse(module, steps)
        self.precision.convert(module)
        self.root = Root(module, self.context)
        self.root.steps = steps
        model = self.strategy.prepare(self.accelerator, self.root, module)
        # Accelerate wrapped Root.forward in a second autocast and a cast of every output to fp32; the precision has its own.
        self.root.__dict__.pop("forward", None)
        self.root.__dict__.pop("_original_forward", None)
        self.model = model
        if self.strategy.shards_parameters:
            object.__setattr__(module, "_sharded", (self.strategy.name, self.world_size, self.root, model))
        return model

    def _reuse(self, module: TrainModule, steps: dict[str, Callable[[Any, int], Any]]) -> torch.nn.Module:
        """A module that an earlier fit of this process sharded: the same strategy goes on with it, others cannot."""
        earlier: tuple[str, int, Any, Any] = getattr(module, "_sharded", ("", 0, None, None))
        name, world_size, root, model = earlier
        if (name, world_size) != (self.strategy.name, self.world_size):
            raise ConfigurationError(
                f"{type(module).__name__} is sharded already{f' (an earlier fit under {name!r})' if name else ''} and strategy="
                f"{self.strategy.name!r} needs it whole: build a new module, or {type(module).__name__}.load_from_checkpoint(...)"
            )
        self.root, self.model = root, model
        self.root.steps = steps
        self.root._context = self.context
        return self.model

    # -- one update ----------------------------------------------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        """`batch` with its tensors on the device, copies not waited for."""
        return batch if self.device.type == "cpu" else send_to_device(batch, self.device, non_blocking=True)

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """2-norm of the global gradient, 0-dim, on the device."""
        return self.strategy.grad_norm(parameters)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update; False when the loss scaler found an overflow and skipped it (one wait for the device then)."""
        if self.scaler is None:
            optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    # -- ranks together ------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; `tensor` is on the device. All ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _control_group(self) -> Any:
        """The gloo group for control data, so that agreeing never waits for the device. Kept as long as the process group."""
        default = dist.group.WORLD
        if dist.get_backend() == "gloo":
            return default
        if id(default) not in _control_groups:
            _control_groups.clear()
            _control_groups[id(default)] = dist.new_group(backend="gloo")
        return _control_groups[id(default)]

    def agree(self, flags: list[int]) -> list[int]:
        """Element-wise maximum of small integers over all ranks. All ranks; one message, no wait for the device."""
        if self.world_size == 1:
            return flags
        tensor = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control_group())
        result: list[int] = tensor.tolist()
        return result

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. All ranks. No pickle."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode() or b" "), dtype=torch.uint8)
        group = self._control_group()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=group)
        return [json.loads(bytes(p[: int(s)].tolist())) for p, s in zip(parts, sizes, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank. All ranks."""
        return self.gather_json(value if self.rank == 0 else None)[0]

    def share_buffers(self, module: torch.nn.Module) -> Callable[[], None]:
        """Give every rank rank 0's buffers (running statistics differ between ranks); the returned function puts this
        rank's own back, so that evaluating changes nothing. All ranks."""
        if self.world_size == 1:
            return lambda: None
        buffers = list(module.buffers())
        own = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            dist.broadcast(buffer, src=0)

        def restore() -> None:
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)

        return restore

    def send_rows(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's tensor (same dtype and trailing shape, any number of rows) on rank 0, on the CPU; None elsewhere.
        All ranks, one message per rank: nothing is padded and nothing invented."""
        tensor = tensor.detach().cpu().contiguous()
        if self.world_size == 1:
            return [tensor]
        group = self._control_group()
        shapes = self.gather_json(list(tensor.shape))
        raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        if self.rank:
            if raw.numel():
                dist.send(raw, dst=0, group=group)
            return None
        parts = [tensor]
        for source in range(1, self.world_size):
            part = torch.empty(shapes[source], dtype=tensor.dtype)
            if part.numel():
                dist.recv(part.reshape(-1).view(torch.uint8), src=source, group=group)
            parts.append(part)
        return parts

    def start_trackers(self, config: Mapping[str, Any]) -> None:
        """Start Accelerate's trackers with the plan as their configuration. All ranks; they act on rank 0."""
        flat = {
            n: s["value"] if isinstance(s["value"], int | float | str | bool) else str(s["value"])
            for n, s in config.items()
        }
        if self.rank == 0:  # a tracker may ask Accelerate for its rank while it is made: not before now
            os.makedirs(self._logging_dir or ".", exist_ok=True)
            self.accelerator.log_with += [_checked_tracker(m("fabricate", self._logging_dir)) for m in self._made_later]
        self.accelerator.init_trackers("fabricate", config=flat)

    def report_failure(self, exc: BaseException) -> str:
        """Leave this rank's failure where the others find it. Returns another rank's message when that one came first and
        `exc` is only its echo (a broken connection); empty otherwise. Never raises and never blocks."""
        if self.world_size == 1 or not dist.is_initialized():
            return ""
        import traceback

        _failures.append(type(exc).__name__)
        echo = isinstance(exc, RuntimeError) and any(
            word in str(exc)
            for word in ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "Socket")
        )
        try:
            store = dist.distributed_c10d._get_default_store()
            if echo:
                store.wait(["fabricate/failure"], datetime.timedelta(seconds=5))
                found: dict[str, Any] = json.loads(store.get("fabricate/failure"))
                f"rank {found['rank']} failed first, this rank {self.rank} stopped with it (the traceback is in the "
                f"output of rank {found['rank']}):\n{found['error']}"
            if not store.check(["fabricate/failure"]):
                text = "".join(traceback.format_exception_only(exc))
                store.set("fabricate/failure", json.dumps({"rank": self.rank, "error": text[-8000:]}))
        except (RuntimeError, OSError, ValueError):
            return ""  # the store is gone with its owner: the original exception is all there is to tell
        return ""

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree([0])


def _checked_tracker(made: Any) -> Any:
    from accelerate.tracking import GeneralTracker

    if not isinstance(made, GeneralTracker):
        raise PluginError(f"a registered tracker made a {type(made).__name__}, not an accelerate GeneralTracker")
    return made


def tracker_names() -> list[str]:
    """The trackers that Accelerate brings along, installed or not."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return sorted(str(getattr(n, "value", n)) for n in LOGGER_TYPE_TO_CLASS)


def check_trackers(trackers: Sequence[Any], find: Callable[[str], Callable[[str, str], Any]]) -> list[Any]:
    """What an `Engine` takes as `log_with`: names of Accelerate's trackers, objects, and functions that make registered
    ones, by `find`. Accelerate drops what is not installed without a word; this refuses."""
    from accelerate.tracking import GeneralTracker, get_available_trackers

    found: list[Any] = []
    known = tracker_names()
    for tracker in trackers:
        if isinstance(tracker, GeneralTracker):
            found.append(tracker)
        elif not isinstance(tracker, str):
            raise ConfigurationError(
                f"trackers={tracker!r}: give a name ({', '.join(known)}) or an accelerate GeneralTracker"
            )
        elif tracker not in known:
            try:
                found.append(find(tracker))
            except ConfigurationError as exc:
                raise ConfigurationError(
                    f"trackers={tracker!r} is not known{did_you_mean(tracker, known)}; known: {', '.join(known)}; of plugins: {exc}"
                ) from exc
        elif tracker not in [str(getattr(n, "value", n)) for n in get_available_trackers()]:
            raise ConfigurationError(f"trackers={tracker!r}: its package is not installed; run pip install {tracker}")
        else:
            found.append(tracker)
    return found
