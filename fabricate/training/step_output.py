"""What `training_step` returned: read, weighed, checked against what it returned before and on other ranks.

Must not know: in which order things happen (fabricate.training.loop).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fabricate.data.batches import token_labels
from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.metrics.loss_weight import last_operation
from fabricate.training.run_state import Run


def unpack(output: Any) -> tuple[Any, Any, str | None]:
    """The loss, the weight or None, the name of the optimizer or None."""
    if isinstance(output, torch.Tensor):  # before the test below, which is slow
        return output, None, None
    if isinstance(output, Mapping):
        known = {"loss", "weight", "optimizer"}
        unknown = sorted(set(output) - known)
        if "loss" not in output or unknown:
            raise ConfigurationError(
                f"training_step returned a mapping with the keys {sorted(output)}; it has to hold 'loss' and may hold 'weight' and "
                f"'optimizer'{did_you_mean(unknown[0], known) if unknown else ''}; record other values with self.log(name, value)"
            )
        weight = output.get("weight")
        return output["loss"], weight.detach() if isinstance(weight, torch.Tensor) else weight, output.get("optimizer")
    return output, None, None


def check_loss(run: Run, loss: Any) -> None:
    where = f"{type(run.module).__name__}.training_step returned"
    if loss is None:
        raise ConfigurationError(f"{where} nothing; return the loss")
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            f"{where} {type(loss).__name__}; return the loss as a 0-dim tensor, or a mapping with 'loss'"
        )
    if loss.ndim:
        raise ConfigurationError(
            f"{where} a tensor of shape {tuple(loss.shape)}; reduce it to one number, for instance with .mean()"
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            f"{where} a loss without gradient; compute it from the module's parameters, without detach() or no_grad()"
        )


def check_logged(run: Run, loss: torch.Tensor) -> None:
    """A "loss" that training_step logs is left out of the metrics, so it has to be the one that it returns."""
    for name, value, *_ in run.module._logged:
        if name == "loss" and (not isinstance(value, torch.Tensor | int | float) or not _same(float(value), loss)):
            raise ConfigurationError(
                f"{type(run.module).__name__}.training_step logs another 'loss' than it returns ({value} and {loss.item()}); the "
                "returned one is recorded under this name: give the other one another"
            )


def _same(value: float, loss: torch.Tensor) -> bool:
    return math.isclose(value, loss.item(), rel_tol=1e-6) or value != value


def check_window(run: Run, how: str, name: str, made_by: str) -> None:
    """Once per optimizer, after its first window: every rank weighs its loss the same way and updates the same optimizer."""
    if run.engine.world_size > 1:
        answers = run.engine.gather_json([how, name])
        if any(a != answers[0] for a in answers):
            raise ConfigurationError(
                f"training_step differs between ranks (where the loss's weight comes from, optimizer): {answers}; return the same keys "
                "on every rank"
            )
    trainable = [(n, p) for n, p in run.module.named_parameters() if p.requires_grad]
    unused = [n for n, p in trainable if p.grad is None]
    # If none has a gradient, the strategy's engine keeps them elsewhere.
    if 0 < len(unused) < len(trainable) and len(run.optim.optimizers) == 1:
        run.journal.event("unused_parameters", names=unused[:20])
    run.journal.event("loss_weight", optimizer=name, source=how)
    shape = token_labels(run.now.batch)
    if how == "rows" and shape is not None:
        run.journal.note(
            f"labels have the shape {shape} and the loss is no plain cross-entropy (it comes from {made_by}), so it weighs "
            "the rows of its batch. Where rows have unequal numbers of labels, return {'loss': loss, 'weight': what its mean was "
            "taken over} from training_step"
        )


def changed_weight(known: str, how: str, loss: torch.Tensor) -> ConfigurationError:
    said = {
        "given": "with a weight",
        "counted": "as a plain cross-entropy, which weighs the labels that it counts",
        "rows": f"without a weight and as no plain cross-entropy (it comes from {last_operation(loss)})",
    }
    return ConfigurationError(
        f"training_step returned its loss {said[how]}, and before {said[known]}; one unit has to hold throughout: return "
        "{'loss': loss, 'weight': what its mean was taken over} every time"
    )


def choose(run: Run, name: str | None, chosen: str | None, micro_step: int) -> str:
    known = list(run.optim.optimizers)
    if chosen is None:
        raise ConfigurationError(
            f"there are several optimizers ({', '.join(known)}); training_step has to return {{'loss': ..., 'optimizer': name}}"
        )
    if chosen not in run.optim.optimizers:
        raise ConfigurationError(
            f"training_step returned optimizer={chosen!r}{did_you_mean(chosen, known)}; there are {', '.join(known)}"
        )
    if micro_step and name is not None and chosen != name:
        raise ConfigurationError(
            f"training_step returned optimizer={chosen!r} in a window that began with {name!r}; one window is one update: "
            "choose by self.trainer.step, not by batch_idx"
        )
    return chosen
