"""The state of an adapted module that a checkpoint holds in addition to weights, optimizers and metrics: changed attributes, the state of
callbacks and of the data module, and the values that `on_save_checkpoint` adds.

Must not know: files, when a checkpoint is taken.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from fabricate import ConfigurationError, Trainer
from fabricate_lightning.kinds import base, overrides
from fabricate_lightning.view import TrainerView

_LIBRARIES = ("torch", "torchmetrics", "transformers", "fabricate_lightning")
"""The packages whose layers have no further state to save."""
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter, defaultdict), (list, tuple, deque)
"""Collections that a checkpoint can hold, if it can hold what is in them."""


class Checkpoint(dict[str, Any]):
    """The argument of `on_save_checkpoint` and `on_load_checkpoint`: the values that these hooks added, "epoch" and "global_step"."""

    def __missing__(self, key: str) -> Any:
        raise ConfigurationError(
            f"checkpoint[{key!r}]: this key does not exist. fabricate saves weights, optimizers and progress itself, and hooks "
            f"see only the keys that hooks added: {', '.join(self) or 'nothing'}"
        )


class Saved:
    """The state of one adapted module."""

    def __init__(self, module: Any, view: TrainerView) -> None:
        self._module, self._view = module, view
        lightnings = base(type(module), "LightningModule")
        self._not_users = {*vars(lightnings())} if lightnings is not None else set()
        self._began: dict[str, Any] = {}

    def remember(self) -> None:
        """Store the attributes as the constructor and `setup` left them, to find later changes."""
        self._began = {place: copy.deepcopy(value) for place, value in self._attributes()}

    def fill(self, state: MutableMapping[str, Any], trainer: Trainer) -> None:
        """Put the module's state into `state`. All ranks."""
        added = Checkpoint(self._where(trainer))
        if trainer.settings.save_weights_only:  # then only what belongs to the weights
            self._call("on_save_checkpoint", added, callbacks=False)
            state["added"], state["where"] = self._without_where(added, trainer), self._where(trainer)
            return
        logs = self._view.logs
        state["attributes"] = {
            place: value
            for place, value in self._attributes()
            if place not in self._began or not _equal(value, self._began[place])
        }
        state["callbacks"] = {key: value for key, callback in self._callbacks() if (value := callback.state_dict())}
        if (datamodule := self._view.datamodule) is not None and overrides(datamodule, "state_dict"):
            state["datamodule"] = datamodule.state_dict()
        self._call("on_save_checkpoint", added)
        state["added"], state["where"] = self._without_where(added, trainer), self._where(trainer)
        if trainer.is_main:  # in Lightning, too, each rank has its own
            state["metrics"] = {name: float(value) for name, value in logs.callback_metrics.items()}
        state["epoch"] = {recorded: [name, list(options)] for recorded, (name, options) in logs.epoch.items()}

    def take(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        """Restore the state that `fill` stored. All ranks."""
        parts = dict(self._module.named_modules())
        for place, value in state["attributes"].items():
            path, _, name = place.rpartition(".")
            if path in parts:
                before = getattr(parts[path], name, None)
                if isinstance(before, _MAPPINGS[1:]):  # which a checkpoint holds as a dict
                    before.clear()
                    before.update(value)
                    continue
                if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
                    value = value.to(before.device)
                setattr(parts[path], name, value)
        for key, callback in self._callbacks():
            if key in state["callbacks"]:
                # A ModelCheckpoint takes its best score only if the folder is the same; a run has its checkpoints below it.
                here = {"dirpath": callback.dirpath} if hasattr(callback, "dirpath") else {}
                callback.load_state_dict(state["callbacks"][key] | here)
        if "datamodule" in state and self._view.datamodule is not None:
            self._view.datamodule.load_state_dict(state["datamodule"])
        self._call("on_load_checkpoint", Checkpoint({**self._where(trainer), **state["added"]}))
        self._view.logs.restore(state["metrics"], state["epoch"])

    def _where(self, trainer: Trainer) -> dict[str, Any]:
        return {"epoch": trainer.epoch, "global_step": trainer.step}

    def _without_where(self, added: Checkpoint, trainer: Trainer) -> dict[str, Any]:
        return {name: value for name, value in added.items() if name not in self._where(trainer)}

    def _call(self, hook: str, checkpoint: Checkpoint, *, callbacks: bool = True) -> None:
        for callback in self._view.callbacks if callbacks else ():
            if overrides(callback, hook):
                getattr(callback, hook)(self._view, self._module, checkpoint)
        for owner in (self._view.datamodule, self._module):
            if owner is not None and overrides(owner, hook):
                getattr(owner, hook)(checkpoint)

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        for callback in self._view.callbacks:
            if overrides(callback, "state_dict"):
                yield str(callback.state_key), callback

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """The attributes of the module and its submodules that a checkpoint can hold, with their paths, without graphs."""
        for path, part in self._module.named_modules():
            if type(part).__module__.partition(".")[0] in _LIBRARIES:
                continue
            for name, value in vars(part).items():
                if name not in self._not_users and _plain(value):
                    yield f"{path}.{name}", detached(value)


def give_added(module: Any, state: Mapping[str, Any]) -> None:
    """Let `module`, of which only the weights are loaded, take what hooks added to the checkpoint, as in Lightning; `state` is from
    `fill`. A module that gets nothing this way is not called."""
    if state["added"] and overrides(module, "on_load_checkpoint"):
        module.on_load_checkpoint(Checkpoint({**state.get("where", {}), **state["added"]}))


def _plain(value: Any) -> bool:
    """Whether a checkpoint can hold `value`."""
    if type(value) in _MAPPINGS:
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    if type(value) in _SEQUENCES:
        return all(map(_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor, np.ndarray)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def detached(output: Any) -> Any:
    """`output`, of a step or an attribute, with its tensors detached."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: detached(value) for key, value in output.items()}
    if type(output) in (list, tuple):
        return type(output)(map(detached, output))
    if type(output) is deque:
        return deque(map(detached, output), output.maxlen)
    return output
