"""The training of one case: by Lightning and by fabricate from the same weights and data, with its own data, and killed and resumed."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import fabricate_lightning
import lightning
import torch

from campaigns.lightning import fakes
from campaigns.lightning.cases import Setup
from fabricate import FabricateError

_QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}


def _arguments(setup: Setup, **more: Any) -> dict[str, Any]:
    """The arguments of a Trainer; those that are functions are called, so that each Trainer has new objects."""
    arguments = {"logger": False, "enable_checkpointing": False, **setup.arguments, **more}
    return {name: value() if inspect.isfunction(value) else value for name, value in arguments.items()}


def _package(module: Any) -> Any:
    """The package of Lightning from which the module's class inherits."""
    import pytorch_lightning

    return pytorch_lightning if isinstance(module, pytorch_lightning.LightningModule) else lightning.pytorch


def _listener(module: Any, losses: list[float]) -> Any:
    """A callback that adds to `losses` the loss of each training step; for a module with manual optimization, the values that it logged."""

    class Listener(_package(module).Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else outputs
            if isinstance(loss, torch.Tensor):
                losses.append(float(loss))
            else:
                losses.extend(float(trainer.callback_metrics[name]) for name in sorted(trainer.callback_metrics))

    return Listener()


def _run(
    kind: str, setup: Setup, module: Any, data: dict[str, Any], losses: list[float]
) -> tuple[dict[str, float], list[Any], int]:
    """Fit `module` and run the other stages. Returns the metrics at the end of the fit, the results of the other stages, and the steps."""
    listener = _listener(module, losses)
    arguments = _arguments(setup)
    arguments["callbacks"] = [*arguments.get("callbacks", []), listener]
    if kind == "lightning":
        trainer = _package(module).Trainer(accelerator="cpu", **_QUIET, **arguments)
    else:
        trainer = fabricate_lightning.Trainer(enable_progress_bar=False, **arguments)
    fakes.seed(2)
    trainer.fit(module, **data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    later, steps = list[Any](), int(trainer.global_step)
    loaders = data.get("val_dataloaders")
    for stage in setup.stages:
        data_arguments = {"datamodule": data["datamodule"]} if "datamodule" in data else {"dataloaders": loaders}
        options = {} if stage == "predict" else {"verbose": False}
        later.append(getattr(trainer, stage)(module, **data_arguments, **options))
    return metrics, later, steps


def compare(setup: Setup) -> dict[str, Any]:
    """The largest differences between Lightning and fabricate: of losses, of weights (relative to each tensor's largest value) and of
    metrics."""
    if setup.data is None:
        return {}
    ends = []
    for kind in ("lightning", "fabricate"):
        module, losses = setup.make(), list[float]()
        metrics, later, steps = _run(kind, setup, module, setup.data(), losses)
        weights = {name: value.detach().double().clone() for name, value in module.state_dict().items()}
        ends.append((losses, weights, metrics, later))
    (theirs, weights, metrics, later), (ours, our_weights, our_metrics, our_later) = ends
    assert weights.keys() == our_weights.keys()
    assert len(theirs) == len(ours), (len(theirs), len(ours))
    scale = {name: max(float(value.abs().max()), 1e-12) if value.numel() else 1.0 for name, value in weights.items()}
    missing = sorted(metrics.keys() ^ our_metrics.keys())
    return {
        "losses": max((_apart(a, b) / max(abs(a), 1e-12) for a, b in zip(theirs, ours, strict=True)), default=0.0),
        "weights": max(_apart(v, our_weights[n]) / scale[n] for n, v in weights.items()),
        "metrics": _apart([metrics, later], [our_metrics, our_later]),
        "steps": steps,
        "missing": missing,
    }


def _apart(one: Any, other: Any) -> float:
    """The largest difference of numbers in two collections of one shape; infinite if only one of two is NaN."""
    if isinstance(one, dict):
        return max((_apart(one[key], other[key]) for key in one if key in other), default=0.0)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        return max((_apart(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if not isinstance(one, int | float | torch.Tensor):
        return 0.0
    left, right = (torch.as_tensor(value).double() for value in (one, other))
    gaps = torch.where(left.isnan() & right.isnan(), 0.0, (left - right).abs()).nan_to_num(nan=torch.inf)
    return float(gaps.max()) if gaps.numel() else 0.0


def as_it_is(setup: Setup) -> int:
    """The steps of a fit with the data of the code's own script, under fabricate alone."""
    if setup.own_data is None:
        return 0
    module = setup.make()
    trainer = fabricate_lightning.Trainer(enable_progress_bar=False, **_arguments(setup, **setup.own_arguments))
    fakes.seed(2)
    trainer.fit(module, **setup.own_data())
    return int(trainer.global_step)


# ----------------------------------------------------------------------------------------------- killed and resumed


def part(setup: Setup, kind: str, phase: str, folder: Path, kill_at: int) -> None:
    """Run one process of a fit that saves every second update. phase: "whole"; "killed", which ends by SIGKILL after the update `kill_at`;
    or "resumed" from its last checkpoint. The final weights are saved."""
    module = setup.make()
    package = _package(module)
    run = folder / ("killed" if phase != "whole" else "whole")
    saves = package.callbacks.ModelCheckpoint(run, every_n_train_steps=2, save_top_k=-1, save_last=True)
    arguments = _arguments(setup, callbacks=list, logger=False, enable_checkpointing=True)
    arguments["callbacks"] = [saves, *([_killer(package, kill_at)] if phase == "killed" else [])]
    fakes.seed(2)
    assert setup.own_data is not None
    data = setup.own_data()
    if kind == "lightning":
        trainer = package.Trainer(accelerator="cpu", **_QUIET, **arguments)
        # Lightning writes the checkpoint of an update in a hook after the one that kills.
        path = str(max(run.glob("*step=*.ckpt"), key=_step)) if phase == "resumed" else None
        trainer.fit(module, **data, ckpt_path=path, weights_only=False)
    else:
        trainer = fabricate_lightning.Trainer(enable_progress_bar=False, **arguments)
        trainer.fit(module, **data, ckpt_path="last")
    torch.save({name: value.detach().clone() for name, value in module.state_dict().items()}, folder / f"{phase}.pt")


def _step(path: Path) -> int:
    return int(path.stem.rpartition("step=")[2].partition("-")[0])


def _killer(package: Any, kill_at: int) -> Any:
    class Kills(package.Callback):  # type: ignore[misc, name-defined]
        batches = 0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.batches += 1
            if self.batches > kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    return Kills()


def outcome(folder: Path) -> dict[str, Any]:
    """The distance of the weights of a resumed fit from those of one that never stopped."""
    whole, resumed = (torch.load(folder / f"{phase}.pt", weights_only=True) for phase in ("whole", "resumed"))
    differ = [name for name, value in whole.items() if not torch.equal(value, resumed[name])]
    scale = {name: max(float(whole[name].double().abs().max()), 1e-12) for name in differ}
    apart = max((float((whole[n].double() - resumed[n].double()).abs().max()) / scale[n] for n in differ), default=0.0)
    return {"tensors": len(whole), "differ": len(differ), "apart": apart}


def reason(exc: BaseException) -> str:
    """The reason why a case did not run, in one line."""
    return (
        f"{type(exc).__name__}: {str(exc).splitlines()[0]}"
        if not isinstance(exc, FabricateError)
        else str(exc).splitlines()[0]
    )
