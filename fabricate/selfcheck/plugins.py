"""The plugins that a check adds to a fit: they save, kill and write notes.

Also owns the description of user objects' state as text. Must not know: the comparison that the check makes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.state.logical import load_model
from fabricate.data.flat_bytes import flat_bytes
from fabricate.hooks import Callback, hookimpl
from fabricate.module import TrainModule
from fabricate.selfcheck.requests import TRAIN_DATA, Rehearsal, Trial
from fabricate.strategies.sharding import is_sharded
from fabricate.trainer import Trainer
from fabricate.training.halves import compare_halves

__all__ = ["Rehearsing", "Trying"]

_fits = itertools.count()


class Trying(Callback):
    """Load the weights that every split begins with, record the loss of each update, save the final weights."""

    name = "trial"

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.losses: list[float] = []
        self.notes: list[str] = []

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        begin = Path(self.trial.begin)
        if begin.exists():
            with Reader(begin) as reader:
                load_model(reader, module, trainer.strategy)
        else:
            trainer.save(begin)
        dropout = [child for child in module.modules() if isinstance(child, _DropoutNd)]
        for child in dropout:
            child.p = 0.0
        if dropout:
            self.notes.append(f"dropout is off during the check ({len(dropout)} layers)")

    def on_step(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        if not self.losses:
            norms = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm) and child.training]
            if norms:
                self.notes.append(
                    f"{norms[0]} is a BatchNorm. It takes its statistics from each micro-batch, so its results depend on the split"
                )
            if text := compare_halves(trainer._live()):
                self.notes.append(text)
        self.losses.append(float(loss))

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: Trainer) -> None:
        trainer.save(Path(self.trial.notes, "end"))
        if trainer.is_main:
            notes = {"losses": self.losses, "notes": self.notes}
            Path(self.trial.notes, "notes.json").write_text(json.dumps(notes))


class Rehearsing(Callback):
    """Save after the requested update, and record the state of user objects with each checkpoint."""

    name = "rehearsal"

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.folder = Path()
        self.began = False

    def on_fit_start(self) -> None:
        self.folder = Path(self.rehearsal.notes, f"fit-{next(_fits)}")
        self.began = False

    def on_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not self.began and trainer.step:  # resumed, before the first batch
            self._take(trainer, module, "resumed")
        self.began = True

    @hookimpl(trylast=True)
    def on_step(self, trainer: Trainer, module: TrainModule, step: int) -> None:
        if step == self.rehearsal.save_at:
            trainer.request_save()
            self._take(trainer, module, "at")

    def on_accumulate(self, trainer: Trainer) -> None:
        if self.rehearsal.kill and trainer.step == self.rehearsal.save_at:
            Path(self.folder, f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._take(trainer, module, "end")

    def _take(self, trainer: Trainer, module: TrainModule, moment: str) -> None:
        """Save a checkpoint at the next boundary, and write the notes of this rank. All ranks."""
        trainer.save(self.folder / moment)
        run = trainer._live()
        held = {"module": _seen(_values(_own_attributes(module), ""))}
        for name, plugin in run.calls.manager.list_name_plugin():
            if type(plugin).__module__.partition(".")[0] != "fabricate" and plugin is not module:
                held[f"plugin {name}"] = _seen(_values(vars(plugin), ""))
        if run.source is not None:
            held[TRAIN_DATA] = _seen(_generators(run.source.data, "", set()))
        notes = {"step": trainer.step, "held": held}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{moment}-{run.engine.rank:05d}.json").write_text(json.dumps(notes))


# -- the state of objects, as {path: text}

_MOST = 20_000  # recorded values of one object
_LARGEST = 2**24  # bytes: of a larger array only the beginning is digested, a larger tensor is not
_LONGEST = 1000  # items of a container that are read
_DEEPEST = 4
_LIBRARIES = {"torch", "numpy", "transformers", "datasets", "accelerate", "fabricate", "torchmetrics"}
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def _seen(found: Iterator[tuple[str, str]]) -> dict[str, str]:
    return dict(itertools.islice(found, _MOST))


def _own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """By path: the attributes of a module and its children of user classes, without parameters, buffers and children."""
    attributes: dict[str, Any] = {}
    for prefix, child in module.named_modules():
        if type(child).__module__.partition(".")[0] in _LIBRARIES:
            continue
        own = {n: v for n, v in vars(child).items() if n not in _OF_EVERY_MODULE and n not in _OF_TRAIN_MODULE}
        attributes |= {f"{prefix}.{n}" if prefix else n: v for n, v in own.items()}
    return attributes


_OF_TRAIN_MODULE = frozenset({"_trainer", "_logged", "_arguments", "_built"})


def _values(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(path, text) of every plain value inside `value`. Functions, files and objects of other libraries are left out."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield path, repr(value)[:200]
    elif isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        yield path, _digest(value)
    elif (text := _generator(value)) is not None:
        yield path, text
    elif depth < _DEEPEST:
        yield from _inside(value, path, depth)


def _inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple | deque):
        yield f"len({path})", str(len(value))
        items = [(f"{path}[{number}]", item) for number, item in enumerate(itertools.islice(value, _LONGEST))]
    elif isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, value)))[:200]
        return
    elif _is_users(value):
        items = [(f"{path}.{name}", item) for name, item in vars(value).items()]
    else:
        return
    for where, item in items[:_LONGEST]:
        yield from _values(item, where, depth + 1)


def _is_users(value: Any) -> bool:
    kind = type(value)
    return (
        not isinstance(value, type)
        and hasattr(value, "__dict__")
        and kind.__module__.partition(".")[0] not in _LIBRARIES
    )


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() > _LARGEST or value.is_meta or value.layout != torch.strided:
            return f"tensor {value.dtype} {tuple(value.shape)}"
        if is_sharded(value):
            value = value.to_local()
        data = bytes(flat_bytes(value.cpu()).numpy())
    else:
        data = value.tobytes()[:_LARGEST] if value.dtype != object else b""
    return f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:12]}"


def _generator(value: Any) -> str | None:
    """A digest of the state of a random generator; None for other objects."""
    if isinstance(value, torch.Generator):
        state = repr(value.get_state().tolist())
    elif isinstance(value, numpy.random.Generator):
        state = repr(value.bit_generator.state)
    elif isinstance(value, numpy.random.RandomState):
        state = repr([numpy.asarray(part).tolist() for part in value.get_state(legacy=True)])
    elif isinstance(value, random.Random):
        state = repr(value.getstate())
    else:
        return None
    return f"{type(value).__name__} in state {hashlib.sha256(state.encode()).hexdigest()[:12]}"


def _generators(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """(path, digest) of every random generator in a data set. Other attributes are left out, because they may be caches."""
    if id(value) in seen or len(seen) > _LONGEST:
        return
    seen.add(id(value))
    if (text := _generator(value)) is not None:
        yield path, text
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in itertools.islice(items, _LONGEST):
            yield from _generators(item, f"{path}[{key!r}]", seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor):
        for name, item in vars(value).items():
            yield from _generators(item, f"{path}.{name}" if path else name, seen)
