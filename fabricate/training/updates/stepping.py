"""The optimizers that step in an update: the names that `training_step` may return, and the optimizers of each name.

Must not know: the loop, how losses are weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.optim.together import stepping
from fabricate.training.state.run_state import Run


def prepare_updates(run: Run) -> None:
    """Fill `Optimization.updates`: the optimizers of each name, and of all names if training_step need not return one."""
    optim = run.optim
    optim.updates = {}
    for name in optim.named:
        join(run, [name])
    names = list(optim.named)
    if optim.default is not None or not _shared(run, names):
        optim.default = join(run, names)


def join(run: Run, names: Sequence[str]) -> str:
    """The key in `updates` for an update of all optimizers of `names`. `ConfigurationError` if two of them hold the same parameter."""
    optim, labels = run.optim, _labels(run, names)
    if shared := _shared(run, names):
        holders, parameter = shared
        raise ConfigurationError(
            f"the optimizers {' and '.join(holders)} step in the same update and both hold {parameter}; give each parameter to one of them"
        )
    key = ", ".join(names)
    schedules = [optim.schedules[label] for label in labels if label in optim.schedules]
    optim.updates[key] = stepping(run.module, [optim.optimizers[label] for label in labels], schedules)
    return key


def _labels(run: Run, names: Sequence[str]) -> list[str]:
    return [label for name in names for label in run.optim.named[name]]


def _shared(run: Run, names: Sequence[str]) -> tuple[list[str], str] | None:
    """Two optimizers that hold the same parameter, and its name; None if there are none."""
    holders: dict[torch.nn.Parameter, str] = {}
    for label in _labels(run, names):
        for parameter in (p for group in run.optim.optimizers[label].param_groups for p in group["params"]):
            if holders.setdefault(parameter, label) != label:
                name = next(n for n, p in run.module.named_parameters() if p is parameter)
                return [holders[parameter], label], name
    return None


def choose(run: Run, name: str | None, chosen: Any, micro_step: int) -> str:
    """The key in `updates` of the update for which `training_step` returned a loss with `chosen` under "optimizer": a name, a list of names
    or None. `name`: the key of the window so far, which has to be the same."""
    named = list(run.optim.named)
    if chosen is None:
        holders, parameter = _shared(run, named) or ([], "")
        raise ConfigurationError(
            f"the optimizers are {', '.join(named)}, and {' and '.join(holders)} both hold {parameter}, so they cannot step together: "
            "return {'loss': ..., 'optimizer': name} from training_step"
        )
    names = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(names, list | tuple) or not names:
        raise ConfigurationError(f"training_step returned optimizer={chosen!r}; give a name or a list of names")
    for each in names:
        if each not in run.optim.named:
            raise ConfigurationError(
                f"training_step returned optimizer={chosen!r}{did_you_mean(str(each), named)}; there are {', '.join(named)}"
            )
    key = ", ".join(names)
    if run.optim.turns and key != name:
        raise ConfigurationError(
            f"training_step returned optimizer={chosen!r} when it was called for {name!r}. Do not return 'optimizer': because "
            "training_step takes the argument optimizer, each optimizer has its turn on every batch"
        )
    if micro_step and name is not None and key != name:
        raise ConfigurationError(
            f"training_step returned optimizer={chosen!r}, but earlier micro-batches of this update have optimizer={name!r}; all "
            "micro-batches of an update need the same optimizer: choose by self.trainer.step, not by batch_idx"
        )
    return key if key in run.optim.updates else join(run, names)
