"""The data of a fit or an evaluation: from the caller, a LightningDataModule or the module, prepared as in Lightning.

Must not know: how fabricate reads loaders.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler

from fabricate import ConfigurationError
from fabricate_lightning.kinds import is_a, overrides

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


def is_datamodule(value: object) -> bool:
    """Whether `value` is a LightningDataModule, or an object with the same methods."""
    return is_a(value, "LightningDataModule") or callable(getattr(value, "train_dataloader", None))


def prepare(owners: Sequence[Any]) -> None:
    """Call `prepare_data` of `owners` on one process of each host, while the others wait. All ranks."""
    given = [owner for owner in owners if overrides(owner, "prepare_data")]
    if not given:
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # Without the variable the processes are not connected yet (srun), so each calls it.
        _call(given)
        return
    state = processes()
    if state.is_local_main_process:
        _call(given)
    state.wait_for_everyone()


def processes() -> Any:
    """Accelerate's `PartialState`, which connects the ranks before a fit, and which the fit adopts. All ranks."""
    from accelerate import PartialState

    return PartialState(cpu=not torch.accelerator.is_available())


def _call(owners: Sequence[Any]) -> None:
    for owner in owners:
        owner.prepare_data()


def training(owner: Any, given: Any) -> Any:
    """The training loader: `given`, else the loader of `owner`; None if there is none."""
    loader = given if given is not None else _of(owner, "train_dataloader")
    return loader[0] if isinstance(loader, list | tuple) and len(loader) == 1 and _is_loader(loader[0]) else loader


def evaluation(owner: Any, stage: str, given: Any) -> Any:
    """The loader of an evaluation, or a mapping of several by Lightning's names; None where there is none."""
    loaders = given if given is not None else _of(owner, _LOADERS[stage])
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    if not isinstance(several, list | tuple) or not all(map(_is_loader, several)):
        return loaders
    if not several:
        return None
    return several[0] if len(several) == 1 else {f"dataloader_idx_{n}": loader for n, loader in enumerate(several)}


def _of(owner: Any, method: str) -> Any:
    return getattr(owner, method)() if owner is not None and overrides(owner, method) else None


def _is_loader(value: object) -> bool:
    """Whether `value` is a loader, not a batch or a collection of loaders."""
    return isinstance(value, Iterable) and not isinstance(value, torch.Tensor | list | tuple | Mapping | str)


def num_batches(loader: Any, world_size: int, limit: float | None, *, training: bool = False) -> float:
    """The number of batches that a rank reads in a pass over `loader`; infinite if not known. An evaluation ignores `drop_last`: it
    reads every row."""
    try:
        number: float = len(loader)
    except TypeError:
        number = math.inf
    share = limit if isinstance(limit, float) else 1.0  # of the rows, or of the batches of the user's own sampler
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is BatchSampler and number < math.inf:
        rows, size = _part(len(sampler.sampler), share), sampler.batch_size * world_size  # type: ignore[arg-type]
        number = rows // size if sampler.drop_last and training else -(-rows // size)
    elif number < math.inf:
        number = -(-_part(int(number), share) // world_size)
    return min(number, limit) if isinstance(limit, int) else number


def _part(number: int, share: float) -> int:
    """`share` of `number`, at least 1, as fabricate computes a limit."""
    return max(min(number, 1), int(number * share + 1e-9))


def rows_of(batch: Any) -> int:
    """The rows of a batch as Lightning counts them: the first dimension of the first tensor in it."""
    rows = _rows(batch)
    if rows is None:
        raise ConfigurationError(
            f"the number of rows in a batch of type {type(batch).__name__} is not known; give it: self.log(..., batch_size=...)"
        )
    return rows


def rows_or_one(batch: Any) -> int:
    """Like `rows_of`; 1 for a batch without a tensor."""
    return _rows(batch) or 1


def _rows(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, str):
        return len(batch)
    parts: Any = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Iterable):
        return next((rows for part in parts if (rows := _rows(part)) is not None), None)
    return (
        next((rows for part in vars(batch).values() if (rows := _rows(part)) is not None), None)
        if _plain(batch)
        else None
    )


def _plain(batch: object) -> bool:
    return hasattr(type(batch), "__dataclass_fields__")


def transfers(owner: Any) -> bool:
    """Whether a data module or a module has hooks for the transfer of batches to the device."""
    return owner is not None and any(overrides(owner, hook) for hook in TRANSFER)


def transferred(owners: Sequence[Any], batch: Any, device: torch.device, number: int) -> Any:
    """`batch` after the transfer hooks: of each that of the first of `owners` that has one. number: of the data set in an evaluation."""
    before, transfer, after = (
        next((getattr(owner, hook) for owner in owners if overrides(owner, hook)), None) for hook in TRANSFER
    )
    if before is not None:
        batch = before(batch, number)
    batch = send_to_device(batch, device) if transfer is None else transfer(batch, device, number)
    return batch if after is None else after(batch, number)
