"""Trainer: the composition root. Holds what was asked for, resolves it into a plan, opens the engine, runs the loop, cleans up.

Building a Trainer has no effects; everything happens in `fit`, `validate`, `test` and `predict`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricate import loop, saving
from fabricate.data import Loading, Source, open_source
from fabricate.dispatch import Calls, Manager, Origin
from fabricate.engine import Engine, build_model, check_trackers, derive_seed, seed_everything
from fabricate.errors import CheckpointError, ConfigurationError, FabricateError, RankError, did_you_mean
from fabricate.hooks import PROJECT, hookimpl
from fabricate.launch import Launch, detect, requests
from fabricate.metrics import Metrics
from fabricate.module import TrainModule, check_methods, overrides
from fabricate.plan import Plan, Setting
from fabricate.progress import Progress
from fabricate.records import Every, FitResult
from fabricate.registry import Registry, progress_bar
from fabricate.run import Limits, Requests, Run
from fabricate.state import parameter_names

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fabricate.precision import Precision
    from fabricate.strategy import Strategy

_STAGES = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class Defaults:
    """What the loop does where hooks can be wrapped and nobody replaces it. The plugin named "fabricate"."""

    @hookimpl(trylast=True)
    def train_step(self, trainer: Trainer, batch: Any) -> Any:
        """Forward through the prepared model."""
        run = trainer._live()
        return run.engine.model("train", batch, run.progress.micro_step)

    @hookimpl(trylast=True)
    def optimizer_step(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update."""
        return trainer._live().engine.step(optimizer)

    @hookimpl(trylast=True)
    def eval_step(self, trainer: Trainer, batch: Any, stage: str) -> Any:
        """Forward of one evaluation batch."""
        engine = trainer._live().engine
        return (engine.model if engine.strategy.lockstep else engine.root)(stage, batch, 0)

    @hookimpl(trylast=True)
    def write_checkpoint(self, trainer: Trainer, path: Path) -> bool:
        """Write and commit."""
        saving.write(trainer._live(), path)
        return True


