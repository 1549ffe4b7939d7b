"""Trainer, the composition root: it holds the settings, resolves them into a plan, opens the engine, runs the loop and cleans up.

Building a Trainer has no effects; everything happens in `fit`, `validate`, `test` and `predict`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch

from fabricate.configuration.arguments import CHECKS, Settings
from fabricate.configuration.batch_size_finder import BatchSizeFinder
from fabricate.configuration.launched import with_launched
from fabricate.configuration.opened_data import Data, open_data, refuse_search, settle
from fabricate.configuration.plan import Plan
from fabricate.configuration.plan_sections import make_plan
from fabricate.configuration.resolve import Resolved, resolve
from fabricate.data.source import Loading
from fabricate.distributed.accelerator import Silent
from fabricate.distributed.engine import Engine
from fabricate.distributed.trackers import library_object
from fabricate.errors import CheckpointError, ConfigurationError, FabricateError, first_line
from fabricate.launch.ranks import detect
from fabricate.metrics.counters import Progress
from fabricate.model.memory import need_ahead
from fabricate.module import STEPS, TrainModule, check_dataloader_idx, check_methods, overrides
from fabricate.registry import foreign_names
from fabricate.registry.hook_calls import Calls
from fabricate.training import loop
from fabricate.training.batch_size import facts_of, first_size, found_size
from fabricate.training.evaluations import calibration, evaluation
from fabricate.training.finish import finish_fit, write_model
from fabricate.training.interruptions.preemption import told_to_end
from fabricate.training.opening import opened, register
from fabricate.training.preparation import prepare_fit
from fabricate.training.process import environment_restored
from fabricate.training.reports.failure import noting_failures
from fabricate.training.saves import choosing, resuming, saving
from fabricate.training.state.run_state import Run
from fabricate.training.updates import freezing
from fabricate.training.updates.optimizer_modes import meant_weights
from fabricate.values import Every, FitResult

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fabricate.precisions.base import Precision
    from fabricate.strategies.base import Strategy

T = TypeVar("T")


class _Counted(NamedTuple):
    """The counters and last values of the run in progress, or of the last fit."""

    progress: Progress
    metrics: dict[str, float]
    rates: dict[str, float]


class Trainer:
    """Trains and evaluates a `TrainModule`. All arguments are keyword-only. The constructor checks their values and builds nothing.

    strategy, precision: a registered name, a name with options ("fsdp:wrap=GPT2Block"), an object, or "auto".
    max_steps, max_epochs: the number of updates, and of passes over the data; the fit ends with whichever comes first. `fit` needs
    one.
    min_steps, min_epochs: `stop()` and EarlyStopping do not end the fit earlier than this; signals and max_time still do.
    max_time: how long one call of `fit` may take ("11 hours"); it then saves and returns, as after a signal.
    timeout: how long a rank waits for the others ("30 minutes") before the run ends with an error that names the missing ranks.
    gradient_accumulation_steps, global_batch_size: micro-batches per update, or rows per update on all ranks together.
    max_grad_norm, max_grad_value: clip the global gradient to this 2-norm, or each of its elements to this absolute value, once per
    update; hooks and logs get the norm before clipping.
    nonfinite: "stop": raise an error when a loss is not finite (checked at log boundaries); "skip": skip updates whose gradient is
    not finite (waits for the device once per update).
    seed: determines initial weights, data order and dropout; dropout differs from rank to rank. After a fit or an evaluation the
    global generators are restored. If it is not set, the data order comes from torch's initial seed, and a single process uses the
    global generators in their current state.
    deterministic: use torch's deterministic algorithms during the fit.
    detect_anomaly: use torch's anomaly detection during the fit: an error in backward shows the forward operation that caused it,
    and a NaN gradient is an error. Slow.
    compile: True: apply torch.compile to each repeated block (of a transformers model, of a ModuleList), or to each layer if there
    are none; "blocks": to repeated blocks only, and raise an error if there are none; a mapping: options of torch.compile.
    Compilation is undone after the fit. The batch dimension is dynamic if the last batch is known to be shorter, unless the options
    set `dynamic`.
    activation_checkpointing: backward recomputes the activations inside each block of the model instead of storing them: less
    memory for about a third more time. Blocks are those of a transformers model, and the children of every ModuleList.
    save: "sync", or "async" to write checkpoints while training continues: the loop pauses only while the state is copied to host
    memory.
    run_dir: the directory for checkpoints, metrics.jsonl, events.jsonl, plan.json and model/; unset, nothing is written.
    save_every, validate_every, log_every: durations ("500 steps", "1 epoch", "10 minutes", "1e9 tokens", or 0.25 for a quarter of an
    epoch; a whole number counts steps). The first two may be None for never.
    keep: which checkpoints to keep: the last so many (an int), "all", or {"last": 2, "best": 1, "metric": "val_loss", "mode":
    "min"}; for a metric whose name suggests that higher is better (accuracy, f1, ...), give the mode explicitly.
    load_best: True: when the fit is complete, load the weights of its best checkpoint into the module and write them to model/;
    `keep` has to contain "best" and its metric. `load_from_checkpoint(run_dir)` still loads the newest checkpoint: pass
    `FitResult.best_checkpoint` for the best.
    save_frozen: False leaves frozen weights out of checkpoints; a resume then checks by digest that the module has the same ones. Unset:
    all frozen weights are saved, or none of them if some are quantised or offloaded by "device_map". Checkpoints never hold quantised
    weights.
    save_weights_only: True: checkpoints hold the weights and nothing else, a third of the size with AdamW; nothing resumes from them.
    validate_first: validate once before the first step.
    sanity_batches: if validate_first is False, run validation on this many batches of each set before the first step, to find mistakes
    early; its results are discarded, and plugins get no events of it.
    progress: a progress bar (or plain lines) on rank 0; a list of metrics (["loss", "accuracy"]) chooses what it shows.
    print_plan: what rank 0 prints of the plan before the first step: a "summary" of at most eight lines, "full" or "none". "none"
    also suppresses the line about the dtypes observed in the first update.
    plugins: `Callback` objects or names of installed plugins.
    trackers: names known to Accelerate ("tensorboard", ...) or offered by an installed plugin.
    limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: use only this many micro-batches per rank
    (int), or this share of the data (float), in that stage; limit_val_batches=0 turns validation off.
    overfit_batches: train on the same first micro-batches (an int per rank, or a share of the data) in every epoch, unshuffled, and
    validate on them instead of val. Data with set_epoch stays at epoch 0; random augmentation may still change the rows. If the model
    can learn at all, the loss comes close to zero.
    fast_dev_run: True (1) or a number: run this many updates and validation batches, one save and one export, in a temporary
    directory that is deleted.
    accept_changes: which settings may differ from those of the checkpoint that is resumed ("global_batch_size", "train", "seed",
    "plugins", "optimizer", "scheduler", "module" for its constructor arguments, "constants" for its buffers and frozen weights that
    training did not change, "max_grad_norm", "max_grad_value"); the new values are then in effect.
    """

    @foreign_names.translated(foreign_names.ARGUMENTS)
    @with_launched
    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        precision: str | Precision = "auto",
        max_steps: int | None = None,
        max_epochs: int | None = None,
        min_steps: int | None = None,
        min_epochs: int | None = None,
        max_time: str | Every | None = None,
        timeout: str | Every = "30 minutes",
        gradient_accumulation_steps: int | None = None,
        global_batch_size: int | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        nonfinite: str = "stop",
        seed: int | None = None,
        deterministic: bool = False,
        detect_anomaly: bool = False,
        compile: bool | str | Mapping[str, Any] = False,
        activation_checkpointing: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
        save: str = "sync",
        save_every: str | float | Every | None = "1 epoch",
        keep: int | str | Mapping[str, Any] = 3,
        load_best: bool = False,
        save_frozen: bool | None = None,
        save_weights_only: bool = False,
        validate_every: str | float | Every | None = "1 epoch",
        validate_first: bool = False,
        sanity_batches: int = 2,
        log_every: str | float | Every = "10 steps",
        progress: bool | Sequence[str] = True,
        print_plan: str = "summary",
        plugins: Sequence[object] = (),
        trackers: Sequence[Any] = (),
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float | None = None,
        fast_dev_run: bool | int = False,
        accept_changes: Sequence[str] = (),
    ) -> None:
        defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
        self.settings = Settings.checked(locals(), defaults)
        self._run: Run | None = None
        self._ended: _Counted | None = None
        self._evaluations = 0

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that do not exist. For names from other frameworks, the error says what to use."""
        raise foreign_names.missing_attribute(self, name, foreign_names.TRAINER)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CHECKS:
            raise ConfigurationError(
                f"trainer.{name} was assigned, which has no effect; pass it when the Trainer is created: Trainer({name}=...)"
            )
        own = (
            type(self) is not Trainer and self.__dict__.get("_run") is None
        )  # a subclass may keep attributes of its own
        if name in foreign_names.SET_ON_TRAINER and not own:
            raise ConfigurationError(
                f"trainer.{name} was assigned, but fabricate does not read it{foreign_names.use(name, foreign_names.SET_ON_TRAINER)}"
            )
        super().__setattr__(name, value)

    # -- for hooks and modules -------------------------------------------------------------------------------------------

    def _live(self) -> Run:
        if self._run is None:
            raise FabricateError(
                "this attribute or method of the trainer is available only while fit, validate, test or predict is running; use it "
                "in a step or a hook"
            )
        return self._run

    def _counted(self) -> _Counted:
        """The counters and values of the run in progress, or of the last fit."""
        if self._run is not None:
            return _Counted(self._run.progress, self._run.journal.latest, self._run.journal.rates)
        if self._ended is None:
            raise FabricateError(
                "this attribute of the trainer is available only after a fit, or while fit, validate, test or predict is running"
            )
        return self._ended

    @property
    def running(self) -> bool:
        """Whether `fit`, `validate`, `test` or `predict` is running."""
        return self._run is not None

    @property
    def accelerator(self) -> Accelerator:
        """The Accelerator in use. Raises `FabricateError` before and after a fit or an evaluation."""
        if self._run is None:
            raise FabricateError(
                "trainer.accelerator exists only while fit, validate, test or predict is running; use it in a step or a hook"
            )
        return self._run.engine.accelerator

    @property
    def strategy(self) -> Strategy:
        """The strategy object in use. Raises `FabricateError` before and after a fit or an evaluation."""
        return self._live().engine.strategy

    @property
    def precision(self) -> Precision:
        """The precision object in use. Raises `FabricateError` before and after a fit or an evaluation."""
        return self._live().engine.precision

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0. Outside of a fit or an evaluation, the launcher's variables decide."""
        return self._run.engine.rank == 0 if self._run is not None else detect(os.environ).rank == 0

    @property
    def step(self) -> int:
        """The number of updates applied so far; after a fit, and in an evaluation after it, the number at its end. In an evaluation of a
        checkpoint, the number that the checkpoint was saved at."""
        return self._counted().progress.step

    @property
    def epoch(self) -> int:
        """The index of the current pass over the data, from 0. It does not change before the evaluation and the hooks at the end of
        the pass have run. In the hooks after training (`on_complete`, `on_export`, `on_fit_end`), the index of the last pass. After a fit,
        the number of complete passes."""
        if self._run is not None and self._run.now.epoch is not None:
            return self._run.now.epoch
        return self._counted().progress.epoch

    @property
    def progress(self) -> Progress:
        """All counters of the run; after a fit, their values at its end."""
        return self._counted().progress

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of every metric, the same on every rank; after a fit, the value at its end."""
        return dict(self._counted().metrics)

    @property
    def rates(self) -> dict[str, float]:
        """Speeds of this rank between the last two log boundaries, without evaluations and saves: seconds_per_step,
        steps_per_second, samples_per_second, data_share (the share of time spent waiting for data) and, if the strategy measures
        it, communication_share. On a device also peak_memory_bytes and planned_memory_bytes (see docs/performance.md); and what
        `add_meter` adds. Empty before the first boundary."""
        return dict(self._counted().rates)

    @property
    def total_steps(self) -> int:
        """The total number of updates of this fit. Raises `ConfigurationError` when the data has no length."""
        total = self._live().optim.total_steps
        if total is None:
            raise ConfigurationError("total_steps is not known: train has no length; set max_steps in the Trainer")
        return total

    @property
    def batch_indices(self) -> Sequence[int]:
        """In an evaluation: the indices in the data set of the rows of this rank's batch (for an iterable, their positions in the
        order of arrival). Empty outside of evaluations, and for a stand-in: a batch that is computed only because the collectives
        need every rank."""
        return self._live().now.batch_indices

    @property
    def data_set(self) -> str:
        """In an evaluation: the name of the current data set, as given in `val`. Empty for a single unnamed set, and outside of
        evaluations."""
        return self._live().now.data_set

    @property
    def validates(self) -> bool:
        """Whether the running fit can reach a validation: it has validation data, and `validate_every` falls due before its end."""
        return self._live().validates

    @property
    def validation_metrics(self) -> frozenset[str]:
        """The names of the metrics of validation in the running fit; empty if they are not known yet."""
        return self._live().journal.validated

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The running fit's optimizers by name ("main" if `configure_optimizers` gives no names). Read-only: `configure_optimizers` makes
        them."""
        return MappingProxyType(self._live().optim.optimizers)

    @property
    def run_dir(self) -> Path | None:
        """The directory that this fit writes to; None if it writes nothing, as an evaluation outside of a fit (`settings.run_dir` is the
        directory of the trainer's fits)."""
        return self._run.run_dir if self._run is not None else self.settings.run_dir

    def tracker(self, name: str) -> Any:
        """The tracking library's own object in the running fit, for logging things other than numbers: the `Run` of "wandb", the
        `SummaryWriter` of "tensorboard", the `ActiveRun` of "mlflow", the `Run` of "trackio". On other ranks than 0, and in an
        evaluation outside of a fit (trackers do not record those), it is an object whose methods do nothing. Raises
        `ConfigurationError` for a name that is not in `trackers`."""
        run = self._live()
        return (
            Silent() if run.source is None and self.settings.trackers else library_object(run.engine.accelerator, name)
        )

    def add_meter(self, meter: Callable[[dict[str, float]], Mapping[str, float]]) -> None:
        """Call `meter(rates)` at each log boundary of this run, on the rank that adds it. `meter` returns a mapping of names to numbers.
        They are added to `rates`, to the "clock" entry of metrics.jsonl, and to the trackers (as clock/NAME). Use it for values that depend
        on time and the machine and that a resumed run therefore does not reproduce; log everything else with `TrainModule.log`. `meter`
        must not call collectives."""
        self._live().journal.meters.append(meter)

    def in_forward(self, function: Callable[[], T]) -> T:
        """Call `function()` inside the prepared model's forward, where the steps are called too: in the precision of the run, with the
        weights gathered by the strategy. Returns its result. For use in hooks of an evaluation, for instance to generate text. All ranks
        have to call it, unless `strategy.lockstep` is false (the forward then has no collectives)."""
        return self._live().engine.in_forward(function)

    def calibrate(self, batches: int | None = None) -> None:
        """Run `training_step` over the training data once more, without gradients, to update layers that collect statistics of
        their inputs: batch norm, ranges for quantisation. Call it in `on_complete`, on all ranks. If it is called in `on_fit_start`
        too, that call only checks that the data can be read again, so that the error comes before the first step.

        batches: the maximum number of micro-batches per rank; None: one pass, which needs data with a length. The module is in
        train mode. Values logged by steps are discarded; random generators and torchmetrics objects are restored afterwards;
        buffers keep their new values, which on each rank come from its own rows. Wrappers of `train_step` do not run. Raises
        `ConfigurationError` for data that can be read only once, and `FabricateError` when called elsewhere during a fit."""
        calibration.calibrate(self._live(), batches)

    def request_save(self) -> None:
        """Save at the next update boundary, on all ranks; it is enough to call this on one rank."""
        self._live().requests.ask(save=True)

    def request_eval(self) -> None:
        """Validate at the next update boundary, on all ranks; it is enough to call this on one rank."""
        self._live().requests.ask(evaluate=True)

    def freeze(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Stop training `parameters`, from the next update on. They have to be trainable when the fit begins. They stay in their
        optimizers, which skip parameters without a gradient, and are trainable again after the fit. Call it in a hook, on every
        rank. Checkpoints record which parameters are frozen: a resumed run continues with that, whatever `on_fit_start` froze.
        Layers stay in train or eval mode as they are.
        Raises `ConfigurationError` for a parameter that is in no optimizer, and under ZeRO."""
        freezing.request(self._live(), parameters, trained=False)

    def unfreeze(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Train `parameters`, which `freeze` froze, from the next update on."""
        freezing.request(self._live(), parameters, trained=True)

    def stop(self, reason: str = "stopped") -> None:
        """End the fit at the next update boundary, on all ranks, but not before `min_steps` and `min_epochs`; `reason` becomes
        `FitResult.stop_reason`."""
        self._live().requests.ask(stop=reason or "stopped")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint to `path`, which must not exist yet: at the next update boundary, on all ranks (a call on one rank is
        enough). In `on_fit_start`, `on_saved` and `on_fit_end`, where no update is in progress, it writes immediately and all ranks
        have to call it. If the module then has other weights or buffers than after the last update (`load_best`, an average), the
        checkpoint holds only those, and a fit cannot resume from it; a note says so. In `on_exception` it immediately writes the
        state after the last complete update; the caller has to restore generators and buffers first, and every rank has to be in
        `on_exception`; see `SaveOnException`."""
        run = self._live()
        target = Path(path)
        if target.exists():
            raise CheckpointError(f"save({str(path)!r}): this path exists already; give a new one")
        if run.now.failure is not None:
            saving.write_last_update(run, target)
            return target
        if run.now.at_boundary:
            saving.write_now(run, target)
            return target
        run.requests.ask(path=str(target))
        return target

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the weights that the module holds now into the new folder `path`, in the form of `RUN_DIR/model/`. Call it on all ranks and
        between updates: in `on_saved`, `on_eval_end`, `on_epoch_end` or `on_fit_end`. In the check of validation before training
        it writes nothing. Raises `CheckpointError` if `path` exists, and `FabricateError` during an update."""
        run, target = self._live(), Path(path)
        if run.engine.moment.trial:
            return target
        if run.now.in_update:
            raise FabricateError(
                f"export({str(path)!r}): it cannot run during an update; call it in on_saved, for example"
            )
        if run.engine.rank == 0 and target.exists():
            raise CheckpointError(f"export({str(path)!r}): this path exists already; give a new one")
        with meant_weights(run):
            write_model(run, target)
        return target

    @foreign_names.translated(foreign_names.FIT)
    def plan(
        self,
        module: TrainModule,
        train: Any = None,
        val: Any = None,
        *,
        batch_size: int | BatchSizeFinder | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        shuffle: bool | None = None,
    ) -> Plan:
        """The resolved plan, without training: `str(plan)` is its text. Arguments as for `fit`. Nothing is built on a device and
        ranks do not communicate. With a `BatchSizeFinder`, the plan shows the first size that would be tried."""
        check_methods(module)
        train, val = module.provide_data(self, "fit", train, val)
        with environment_restored():
            resolved = resolve(self.settings, module)
            if isinstance(batch_size, BatchSizeFinder):
                loading = first_size(batch_size, Loading(None, num_workers, collate_fn, shuffle))
            else:
                loading = Loading(batch_size, num_workers, collate_fn, shuffle)
            data = open_data(self.settings, resolved, train, val, loading)
            return self._plan_ahead(resolved, module, data)

    def _plan_ahead(self, resolved: Resolved, module: TrainModule, data: Data) -> Plan:
        """The plan for `module`, which is neither built nor changed."""
        settle(self.settings, resolved, data)
        Engine(
            resolved.launch,
            resolved.strategy,
            resolved.precision,
            resolved.device,
            compile=data.compilation(self.settings),
        ).check()
        try:
            needed = need_ahead(module, True, data.total_steps(self.settings))
        except RuntimeError as exc:
            notes = [f"memory is not known before building: configure_model needs real tensors ({first_line(exc)})"]
            return make_plan(self.settings, resolved, module, data, notes=notes)
        return make_plan(self.settings, resolved, needed.module, data, needed.optimizers, needed=needed)

    # -- running --------------------------------------------------------------------------------------------------------

    @foreign_names.translated(foreign_names.FIT)
    def fit(
        self,
        module: TrainModule,
        train: Any = None,
        val: Any = None,
        *,
        resume: str | os.PathLike[str] = "auto",
        batch_size: int | BatchSizeFinder | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        shuffle: bool | None = None,
    ) -> FitResult:
        """Train `module` on `train` and return the result. All ranks call it.

        train, val: a `DataLoader` (its batch size is per rank), a `datasets` or torch dataset (to which `batch_size`, per rank,
        `num_workers`, `collate_fn` and `shuffle` then apply; `train` is shuffled unless `shuffle=False`), or any iterable of
        batches. The `drop_last=True` of a `DataLoader` leaves out the last incomplete global batch (the rows of one update) of each
        epoch. `val` may also be a mapping of named sets, whose metrics are called `val_NAME_loss`. Both may be omitted if the
        module has `provide_data`. `batch_size=BatchSizeFinder()`: use the largest batch size that fits into memory.
        resume: "auto" (resume from the newest intact checkpoint in `run_dir`, or start if there is none), "never", or the path of a
        checkpoint or of a run directory that has one. SIGTERM, SIGUSR1, `max_time` and a file RUN_DIR/stop, on any rank, end the
        fit: it finishes the current update, saves and returns with `stop_reason="preempted"`. After SIGTERM and SIGUSR1, later
        calls of `fit` return the same immediately, without a step. Ctrl-C once does the same with "interrupted"; twice raises
        KeyboardInterrupt.
        """
        if name := told_to_end():  # a later fit of the script may depend on one that was not finished
            print(f"{name} asked this process to end, so no further fit is started", file=sys.stderr)
            return FitResult(0, 0, stop_reason="preempted")
        began = time.monotonic()
        loading = Loading(None, num_workers, collate_fn, shuffle)
        resolved, data = self._open_data(module, train, val, resume, batch_size, loading)
        stages = ["train", *(["validate"] if data.validation else [])]
        with opened(self, resolved, module, stages, data, began) as run:
            prepare_fit(run, resolved, data, resume, began)
            try:
                with noting_failures(run):
                    reason = loop.fit(run)
                finish_fit(run, reason)
            finally:  # keep only values, so that the caller can release the module and the device's memory
                self._ended = _Counted(run.progress, run.journal.latest, run.journal.rates)
            return self._result(run, reason)

    def _try(self, module: TrainModule, train: Any, val: Any, settings: Settings, loading: Loading) -> None:
        """Run a fit with other settings; this Trainer does not change."""
        trainer = copy.copy(self)
        trainer.settings = settings
        shuffle, workers = loading.shuffle, loading.num_workers
        trainer.fit(
            module,
            train,
            val,
            resume="never",
            batch_size=loading.batch_size,
            num_workers=workers,
            collate_fn=loading.collate_fn,
            shuffle=shuffle,
        )

    def _open_data(
        self,
        module: TrainModule,
        train: Any,
        val: Any,
        resume: str | os.PathLike[str],
        batch_size: int | BatchSizeFinder | None,
        loading: Loading,
    ) -> tuple[Resolved, Data]:
        """Check the arguments of `fit` and open its data. Under `fabricate plan`, print the plan and end the process."""
        check_methods(module)
        train, val = module.provide_data(self, "fit", train, val)
        self._check_fit(train, resume)
        if isinstance(batch_size, BatchSizeFinder):
            refuse_search(train)
            facts = functools.partial(facts_of, self.settings, module, train, val, resume == "auto")
            trial = functools.partial(self._try, module, train, val)
            loading = found_size(batch_size, self.settings, loading, facts, trial)
        else:
            loading = replace(loading, batch_size=batch_size)
        resolved = resolve(self.settings, module)
        data = open_data(self.settings, resolved, train, val, loading)
        if data.validation and not overrides(module, "validation_step"):
            raise ConfigurationError(
                f"val is given and {type(module).__name__} has no validation_step; define validation_step(self, batch)"
            )
        check_dataloader_idx(module, "validate", data.validation)
        if resolved.plan_only:
            self._end_after_plan(resolved, module, data)
        return resolved, data

    def _result(self, run: Run, reason: str) -> FitResult:
        progress, latest = run.progress, dict(run.journal.latest)
        if self.settings.fast_dev_run:  # its files are deleted
            return FitResult(progress.step, progress.epoch, latest, reason)
        best = choosing.best(run) or (None, None)
        return FitResult(progress.step, progress.epoch, latest, reason, run.checkpoints.newest, *best)

    def _check_fit(self, train: object, resume: object) -> None:
        """Raise `ConfigurationError` for settings and arguments with which `fit` could not train."""
        settings = self.settings
        if not isinstance(resume, str | os.PathLike):
            raise ConfigurationError(
                f"resume={resume!r}: give 'auto' (continue from run_dir, the default), 'never' (start over) or the path of a checkpoint"
            )
        if settings.max_steps is None and settings.max_epochs is None:
            raise ConfigurationError(
                "neither max_steps nor max_epochs is set; say how long to train, for instance Trainer(max_epochs=3)"
            )
        if settings.load_best and ("best" not in settings.keep or settings.run_dir is None):
            raise ConfigurationError(
                "load_best=True needs run_dir= and a keep= that says which checkpoint is the best, for example "
                "keep={'last': 1, 'best': 1, 'metric': 'val_loss', 'mode': 'min'}"
            )
        if train is None:
            raise ConfigurationError("train=None: give a DataLoader, a dataset or an iterable of batches")
        if settings.run_dir is not None and settings.run_dir.exists() and not settings.run_dir.is_dir():
            raise ConfigurationError(f"run_dir={str(settings.run_dir)!r} is a file; give a directory")

    def _end_after_plan(self, resolved: Resolved, module: TrainModule, data: Data) -> NoReturn:
        """Under `fabricate plan`: print the plan and end the process."""
        Calls(register(resolved, module, bar=False))  # raises an error for a hook that would never be called
        plan = self._plan_ahead(resolved, module, data)
        if resolved.launch.rank == 0:
            print(plan, flush=True)
        raise SystemExit(0)

    def _evaluate(
        self,
        stage: str,
        module: TrainModule,
        data: Any,
        checkpoint: str | os.PathLike[str] | None,
        loading: Loading,
    ) -> Any:
        check_methods(module)
        if not overrides(module, STEPS[stage]):
            raise ConfigurationError(
                f"{type(module).__name__} has no {STEPS[stage]}; define {STEPS[stage]}(self, batch)"
            )
        _, data = module.provide_data(self, stage, None, data)
        if data is None:
            raise ConfigurationError("data=None: give a DataLoader, a dataset or an iterable of batches")
        resolved = resolve(self.settings, module, training=False)
        sources = open_data(self.settings, resolved, None, data, loading, stage)
        if not sources.validation:
            raise ConfigurationError("data={}: name at least one data set")
        check_dataloader_idx(module, stage, sources.validation)
        path, text = self._checkpoint_path(checkpoint) if checkpoint is not None else (None, "")
        number = self._number_of_evaluation()
        with opened(self, resolved, module, [stage], sources) as run:
            if path is not None:
                run.progress.load(resuming.load_weights_only(run, path))
            elif self._ended is not None:
                run.progress.load(self._ended.progress.state())
            if text:
                module.print(text)
            evaluation.draw_anew(run, number)
            with noting_failures(run):
                if stage == "predict":
                    return evaluation.predict(run, sources.validation)
                return evaluation.evaluate(run, sources.validation, stage)

    def _number_of_evaluation(self) -> int:
        """A number on which the random numbers of an evaluation depend: with a seed, how many this Trainer has begun; else a number drawn
        from torch's generator, as an iteration over a DataLoader draws it."""
        if self.settings.seed is None:
            return int(torch.empty((), dtype=torch.int64).random_())
        self._evaluations += 1
        return self._evaluations

    def _checkpoint_path(self, checkpoint: str | os.PathLike[str]) -> tuple[Path, str]:
        """The path of the checkpoint, and a line to print about it (may be empty)."""
        if checkpoint not in ("best", "last"):
            return Path(checkpoint), ""
        if self.settings.run_dir is None:
            raise ConfigurationError(
                f"checkpoint={checkpoint!r} means a checkpoint in run_dir, but run_dir is not set; give a path, or set run_dir"
            )
        return choosing.find(self.settings.run_dir, str(checkpoint), self.settings.keep)

    @foreign_names.translated(foreign_names.EVALUATE)
    def validate(
        self,
        module: TrainModule,
        data: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
    ) -> dict[str, float]:
        """Metrics of `module.validation_step` over exactly `data`, every row once, also with a loader that has `drop_last=True`; the
        same on every rank. `data`, `batch_size`, `num_workers` and
        `collate_fn` as for `fit`; `checkpoint`: weights to load first: a path, "best" (by the metric of `keep` in that run) or
        "last". All ranks call it."""
        result: dict[str, float] = self._evaluate(
            "validate", module, data, checkpoint, Loading(batch_size, num_workers, collate_fn)
        )
        return result

    @foreign_names.translated(foreign_names.EVALUATE)
    def test(
        self,
        module: TrainModule,
        data: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
    ) -> dict[str, float]:
        """The metrics of `module.test_step`; otherwise the same as `validate`."""
        result: dict[str, float] = self._evaluate(
            "test", module, data, checkpoint, Loading(batch_size, num_workers, collate_fn)
        )
        return result

    @foreign_names.translated(foreign_names.EVALUATE)
    def predict(
        self,
        module: TrainModule,
        data: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
    ) -> Any:
        """One prediction per sample of `data`, in the order of the data set, also if a loader shuffles it or has a sampler of its own: a
        list, or for several named sets a mapping of lists, with tensors on the CPU. Rank 0 returns it, other ranks return None. All ranks
        call it."""
        return self._evaluate("predict", module, data, checkpoint, Loading(batch_size, num_workers, collate_fn))
