"""Comparison of the ranks: weights that several ranks hold, and the options of all optimizers, must be equal.

If code changes a weight, a gradient or a learning rate on one rank only, the copies drift apart without an error from torch, and a
checkpoint would hold the weights of rank 0. Must not know: the loop, when something is saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash

from fabricate.data.flat_bytes import flat_bytes
from fabricate.errors import RankError, few
from fabricate.strategies.sharding import Part, is_sharded, is_wrapper
from fabricate.training.state.run_state import Run

_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_LOGS = 10
"""Ranks compare at every 10th log boundary, and more often at first."""


def compare_now_and_then(run: Run) -> None:
    """`compare`, at some of the log boundaries: the 1st, 2nd, 4th, 8th, 10th, 16th, 20th, ... All ranks."""
    logs = run.optim.logs = run.optim.logs + 1
    if logs % _MOST_LOGS == 0 or logs & (logs - 1) == 0:
        compare(run)


def compare(run: Run) -> None:
    """Raise `RankError`, on every rank, if copies of the same weights differ between ranks, or if the options of optimizers do. Between
    updates, all ranks; one message. Reads each weight once, and waits for the device."""
    if run.engine.world_size == 1:
        return
    weights = {} if run.engine.strategy.replicas_drift else _sums(run)
    places = _digest(list(weights))
    options = _options(run)
    mine = [places, _digest(list(weights.values())), _digest(options)]
    if run.engine.all_have(mine):
        run.optim.equal_at = run.progress.step
        return
    everyone = run.engine.gather_json(mine)
    if any(other[2] != mine[2] for other in everyone):
        _raise_options(run, options)
    if any(other[0] == place and other[1] != values for place, values, _ in everyone for other in everyone):
        _raise_weights(run, weights)
    run.optim.equal_at = run.progress.step


def digest_of(value: Any) -> str:
    """The digest of a value that a listener of `on_save` stores; equal for equal values. For a sharded tensor, only the shape counts."""
    if isinstance(value, Part):
        return digest_of(value.memory) if value.replicated else _digest((value.dtype, value.shape))
    if isinstance(value, set | frozenset):
        return _digest(sorted(map(repr, value)))
    if isinstance(value, Mapping):
        return _digest([(key, digest_of(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return _digest([digest_of(each) for each in value])
    if not isinstance(value, torch.Tensor):
        return _digest(value.tolist() if isinstance(value, np.ndarray) else value)
    plain = not is_sharded(value) and not is_wrapper(value) and value.layout is torch.strided
    return _digest((value.dtype, value.shape, int(bits(value.detach()).sum(dtype=torch.int64)) if plain else 0))


def note_states_apart(run: Run) -> None:
    """Note values that listeners of `on_save` stored and that differ between ranks, because a checkpoint keeps those of rank 0. All ranks;
    one message, none if no listener stores anything."""
    states = run.checkpoints.listener_states
    if not states or run.engine.all_have(states):
        return
    zero, *others = run.engine.gather_json(states)
    for rank, other in enumerate(others, 1):
        for name, values in other.items():  # a value that only rank 0 stores is meant for all ranks
            if apart := [key for key, value in values.items() if zero.get(name, {}).get(key) != value]:
                listener = "the module" if name == "module" else f"plugin {name!r}"
                run.journal.note(
                    f"on_save of {listener} stores another value of {few(apart)} on rank {rank} than on rank 0. A checkpoint keeps the "
                    "values of rank 0, and after a resume every rank has those. Where each rank needs its own, store "
                    "accelerator.gather(value[None]), and take the row of the rank in on_load"
                )
                return


def _sums(run: Run) -> dict[tuple[str, int], int]:
    """The sum of the bits of each weight that another rank also holds, by name and offset; equal for equal values."""
    held = list(_held(run))
    if not held:
        return {}
    with torch.no_grad():
        sums = torch.stack([bits(values).sum(dtype=torch.int64) for *_, values in held]).tolist()
    return {(name, start): value for (name, start, _), value in zip(held, sums, strict=True)}


def _held(run: Run) -> Iterator[tuple[str, int, torch.Tensor]]:
    for name, parameter in run.module.named_parameters():
        # quantised weights are compared before the fit, and at each save with their earlier value
        if is_wrapper(parameter):
            continue
        part = run.engine.strategy.local_part(parameter)
        if not is_sharded(parameter) and parameter.shape == part.shape:
            yield name, 0, parameter.detach()  # whole on every rank; under ZeRO, not the float32 master copy
        elif part.copies > 1 and part.count:
            yield name, part.start, part.memory


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` as a flat tensor of integers of the same size. Their sum almost certainly differs for different values."""
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    return flat_bytes(tensor).view(_OF_SIZE[size])


def _options(run: Run) -> dict[str, Any]:
    """The options of every group of every optimizer, by a readable name."""
    options: dict[str, Any] = {}
    for label, optimizer in run.optim.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if isinstance(value, torch.Tensor):
                    value = value.tolist()
                if option not in ("params", "param_names") and isinstance(
                    value, int | float | str | tuple | list | None
                ):
                    options[f"{option} of group {number} of optimizer {label!r}"] = value
    return options


def _digest(values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(values).encode())


def _since(run: Run) -> str:
    step, equal = run.progress.step, run.optim.equal_at
    return f"at step {step}" + (f"; at step {equal} they were equal" if 0 <= equal < step else "")


_REMEDY = (
    "A hook, a step or a schedule changes them on some ranks only, or with different values: change weights, gradients and "
    "optimizer options in the same way on every rank"
)


def _raise_options(run: Run, mine: dict[str, Any]) -> NoReturn:
    zero, *others = run.engine.gather_json({name: repr(value) for name, value in mine.items()})
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != zero)
    apart = [name for name in (*zero, *other) if zero.get(name) != other.get(name)]
    raise RankError(
        f"ranks train with different optimizers {_since(run)}: {apart[0]} is {zero.get(apart[0])} on rank 0 and {other.get(apart[0])} "
        f"on rank {rank}. {_REMEDY}"
    )


def _raise_weights(run: Run, mine: dict[tuple[str, int], int]) -> NoReturn:
    everyone = run.engine.gather_json([[name, start, value] for (name, start), value in mine.items()])
    by_rank: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(everyone):
        for name, start, value in sums:
            by_rank[name, start][value].append(rank)
    apart = {name: list(ranks.values()) for (name, _), ranks in by_rank.items() if len(ranks) > 1}
    groups = " and ".join(f"ranks {ranks}" for ranks in next(iter(apart.values())))
    raise RankError(
        f"ranks that train the same model hold different weights {_since(run)}: {few(list(apart))} ({groups} differ). {_REMEDY}. "
        "This step is not saved; earlier checkpoints are intact. A layer that sets its weights from its first batch has to see that "
        "batch before fit"
    )