class Trainer:
    """Drives a `TrainModule`. All arguments are keyword-only; values are checked here, nothing is built.

    strategy, precision: a registered name, a name with options ("fsdp:wrap=GPT2Block"), an object, or "auto".
    max_steps, max_epochs: updates and passes over the data, whichever comes first; one is needed for `fit`.
    gradient_accumulation_steps, global_batch_size: micro-batches per update, or rows per update on all ranks together.
    max_grad_norm: clip the global gradient to this 2-norm. nonfinite: "stop" at a loss that is not finite (noticed at a log
    boundary), or "skip" updates whose gradient is not (one wait for the device per update).
    seed: initial weights, data order and dropout (per rank); unset: order from torch's initial seed, generators untouched.
    deterministic: torch's deterministic algorithms while the fit runs.
    run_dir: where checkpoints, metrics.jsonl, events.jsonl, plan.json and model/ go; unset, nothing is written.
    save_every, validate_every, log_every: durations ("500 steps", "1 epoch", "10 minutes", "1e9 tokens"); None for never.
    keep: checkpoints to keep: a number of the last ones, "all", or {"last": 2, "best": 1, "metric": "val_loss", "mode": "min"}.
    validate_first: evaluate once before the first step. progress: a progress bar (or plain lines) on rank 0.
    plugins: `Callback` objects or names of installed plugins; trackers: names known to Accelerate ("tensorboard", ...).
    limit_train_batches, limit_val_batches: micro-batches per rank (int) or a share of the data (float).
    fast_dev_run: one update, one validation batch, one save and export in a temporary directory; nothing is kept.
    accept_changes: what may differ from the checkpoint that is resumed ("global_batch_size", "train", "seed", "plugins").
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        precision: str | Precision = "auto",
        max_steps: int | None = None,
        max_epochs: int | None = None,
        gradient_accumulation_steps: int | None = None,
        global_batch_size: int | None = None,
        max_grad_norm: float | None = None,
        nonfinite: str = "stop",
        seed: int | None = None,
        deterministic: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
        save_every: str | int | Every | None = "1 epoch",
        keep: int | str | Mapping[str, Any] = 3,
        validate_every: str | int | Every | None = "1 epoch",
        validate_first: bool = False,
        log_every: str | int | Every = "10 steps",
        progress: bool = True,
        plugins: Sequence[object] = (),
        trackers: Sequence[Any] = (),
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        fast_dev_run: bool = False,
        accept_changes: Sequence[str] = (),
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        for name, value in (("max_steps", max_steps), ("max_epochs", max_epochs)):
            _check_count(name, value, 0)
        _check_count("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        _check_count("global_batch_size", global_batch_size, 1)
        if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and max_grad_norm > 0):
            raise ConfigurationError(f"max_grad_norm={max_grad_norm!r}: give a positive number, or None not to clip")
        if nonfinite not in ("stop", "skip"):
            raise ConfigurationError(
                f"nonfinite={nonfinite!r}{did_you_mean(str(nonfinite), ('stop', 'skip'))}; give 'stop' or 'skip'"
            )
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32):
            raise ConfigurationError(f"seed={seed!r}: give a whole number from 0 to {2**32 - 1}, or None")
        if isinstance(plugins, str) or not isinstance(plugins, Iterable):
            raise ConfigurationError(f"plugins={plugins!r}: give a list, plugins=[...]")
        known = ("global_batch_size", "train", "seed", "plugins")
        for change in accept_changes:
            if change not in known:
                raise ConfigurationError(
                    f"accept_changes={change!r}{did_you_mean(change, known)}; known: {', '.join(known)}"
                )
        self._strategy_asked, self._precision_asked = strategy, precision
        self.max_steps, self.max_epochs = (1, None) if fast_dev_run else (max_steps, max_epochs)
        self.seed = seed
        self.deterministic = deterministic
        self._accumulation = gradient_accumulation_steps
        self._global_batch_size = global_batch_size
        self.max_grad_norm = max_grad_norm
        self._nonfinite = nonfinite
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._save_every = Every.parse("save_every", save_every) if save_every is not None else None
        self._validate_every = Every.parse("validate_every", validate_every) if validate_every is not None else None
        self._log_every = Every.parse("log_every", log_every)
        self._validate_first = validate_first
        self._keep = _parse_keep(keep)
        self._show_progress = progress
        self._plugins = list(plugins)
        self._trackers = [trackers] if isinstance(trackers, str) else list(trackers)
        self._limit_train, self._limit_val = (None, 1) if fast_dev_run else (limit_train_batches, limit_val_batches)
        self._fast_dev_run = fast_dev_run
        self._accept_changes = tuple(accept_changes)
        self._run: Run | None = None
        self._last_run: Run | None = None
        self.last_plan: Plan | None = None

    # -- what hooks and modules may ask ---------------------------------------------------------------------------------

    def _live(self) -> Run:
        if self._run is None:
            raise FabricateError("this exists only while fit, validate, test or predict is running")
        return self._run

    @property
    def running(self) -> bool:
        """Whether `fit`, `validate`, `test` or `predict` is at work."""
        return self._run is not None

    @property
    def accelerator(self) -> Accelerator:
        """The Accelerator of the running fit. Raises `FabricateError` before and after."""
        if self._run is None:
            raise FabricateError(
                "trainer.accelerator exists only while fit, validate, test or predict is running; use it in a step or a hook"
            )
        return self._run.engine.accelerator

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0; before a fit the launcher's word counts."""
        return self._run.engine.rank == 0 if self._run is not None else detect(os.environ).rank == 0

    @property
    def step(self) -> int:
        """Updates applied so far."""
        return self._live().progress.step

    @property
    def epoch(self) -> int:
        """The pass under way, from 0."""
        return self._live().progress.epoch

    @property
    def progress(self) -> Progress:
        """All counters of the run."""
        return self._live().progress

    @property
    def metrics(self) -> dict[str, float]:
        """The last known value of every metric, the same on every rank."""
        return dict(self._live().latest)

    @property
    def total_steps(self) -> int:
        """The number of updates this fit comes to in all. Raises `ConfigurationError` when the data has no length."""
        total = self._live().total_steps
        if total is None:
            raise ConfigurationError("total_steps is not known: train has no length; set max_steps in the Trainer")
        return total

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The running fit's optimizers by name ("main" when `configure_optimizers` names none)."""
        return self._live().optimizers

    @property
    def run_dir(self) -> Path | None:
        """Where this run writes, None for nowhere."""
        return self._run.run_dir if self._run is not None else self._run_dir

    def request_save(self) -> None:
        """Save at the next update boundary, on all ranks; asking on one rank is enough."""
        self._live().requests.save = True

    def request_eval(self) -> None:
        """Validate at the next update boundary, on all ranks; asking on one rank is enough."""
        self._live().requests.evaluate = True

    def stop(self, reason: str = "stopped") -> None:
        """End the fit at the next update boundary, on all ranks; `reason` becomes `FitResult.stop_reason`."""
        self._live().requests.stop = reason or "stopped"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint to `path` (which must not exist) now. At an update boundary only (`on_step`, `on_epoch_end`,
        `on_log`, ...); all ranks."""
        run = self._live()
        target = Path(path)
        if target.exists():
            raise CheckpointError(f"save({str(path)!r}): this exists already; give a new path")
        saving.write(run, target)
        return target

    # -- resolving ------------------------------------------------------------------------------------------------------

    def _resolve(self) -> _Resolved:
        launch = detect(os.environ)
        asked = requests(os.environ)
        registry = Registry(self._plugins)
        cpu = "cpu" in asked or not torch.cuda.is_available()
        device = torch.device("cpu") if cpu else torch.device("cuda", launch.local_rank)
        chosen: dict[str, tuple[object, str]] = {}
        for kind, value in (("strategy", self._strategy_asked), ("precision", self._precision_asked)):
            if kind in asked:
                request = asked[kind]
                own = getattr(value, "name", value)
                if value != "auto" and own != request.value:
                    raise ConfigurationError(
                        f"{kind}={own!r} is set in the Trainer and {request.value!r} by {request.source}; remove one or make them equal"
                    )
                chosen[kind] = (request.value, request.source) if value == "auto" else (value, "argument")
            elif value != "auto":
                chosen[kind] = (value, "argument")
        if "strategy" not in chosen:
            several = launch.world_size > 1
            chosen["strategy"] = (
                ("ddp", f"auto: {launch.world_size} processes") if several else ("single", "auto: one process")
            )
        if "precision" not in chosen:
            native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            reason = (
                "the device computes in bf16 natively" if native else f"{device.type} does not compute in bf16 natively"
            )
            chosen["precision"] = ("bf16" if native else "fp32", f"auto: {reason}")
        strategy, strategy_offer = registry.resolve("strategy", chosen["strategy"][0])
        precision, precision_offer = registry.resolve("precision", chosen["precision"][0])
        return _Resolved(
            launch,
            registry,
            strategy,
            precision,
            cpu,
            device,
            {"strategy": chosen["strategy"][1], "precision": chosen["precision"][1]},
            {
                "strategy": strategy_offer.origin if strategy_offer else Origin(),
                "precision": precision_offer.origin if precision_offer else Origin(),
            },
            int(asked["gradient_accumulation_steps"].value) if "gradient_accumulation_steps" in asked else None,
            self._clipping(float(asked["max_grad_norm"].value) if "max_grad_norm" in asked else None),
            "plan_only" in asked,
        )

    def _clipping(self, told: float | None) -> float | None:
        if told is not None and self.max_grad_norm is not None and told != self.max_grad_norm:
            raise ConfigurationError(
                f"max_grad_norm={self.max_grad_norm} in the Trainer and {told} from the launcher; make them equal"
            )
        return told if self.max_grad_norm is None else self.max_grad_norm

    def _sources(
        self, found: _Resolved, train: object, val: object, loading: Loading, seed: int
    ) -> tuple[Source | None, dict[str, Source], dict[str, str]]:
        """Open the data; derive accumulation from the global batch."""
        rank, world_size = found.launch.rank, found.launch.world_size
        told, accumulation, origin = found.accumulation, self._accumulation, {}
        if told is not None and accumulation is not None and told != accumulation:
            raise ConfigurationError(
                f"gradient_accumulation_steps={accumulation} in the Trainer and {told} from the launcher; make them equal"
            )
        origin["gradient_accumulation_steps"] = (
            "argument" if accumulation is not None else "launcher" if told is not None else "default"
        )
        accumulation = accumulation or told
        source: Source | None = None
        if train is not None:

            def opened(number: int) -> Source:
                return open_source(
                    train,
                    argument="train",
                    loading=loading,
                    training=True,
                    rank=rank,
                    world_size=world_size,
                    accumulation=number,
                    seed=seed,
                    limit=self._limit_train,
                )

            source = opened(accumulation or 1)
            if self._global_batch_size is not None:
                per_step = source.batch_size * world_size if source.batch_size else None
                if per_step is None:
                    raise ConfigurationError(
                        "global_batch_size needs data with a batch_size; pass a dataset with batch_size=..., or use gradient_accumulation_steps"
                    )
                number, rest = divmod(self._global_batch_size, per_step)
                if rest or not number:
                    raise ConfigurationError(
                        f"global_batch_size={self._global_batch_size} is no multiple of batch_size {source.batch_size} x {world_size} ranks = {per_step}"
                    )
                if accumulation is not None and accumulation != number:
                    raise ConfigurationError(
                        f"global_batch_size={self._global_batch_size} means gradient_accumulation_steps={number}, but {accumulation} is set; remove one"
                    )
                accumulation, origin["gradient_accumulation_steps"] = number, "from global_batch_size"
                source = opened(number)
        sets = (
            val
            if isinstance(val, Mapping) and not hasattr(val, "column_names")
            else {"": val}
            if val is not None
            else {}
        )
        sets = {"": val} if val is not None and not isinstance(val, Mapping) else sets
        validation = {
            str(name): open_source(
                data, argument=f"val[{name!r}]" if name else "val", loading=_for_evaluation(data, loading), training=False,
                rank=rank, world_size=world_size, seed=seed, limit=self._limit_val,
            )
            for name, data in sets.items()
        }  # fmt: skip
        self._accumulation_used = accumulation or 1
        return source, validation, origin

    def _total(self, source: Source | None) -> int | None:
        per_epoch = source.updates_per_epoch if source is not None else None
        by_epochs = per_epoch * self.max_epochs if per_epoch is not None and self.max_epochs is not None else None
        known = [n for n in (self.max_steps, by_epochs) if n is not None]
        return min(known) if known and (self.max_steps is not None or by_epochs is not None) else None

    def _base_seed(self) -> tuple[int, str]:
        if self.seed is not None:
            return self.seed, "argument"
        return derive_seed(torch.initial_seed(), "data"), "from torch's initial seed; random generators are not seeded"

    def plan(self, module: TrainModule, train: object = None, val: object = None, **loading: Any) -> Plan:
        """The resolved plan, without training: `str(plan)` is its text. `loading`: batch_size, num_workers, collate_fn, shuffle
        as for `fit`. Nothing is built on a device and no rank talks to another."""
        check_methods(module)
        found = self._resolve()
        seed, origin = self._base_seed()
        source, validation, origins = self._sources(found, train, val, Loading(**loading), seed)
        Engine(found.launch, found.strategy, found.precision, cpu=found.cpu).check()
        return self._make_plan(found, module, source, validation, {**origins, "seed": origin}, seed, {}, [])

    def _make_plan(
        self,
        found: _Resolved,
        module: TrainModule,
        source: Source | None,
        validation: Mapping[str, Source],
        origins: Mapping[str, str],
        seed: int,
        optimizers: Mapping[str, torch.optim.Optimizer],
        notes: Sequence[str],
    ) -> Plan:
        world_size, strategy, precision = found.launch.world_size, found.strategy, found.precision
        trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
        settings = [
            Setting(
                "device",
                str(found.device),
                "argument of the launcher" if found.cpu and torch.cuda.is_available() else "detected",
            ),
            Setting("world_size", world_size, f"launcher ({found.launch.launcher})"),
            Setting("distributed_type", _distributed_type(found), "Accelerate"),
            Setting("strategy", strategy.name, found.sources["strategy"]),
            *(Setting(topic, text, strategy.name) for topic, text in strategy.describe().items()),
            Setting("precision", precision.name, found.sources["precision"]),
            Setting("compute_dtype", precision.compute_dtype, "precision"),
            *(Setting(topic, text, precision.name) for topic, text in precision.describe().items()),
        ]
        if source is not None:
            settings += [
                Setting("train", source.kind, f"{source.num_samples:,} samples" if source.num_samples is not None else "no length"),
                Setting("micro_batch_size", source.batch_size, "argument" if source.batch_size else "as the batches come"),
                Setting("gradient_accumulation_steps", self._accumulation_used, origins.get("gradient_accumulation_steps", "default")),
                Setting(
                    "global_batch_size", source.global_batch,
                    f"{source.batch_size} x {self._accumulation_used} x {world_size}" if source.batch_size else "as the batches come",
                ),
                Setting("updates_per_epoch", source.updates_per_epoch, "data"),
                Setting("total_steps", self._total(source), "max_steps and max_epochs"),
                Setting("resumes", source.resumes, "data"),
            ]  # fmt: skip
        settings += [
            Setting("max_steps", self.max_steps, "argument" if self.max_steps is not None else "default"),
            Setting("max_epochs", self.max_epochs, "argument" if self.max_epochs is not None else "default"),
            *(
                Setting(
                    f"learning_rate {n}".removesuffix(" main"),
                    [g["lr"] for g in o.param_groups],
                    f"{type(o).__name__}, never scaled",
                )
                for n, o in optimizers.items()
            ),
            Setting("parameters_trainable", trainable, "module"),
            Setting("parameters_frozen", frozen, "module"),
            Setting(
                "clipping",
                found.max_grad_norm,
                "fabricate, once per update" if found.max_grad_norm is not None else "default",
            ),
            Setting(
                "nonfinite",
                self._nonfinite,
                "one wait per update" if self._nonfinite == "skip" else "checked at log boundaries",
            ),
            Setting("seed", seed, origins.get("seed", "argument")),
            Setting("deterministic", self.deterministic, "argument" if self.deterministic else "default"),
            Setting(
                "run_dir",
                str(self.run_dir) if self.run_dir is not None else None,
                "" if self.run_dir is not None else "nothing is written",
            ),
            Setting("save_every", str(self._save_every) if self._save_every and self.run_dir is not None else None, ""),
            Setting("validate_every", str(self._validate_every) if self._validate_every and validation else None, ""),
            Setting("log_every", str(self._log_every), ""),
        ]
        plugins = [
            {"name": f"strategy {strategy.name}", "origin": str(found.origins["strategy"])},
            {"name": f"precision {precision.name}", "origin": str(found.origins["precision"])},
            *(
                {"name": n, "origin": str(found.registry.manager.origins.get(n, Origin()))}
                for n, _ in found.registry.active
            ),
        ]
        every = [
            *notes,
            *(source.notes if source is not None else ()),
            *(n for s in validation.values() for n in s.notes),
        ]
        return Plan(tuple(settings), tuple(plugins), tuple(dict.fromkeys(every)))

    # -- running --------------------------------------------------------------------------------------------------------

    def fit(
        self,
        module: TrainModule,
        train: Any,
        val: Any = None,
        *,
        resume: str | os.PathLike[str] = "auto",
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        shuffle: bool | None = None,
    ) -> FitResult:
        """Train `module` on `train` and return the result. All ranks call it.

        train, val: a `DataLoader` (its batch size is per rank), a `datasets` or torch dataset (then `batch_size` per rank,
        `num_workers`, `collate_fn`, `shuffle` count), any iterable of batches; `val` also a mapping of named sets.
        resume: "auto" (the newest good checkpoint in `run_dir`, else start), "never", or the path of a checkpoint.
        Ctrl-C once: the state is saved and `fit` returns with `stop_reason="interrupted"`.
        """
        check_methods(module)
        if self.max_steps is None and self.max_epochs is None:
            raise ConfigurationError(
                "neither max_steps nor max_epochs is set; say how long to train, for instance Trainer(max_epochs=3)"
            )
        if train is None:
            raise ConfigurationError("train=None: give a DataLoader, a dataset or an iterable of batches")
        self._check_run_dir()
        found = self._resolve()
        seed, seed_origin = self._base_seed()
        loading = Loading(batch_size, num_workers, collate_fn, shuffle)
        source, validation, origins = self._sources(found, train, val, loading, seed)
        assert source is not None
        if validation and not overrides(module, "validation_step"):
            raise ConfigurationError(
                f"val is given and {type(module).__name__} has no validation_step; define validation_step(self, batch)"
            )
        stages = ["train", *(["validate"] if validation else [])]
        with self._open(found, module, stages, seed) as run:
            # From here to the result: loop.fit is the second frame, the module's step the fourth.
            run.source, run.validation, run.total_steps = source, validation, self._total(source)
            plan = self._prepare_fit(run, found, {**origins, "seed": seed_origin}, resume)
            if found.plan_only:
                raise SystemExit(0)
            try:
                reason = loop.fit(run)
            except BaseException as exc:
                where = f"rank {run.engine.rank}, epoch {run.progress.epoch}, step {run.progress.step + 1}, micro-batch {run.progress.micro_step}"
                exc.add_note(f"while training: {where}")
                raise
            self._finish_fit(run, plan, reason)
            return FitResult(
                run.progress.step,
                run.progress.epoch,
                dict(run.latest),
                reason,
                None if self._fast_dev_run else run.checkpoint,
            )

    def _check_run_dir(self) -> None:
        if self._run_dir is not None and self._run_dir.exists() and not self._run_dir.is_dir():
            raise ConfigurationError(f"run_dir={str(self._run_dir)!r} is a file; give a directory")

    def _prepare_fit(
        self, run: Run, found: _Resolved, origins: Mapping[str, str], resume: str | os.PathLike[str]
    ) -> Plan:
        """Everything between an open engine and the first step: optimizers, the plan, a checkpoint."""
        module, engine = run.module, run.engine
        configured = module.configure_optimizers()
        run.optimizers, run.schedulers = _optimizers(module, configured)
        parameter_names(module, run.optimizers)
        run.parameters = {
            n: [p for g in o.param_groups for p in g["params"] if p.requires_grad] for n, o in run.optimizers.items()
        }
        notes = [run.batch_state.pop("model")] if run.batch_state.get("model") else []
        plan = self.last_plan = self._make_plan(
            found, module, run.source, run.validation, origins, run.seed, run.optimizers, notes
        )
        if self.is_main:
            print(plan, flush=True)
        if not found.plan_only and run.run_dir is not None and engine.rank == 0:
            run.run_dir.mkdir(parents=True, exist_ok=True)
        _same_on_every_rank(run)
        if found.plan_only:
            return plan
        path = saving.choose(run, os.fspath(resume), lambda text: print(text, file=sys.stderr, flush=True))
        if run.run_dir is not None and engine.rank == 0:
            temporary = run.run_dir / ".plan.json"
            temporary.write_text(json.dumps(plan.to_json(), indent=1))
            temporary.replace(run.run_dir / "plan.json")
        engine.barrier()
        if self.seed is not None or engine.world_size > 1:
            seed_everything(derive_seed(run.seed, "rank", engine.rank))
        if run.trackers:
            engine.start_trackers(plan.to_json()["settings"])
        if run.calls.on_fit_start is not None:
            run.calls.on_fit_start(self, module)
        if path is not None:
            saving.restore(run, path, self._accept_changes)
            module.print(f"resumed from {path} (step {run.progress.step})")
        run.tick()
        run.progress.seconds = run.progress.seconds if path is not None else 0.0
        run.clock_fields()
        return plan

    def _finish_fit(self, run: Run, plan: Plan, reason: str) -> None:
        saving.save(run)
        if reason == "interrupted":
            if run.calls.on_preempt is not None:
                run.calls.on_preempt(self, run.module, run.requests.signal)
            place = (
                f"; the state is saved in {run.checkpoint}, the same call goes on from there"
                if run.checkpoint
                else " (no run_dir: nothing is saved)"
            )
            run.module.print(f"interrupted by {run.requests.signal} at step {run.progress.step}{place}")
        else:
            saving.export(run)
        if run.calls.on_fit_end is not None:
            run.calls.on_fit_end(self, run.module)

    @contextlib.contextmanager
    def _open(self, found: _Resolved, module: TrainModule, stages: Sequence[str], seed: int) -> Iterator[Run]:
        """An engine with the module prepared in it; afterwards everything is as before, whatever happened."""
        if self._run is not None:
            raise FabricateError("this Trainer is running already; one fit at a time")
        with contextlib.ExitStack() as stack:
            run_dir = self._run_dir if "train" in stages else None
            if self._fast_dev_run and "train" in stages:
                run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fabricate-dev-")))
            trackers = (
                check_trackers(self._trackers, found.registry) if not self._fast_dev_run and "train" in stages else []
            )
            if trackers and run_dir is None:
                raise ConfigurationError(f"trackers={self._trackers!r} need a place to write; set run_dir=")
            logging_dir = str(run_dir) if trackers else None
            engine = Engine(
                found.launch, found.strategy, found.precision, cpu=found.cpu, log_with=trackers, logging_dir=logging_dir
            )
            if self.seed is not None:
                seed_everything(self.seed)
            stack.enter_context(_determinism(self.deterministic))
            stack.enter_context(engine)
            if self._fast_dev_run and engine.world_size > 1 and run_dir is not None:
                run_dir = Path(engine.broadcast_json(str(run_dir)))
            manager = self._register(found, module, bar=self._show_progress and "train" in stages)
            run = Run(
                trainer=self, module=module, engine=engine, calls=Calls(manager), progress=Progress(),
                metrics=Metrics(engine, engine.device), seed=seed, run_dir=run_dir, run_id=engine.broadcast_json(secrets.token_hex(8)),
                keep=self._keep, trackers=bool(trackers),
                limits=Limits(
                    max_steps=self.max_steps, max_epochs=self.max_epochs, max_grad_norm=found.max_grad_norm, nonfinite=self._nonfinite,
                    log_every=self._log_every, validate_every=Every(steps=1) if self._fast_dev_run else self._validate_every,
                    validate_first=self._validate_first, save_every=self._save_every,
                ),
            )  # fmt: skip
            if not found.strategy.exposes_gradients and run.calls.on_before_step is not None:
                heard = ", ".join(manager.order("on_before_step"))
                raise ConfigurationError(
                    f"strategy={found.strategy.name!r} hides gradients from on_before_step, which {heard} hears; remove it or choose another strategy"
                )
            self._run = run
            object.__setattr__(module, "_trainer", self)
            modes = [(m, m.training) for m in module.modules()]
            try:
                stack.enter_context(_interrupts(run.requests))
                if not hasattr(module, "_built"):
                    run.batch_state["model"] = build_model(module, seed)
                    object.__setattr__(module, "_built", True)
                if "train" in stages and not any(p.requires_grad for p in module.parameters()):
                    raise ConfigurationError(
                        f"{type(module).__name__} has no trainable parameter; build layers in __init__ or configure_model"
                    )
                engine.prepare(module, stages)
                yield run
            except BaseException as exc:
                self._report(run, exc)
                raise
            finally:
                for child, mode in modes:
                    child.training = mode
                self._close(run)

    def _report(self, run: Run, exc: BaseException) -> None:
        """Tell listeners and the other ranks; never hides `exc`."""
        if isinstance(exc, SystemExit):
            return
        if run.calls.on_exception is not None:
            try:
                run.calls.on_exception(self, run.module, exc)
            except Exception as second:
                exc.add_note(f"on_exception raised {type(second).__name__}: {second}")
        first = run.engine.report_failure(exc)
        if first:
            raise RankError(first) from exc

    def _close(self, run: Run) -> None:
        pending = sys.exc_info()[1]
        try:
            if run.calls.on_teardown is not None:
                run.calls.on_teardown(self, run.module)
            if run.trackers:
                run.engine.accelerator.end_training()
        except Exception as exc:
            if pending is None:
                raise
            pending.add_note(f"on_teardown raised {type(exc).__name__}: {exc}")
        finally:
            object.__setattr__(run.module, "_trainer", None)
            run.module._logged.clear()
            self._run, self._last_run = None, run

    def _register(self, found: _Resolved, module: TrainModule, *, bar: bool) -> Manager:
        own: list[tuple[str, object, Origin]] = [
            (f"strategy/{found.strategy.name}", found.strategy, found.origins["strategy"]),
            (f"precision/{found.precision.name}", found.precision, found.origins["precision"]),
            ("module", module, Origin()),
        ]
        manager = found.registry.manager
        manager.add(Defaults(), PROJECT)
        if bar:  # on every rank, so that all hear the same hooks; it shows on rank 0
            manager.add(progress_bar(), "progress_bar")
        return found.registry.activate(own)

    def _evaluation(
        self,
        module: TrainModule,
        data: Any,
        stage: str,
        checkpoint: str | os.PathLike[str] | None,
        loading: Mapping[str, Any],
    ) -> Any:
        check_methods(module)
        if not overrides(module, _STAGES[stage]):
            raise ConfigurationError(
                f"{type(module).__name__} has no {_STAGES[stage]}; define {_STAGES[stage]}(self, batch)"
            )
        found = self._resolve()
        seed, _ = self._base_seed()
        _, sources, _ = self._sources(found, None, data, Loading(**loading), seed)
        if not sources:
            raise ConfigurationError("data=None: give a DataLoader, a dataset or an iterable of batches")
        path = self._checkpoint_path(checkpoint) if checkpoint is not None else None
        with self._open(found, module, [stage], seed) as run:
            if path is not None:
                saving.load_weights_only(run, path)
            if stage == "predict":
                return loop.predict(run, next(iter(sources.values())))
            return loop.evaluate(run, sources, stage)

    def _checkpoint_path(self, checkpoint: str | os.PathLike[str]) -> Path:
        if checkpoint not in ("best", "last"):
            return Path(checkpoint)
        if self._run_dir is None:
            raise ConfigurationError(
                f"checkpoint={checkpoint!r} is looked up in run_dir, which is not set; give a path"
            )
        return saving.find(self._run_dir, str(checkpoint), self._keep)

    def validate(
        self, module: TrainModule, data: Any, checkpoint: str | os.PathLike[str] | None = None, **loading: Any
    ) -> dict[str, float]:
        """Metrics of `module.validation_step` over exactly `data`, the same on every rank. `data` and `loading` (batch_size,
        num_workers, collate_fn) as for `fit`; `checkpoint`: weights to load first: a path, "best" or "last". All ranks."""
        result: dict[str, float] = self._evaluation(module, data, "validate", checkpoint, loading)
        return result

    def test(
        self, module: TrainModule, data: Any, checkpoint: str | os.PathLike[str] | None = None, **loading: Any
    ) -> dict[str, float]:
        """As `validate`, with `module.test_step`."""
        result: dict[str, float] = self._evaluation(module, data, "test", checkpoint, loading)
        return result

    def predict(
        self, module: TrainModule, data: Any, checkpoint: str | os.PathLike[str] | None = None, **loading: Any
    ) -> list[Any] | None:
        """One prediction per sample of `data`, in its order, on rank 0 (None on the others); tensors on the CPU. All ranks."""
        result: list[Any] | None = self._evaluation(module, data, "predict", checkpoint, loading)
        return result


class _Resolved:
    """What a fit is going to use, and where each choice came from."""

    def __init__(
        self,
        launch: Launch,
        registry: Registry,
        strategy: Strategy,
        precision: Precision,
        cpu: bool,
        device: torch.device,
        sources: dict[str, str],
        origins: dict[str, Origin],
        accumulation: int | None,
        max_grad_norm: float | None,
        plan_only: bool,
    ) -> None:
        self.launch, self.registry, self.strategy, self.precision = launch, registry, strategy, precision
        self.cpu, self.device, self.sources, self.origins = cpu, device, sources, origins
        self.accumulation, self.max_grad_norm, self.plan_only = accumulation, max_grad_norm, plan_only


def _for_evaluation(data: object, loading: Loading) -> Loading:
    """What of the training data's loading applies to a validation set: nothing for loaders and iterables of batches."""
    from torch.utils.data import DataLoader, IterableDataset

    stream = isinstance(data, IterableDataset) or type(data).__name__ == "IterableDataset"
    if isinstance(data, DataLoader) or not (stream or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))):
        return Loading()
    workers = min(loading.num_workers, 1) if stream else loading.num_workers
    return Loading(loading.batch_size, workers, loading.collate_fn, None if stream else False)


