"""The data, the parts and the constants of a run, compared with those of the checkpoint that it resumes from. (Its settings: `changes`.)

Must not know: which checkpoint is chosen (`choosing`), how state is restored (`resuming`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.schema import shared_state
from fabricate.checkpoint.state.constants import about_constants, set_otherwise
from fabricate.data.identity import changed_rows, differ
from fabricate.errors import CheckpointError, few
from fabricate.training.saves.changes import Change
from fabricate.training.saves.choosing import by_main
from fabricate.training.saves.saved_state import data_identity
from fabricate.training.saves.saving import checkpoints
from fabricate.training.state.run_state import Run


def surplus_updates(run: Run, resume: str) -> int:
    """The updates that the epochs before the checkpoint of `choose` had in addition to those that they would have with the rows and the
    global batch of this run; negative if they had fewer. Reads counters alone, before anything is verified, because schedules need the
    number of all updates. All ranks."""
    return int(by_main(run, partial(_surplus_updates, run, resume)))


def _surplus_updates(run: Run, resume: str) -> int:
    source = run.source
    assert source is not None
    now = _Epoch.of((source.num_samples, source.global_batch), (source.num_batches, source.batches_per_update))
    if resume == "never" or now is None:
        return 0
    newest_first = [] if run.run_dir is None else format.committed(checkpoints(run))[::-1]
    for path in newest_first if resume == "auto" else [Path(resume)]:
        # `choose` reports what is damaged
        with contextlib.suppress(CheckpointError, OSError), Reader(format.find(path)) as reader:
            tree = shared_state(reader)
            if "progress" not in tree:
                return 0
            data = tree["data"]
            in_batches = (data.get("num_batches"), data.get("batches_per_update"))
            then = _Epoch.of((data["num_samples"], data["global_batch_size"]), in_batches)
            if then is None:
                return 0
            epoch, position = int(tree["progress"]["epoch"]), int(tree["progress"]["position"])
            if not then.in_rows:
                position = taken if isinstance(taken := data.get("batches_taken"), int) else 0
            difference = then.updates_until(epoch, position) - now.updates_until(epoch, position)
            return int(tree.get("surplus_updates", 0) + difference)
    return 0


class _Epoch(NamedTuple):
    """The size of an epoch, in rows, or in batches if these are the user's."""

    in_rows: bool
    units: int
    per_update: int

    @classmethod
    def of(cls, rows: tuple[Any, Any], batches: tuple[Any, Any]) -> _Epoch | None:
        """The size by the numbers per epoch and per update, of rows or else of batches, which may come from a damaged file; None if
        they are not known."""
        for units, per_update in (rows, batches):
            if isinstance(units, int) and isinstance(per_update, int) and per_update > 0:
                return cls((units, per_update) == rows, units, per_update)
        return None

    def updates_until(self, epoch: int, position: int) -> int:
        """The updates until a position of an epoch, counted back from its end."""
        return (epoch + 1) * math.ceil(self.units / self.per_update) - math.ceil(
            (self.units - position) / self.per_update
        )


def compare_data(run: Run, path: Path, tree: Any) -> Iterator[Change]:
    """Refuse other data than that of the checkpoint, and yield the accepted changes."""
    accept_changes = run.settings.accept_changes
    now, then = data_identity(run), tree["data"]
    compared = {
        "global_batch_size": "global_batch_size",
        "num_samples": "train",
        "shuffle": "train",
        "samplers": "train",
    }
    for key, argument in compared.items():
        if key in then and now[key] != then[key]:
            if argument not in accept_changes:
                raise CheckpointError(
                    f"{path} was saved with {key}={then[key]}, but this run has {now[key]}: samples would be lost or repeated. Use "
                    f"the same {argument}, or accept the change: Trainer(accept_changes=({argument!r},))"
                )
            yield Change(argument, key, str(then[key]), str(now[key]))
    if differ("batches_per_update", then, now):
        if "global_batch_size" not in accept_changes:
            raise CheckpointError(
                f"{path} was saved with {then['batches_per_update']} batches of train per update, but this run has "
                f"{now['batches_per_update']} (ranks x gradient_accumulation_steps), so an update would get different batches. Choose "
                "gradient_accumulation_steps so that the number is the same, or accept the change: "
                "Trainer(accept_changes=('global_batch_size',))"
            )
        yield Change(
            "global_batch_size", "batches per update", str(then["batches_per_update"]), str(now["batches_per_update"])
        )
    if differ("rows_per_batch", then, now):
        if "global_batch_size" not in accept_changes:
            raise CheckpointError(
                f"{path} was saved with batches of {then['rows_per_batch']} rows, but this run has batches of {now['rows_per_batch']}. Use "
                "the same batch_size, or accept the change: Trainer(accept_changes=('global_batch_size',))"
            )
        yield Change("global_batch_size", "rows per batch", str(then["rows_per_batch"]), str(now["rows_per_batch"]))
    if differ("num_batches", then, now):
        yield Change("", "batches per epoch", str(then["num_batches"]), str(now["num_batches"]))
    _compare_rows(run, path, tree, now)
    if differ("in_workers", then, now):
        of = ("of the main process (num_workers=0)", "of worker processes")
        yield Change("", "random numbers for augmentation", of[not now["in_workers"]], of[now["in_workers"]])
    seed = run.settings.seed
    if seed is not None and seed != tree["seed"]:
        if "seed" not in accept_changes:
            raise CheckpointError(
                f"{path} was saved with seed={tree['seed']}, but this run has seed={seed}; use the same seed, or "
                "Trainer(accept_changes=('seed',))"
            )
        yield Change("seed", "seed", str(tree["seed"]), str(seed))


