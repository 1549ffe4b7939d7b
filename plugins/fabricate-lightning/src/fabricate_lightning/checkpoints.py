"""Weights from a checkpoint of fabricate, or from a `.ckpt` file of Lightning's, into a LightningModule.

`fabricate.import_checkpoint` reads the tensors and hyper-parameters of a `.ckpt` file by name, and runs no code from it. Must not
know: the Trainer, how a run resumes.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from fabricate import TrainModule, import_checkpoint
from fabricate_lightning.kinds import base
from fabricate_lightning.saved import give_added

M = TypeVar("M")
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def share(part: TrainModule, module: Any) -> None:
    """Give `part` the parameters, buffers and children of `module`, under the same names."""
    for table in _TABLES:
        part.__dict__[table] = module.__dict__[table]


def load_from_checkpoint(kind: type[M], /, path: str | Path, **overrides: Any) -> M:
    """A module of the class `kind`, a LightningModule, with the weights of the checkpoint at `path`, on the CPU.

    path: a checkpoint or a run directory of fabricate, or a `.ckpt` file of Lightning's. The arguments are those recorded with
    `save_hyperparameters`, as far as JSON holds them; `overrides` take precedence. Raises `CheckpointError` where there is no checkpoint,
    where it is damaged, or where an argument was not recorded and is not overridden.
    """
    modules: list[M] = []

    class Loaded(TrainModule):
        def __init__(self, **hparams: Any) -> None:
            super().__init__()
            modules.append(kind(**_arguments(kind, hparams)))
            share(self, modules[0])

        def on_load_weights(self, state: MutableMapping[str, Any]) -> None:
            give_added(modules[0], state)

    Loaded.__name__ = kind.__name__  # for messages
    with imported(path) as checkpoint:
        Loaded.load_from_checkpoint(checkpoint, **overrides)
    return modules[0]


def _arguments(kind: Any, hparams: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `kind` among `hparams`; for a class that takes all of them in one object (`save_hyperparameters(args)`), this
    object."""
    parameters = list(inspect.signature(kind).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return hparams
    recorded = {p.name: hparams[p.name] for p in parameters if p.name in hparams}
    missing = [
        p.name for p in parameters if p.name not in recorded and p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    if len(missing) == 1 and not recorded and hparams and (lightnings := base(kind, "LightningModule")) is not None:
        return {missing[0]: type(lightnings().hparams)(hparams)}  # a mapping whose values are attributes as well
    return recorded


def load_weights(module: Any, path: str | Path) -> None:
    """Put the weights of the checkpoint at `path` into `module`, a LightningModule."""

    class Into(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            share(self, module)

    Into.__name__ = type(module).__name__  # for messages
    with imported(path) as checkpoint:
        Into.load_from_checkpoint(checkpoint)


@contextlib.contextmanager
def imported(path: str | Path | None) -> Iterator[Any]:
    """`path` as fabricate takes it: for a `.ckpt` file, a checkpoint imported from it, which is deleted on exit; otherwise `path`
    itself."""
    if path is None or not Path(path).is_file():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="fabricate-imported-") as directory:
        yield import_checkpoint(path, Path(directory) / "checkpoint")