def _distributed_type(found: _Resolved) -> str:
    if found.launch.world_size == 1:
        return "NO"
    return "MULTI_CPU" if found.cpu else "MULTI_GPU"


def _refuse_unknown(unknown: Mapping[str, Any]) -> None:
    import inspect

    known = [n for n in inspect.signature(Trainer.__init__).parameters if n not in ("self", "unknown")]
    elsewhere = {
        "callbacks": "plugins=[...]", "logger": "trackers=[...]", "loggers": "trackers=[...]", "accumulate_grad_batches": "gradient_accumulation_steps=",
        "gradient_clip_val": "max_grad_norm=", "devices": "the launcher (fabricate run --nproc N)", "accelerator": "the launcher, or ACCELERATE_USE_CPU=1",
        "num_nodes": "the launcher (fabricate run --nnodes N)", "default_root_dir": "run_dir=", "output_dir": "run_dir=", "val_check_interval": "validate_every=",
        "check_val_every_n_epoch": "validate_every=", "log_every_n_steps": "log_every=", "enable_progress_bar": "progress=", "mixed_precision": "precision=",
        "num_train_epochs": "max_epochs=", "learning_rate": "configure_optimizers", "train_dataset": "trainer.fit(module, train, val)",
        "num_sanity_val_steps": "validate_first=", "enable_checkpointing": "run_dir=", "per_device_train_batch_size": "fit(..., batch_size=)",
    }  # fmt: skip
    for name in unknown:
        hint = f"; use {elsewhere[name]}" if name in elsewhere else did_you_mean(name, known)
        raise ConfigurationError(f"Trainer has no argument {name!r}{hint}")


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}, or None")