def _compare_rows(run: Run, path: Path, tree: Any, now: dict[str, Any]) -> None:
    """Refuse other rows than those of the checkpoint, or another order. Rows that may only have been computed again get a warning."""
    then, accept_changes = tree["data"], run.settings.accept_changes
    if differ("stream_readers", then, now) and tree["progress"]["position"] and "train" not in accept_changes:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch, with a stream that {then['stream_readers']} process(es) of its DataLoader read; "
            f"now {now['stream_readers']} would read it, in another order, so samples would be lost or repeated. Use the same num_workers "
            "(0 and 1 are the same), or accept the change: Trainer(accept_changes=('train',))"
        )
    if differ("indices", then, now) and "train" not in accept_changes:
        raise CheckpointError(
            f"{path} was saved with other rows of the data set than train has now: the indices of the Subset or sampler differ, "
            "so training could use rows that were held out for validation. Draw the same rows, for instance with "
            "random_split(..., generator=torch.Generator().manual_seed(0)). For another fold, use another run_dir. Or accept the "
            "change: Trainer(accept_changes=('train',))"
        )
    changed = changed_rows(then, now)
    if changed and "train" not in accept_changes:
        which = f" (in its {few(changed.names)})" if changed.names else ""
        what = (
            "if rows, or the numbers of labels or words, come from there, they differ or were computed again, and samples would be lost or "
            "repeated, or the weights would not fit the numbers. Settings that do not choose rows may differ"
            if changed.names
            else "the rows differ, or the same rows were computed again. With different rows, samples would be lost or repeated"
        )
        note = (
            f"{path} was saved with train data of fingerprint {changed.then}, but train now has fingerprint {changed.now}{which}: {what}. "
            "Pass the same data; for other data, such as another fold, use another run_dir; or accept the change: "
            "Trainer(accept_changes=('train',))"
        )
        run.journal.event("data_changed", reason=note)
        if run.engine.rank == 0:
            print(f"warning: {note}", file=sys.stderr, flush=True)
    for name, val in now["validation"].items():
        saved = then.get("validation", {}).get(name, {})
        if differ("rows", saved, val) or differ("indices", saved, val) or changed_rows(saved, val):
            run.journal.note(
                f"{f'the set {name!r} of val' if name else 'val'} has other rows than when {path} was saved, or they were computed again. "
                "With other rows, metrics from before and after this point cannot be compared, as keep and EarlyStopping do"
            )


def compare_parts(run: Run, path: Path, tree: Any) -> None:
    if set(run.optim.optimizers) != set(tree["optimizers"]):
        raise CheckpointError(
            f"{path} has the optimizers {sorted(tree['optimizers'])}, but this run has {sorted(run.optim.optimizers)}; return the "
            "same optimizers from configure_optimizers, or start over with resume='never'"
        )
    schedulers = {label: s.kind for label, s in run.optim.schedules.items()}
    saved_schedulers = {label: s["kind"] for label, s in tree["schedulers"].items()}
    if schedulers != saved_schedulers:
        raise CheckpointError(
            f"{path} has the schedulers {saved_schedulers}, but this run has {schedulers}; return the same schedulers from "
            "configure_optimizers, or start over with resume='never'"
        )
    listening = {name for name, _ in run.calls.listeners("on_save")}
    missing = sorted(n for n in tree["plugins"] if n not in listening)
    surplus = sorted(n for n in listening if n not in tree["plugins"])
    for names, text in ((missing, "holds the state of"), (surplus, "has no state for")):
        if names and "plugins" not in run.settings.accept_changes:
            raise CheckpointError(
                f"{path} {text} the plugin {', '.join(names)}; use the same plugins, or Trainer(accept_changes=('plugins',))"
            )


def constants_of(run: Run, reader: Reader, tree: Any) -> Callable[[], list[Change]]:
    """Note buffers and frozen weights that the script sets otherwise than the checkpoint has them. If this change is accepted, the returned
    function, called after the rest is restored, gives them the values of the script. All ranks."""
    saved = tree["module"].get("constants")
    names = list(set_otherwise(reader, saved, run.checkpoints.constants))
    if "constants" not in run.settings.accept_changes:
        run.checkpoints.constants |= {name: saved[name] for name in names}
        if names:
            run.journal.note(
                f"{about_constants(names)}. To use the values of the script: Trainer(accept_changes=('constants',))"
            )
        return list
    tensors = dict((*run.module.named_buffers(), *run.module.named_parameters()))
    part = run.engine.strategy.local_part
    values = {name: part(tensors[name]).memory.detach().clone() for name in names}

    def take() -> list[Change]:
        for name, value in values.items():
            part(tensors[name]).write(value.reshape(-1))
        return [Change("constants", name, "as in the checkpoint", "as in the script") for name in names]

    return take