def _parse_keep(keep: int | str | Mapping[str, Any]) -> dict[str, Any]:
    if keep == "all":
        return {"last": None, "metric": "val_loss", "mode": "min"}
    if isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1:
        return {"last": keep, "metric": "val_loss", "mode": "min"}
    if isinstance(keep, Mapping):
        unknown = sorted(set(keep) - {"last", "best", "metric", "mode"})
        parsed = {"last": 1, "metric": "val_loss", "mode": "min", **keep}
        if (
            not unknown
            and parsed["mode"] in ("min", "max")
            and all(isinstance(parsed.get(n, 1), int) and parsed.get(n, 1) >= 1 for n in ("last", "best"))
        ):
            return parsed
    raise ConfigurationError(
        f"keep={keep!r}: give a number of at least 1, 'all', or a mapping such as {{'last': 2, 'best': 1, 'metric': 'val_loss', 'mode': 'min'}}"
    )


def _optimizers(module: TrainModule, configured: Any) -> tuple[dict[str, torch.optim.Optimizer], dict[str, Any]]:
    """Read what `configure_optimizers` returned."""
    where = f"{type(module).__name__}.configure_optimizers"
    named = configured if isinstance(configured, Mapping) else {"main": configured}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    schedulers: dict[str, Any] = {}
    for name, value in named.items():
        pair = value if isinstance(value, tuple | list) else (value,)
        if not 1 <= len(pair) <= 2 or not isinstance(pair[0], torch.optim.Optimizer):
            raise ConfigurationError(
                f"{where} returned {type(value).__name__} for {name!r}; return an optimizer, (optimizer, scheduler), or a mapping of names to those"
            )
        optimizer = pair[0]
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                f"{where}: LBFGS evaluates the loss several times per update, which no strategy can repeat; choose another optimizer"
            )
        if not any(p.requires_grad for g in optimizer.param_groups for p in g["params"]):
            raise ConfigurationError(
                f"{where}: optimizer {name!r} holds no trainable parameter; pass it self.parameters() of layers that require grad"
            )
        if any(optimizer is other for other in optimizers.values()):
            raise ConfigurationError(f"{where}: optimizer {name!r} is listed twice")
        optimizers[str(name)] = optimizer
        if len(pair) == 2 and pair[1] is not None:
            scheduler = pair[1]
            if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "state_dict", None)):
                raise ConfigurationError(
                    f"{where}: the scheduler of {name!r} is {type(scheduler).__name__}; it needs step() and state_dict()"
                )
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedulers[str(name)] = loop.PlateauStep(scheduler) if plateau else scheduler
    if not optimizers:
        raise ConfigurationError(f"{where} returned no optimizer")
    return optimizers, schedulers


def _same_on_every_rank(run: Run) -> None:
    """All ranks hear the same hooks in the same order and train the same parameters, or every rank says which differs."""
    if run.engine.world_size == 1:
        return
    names = [[n, list(p.shape), p.requires_grad] for n, p in run.module.named_parameters()]
    versions = {n: importlib.metadata.version(n) for n in ("torch", "accelerate")}
    mine = {
        "hooks": run.calls.manager.table(),
        "parameters": names,
        "versions": versions,
        "seed": run.seed,
        "total steps": run.total_steps,
    }
    everyone = run.engine.gather_json(mine)
    for topic in mine:
        different = [r for r, theirs in enumerate(everyone) if theirs[topic] != everyone[0][topic]]
        if different:
            raise RankError(
                f"ranks {different} have other {topic} than rank 0: start every rank with the same script, plugins and packages"
            )


@contextlib.contextmanager
def _determinism(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextlib.contextmanager
def _interrupts(wanted: Requests) -> Iterator[None]:
    """The first Ctrl-C asks the loop to save and stop at the next boundary; a second one interrupts at once."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def handle(number: int, frame: object) -> None:
        wanted.signal = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
