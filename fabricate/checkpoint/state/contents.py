"""What a checkpoint of a run holds. Called on every rank; nothing is written here.

Owns: which tensors and values belong to the state of a run, and under which heading. Must not know: files, commits, when
to save (fabricate.training.saving).
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fabricate.checkpoint.format.directory import Chunk, TensorRecord
from fabricate.checkpoint.state.logical import Saver, digest, named_tensors, optimizer_groups, transient_names
from fabricate.data.opening import fingerprint
from fabricate.metrics.reduction import torchmetrics_state
from fabricate.model.building import pretrained_record
from fabricate.module import recorded
from fabricate.seeding import rng_state

if TYPE_CHECKING:
    from fabricate.strategies.base import Strategy
    from fabricate.training.run_state import Run


@dataclass
class Content:
    """One checkpoint, as far as this rank contributes to it.

    chunks: its parts of tensors, read when they are written. shared: state.json, used on rank 0. own: rank-00000.json.
    tensors: every logical tensor that this rank knows of, whoever writes it: what has to be there. manifest: the other
    fields of the manifest. exchanged: the parts that ranks have to exchange before chunks are read.
    """

    chunks: list[Chunk]
    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: dict[str, TensorRecord]
    manifest: dict[str, Any]
    exchanged: list[Strategy.Part]

    def exchange(self) -> None:
        """Bring together what ranks hold by columns. All ranks, once all of them have assembled theirs."""
        for part in self.exchanged:
            part.values  # noqa: B018  the exchange
        self.exchanged = []  # what chunks do not need any more may go


def assemble(run: Run, buffers: dict[str, torch.Tensor]) -> Content:
    """The state of `run` between two updates; `buffers` are from `own_buffers`. All ranks, no collectives: it may fail on
    one of them, for a listener's sake."""
    saver = Saver(run.engine.strategy, run.engine.rank, run.engine.world_size)
    aliases = saver.model(run.module, without=run.frozen_digests)
    shared = _shared_state(run, saver)
    own = _own_state(run, saver, buffers)
    manifest = {
        "step": run.progress.step,
        "run_id": run.run_id,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "aliases": aliases,
        "topology": run.engine.topology(),
        "versions": _versions(),
        "progress": run.progress.state(),
        "metrics": {n: v for n, v in run.latest.items() if math.isfinite(v)},
    }
    return Content(saver.chunks, shared, own, saver.tensors, manifest, saver.exchanged)


@functools.cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "numpy")}


def own_buffers(run: Run) -> dict[str, torch.Tensor]:
    """This rank's buffers that are not as rank 0's, whose values the checkpoint holds as the module's: running statistics, say.
    All ranks, one message."""
    if run.engine.world_size == 1:
        return {}
    buffers = named_tensors(run.module)[1]
    mine = {name: digest(buffer) for name, buffer in buffers.items()}
    first = run.engine.broadcast_json(mine)
    return {name: buffer for name, buffer in buffers.items() if mine[name] != first[name]}


def _shared_state(run: Run, saver: Saver) -> dict[str, Any]:
    """What is one value for all ranks. Called on every rank: sharded tensors inside are contributed by each."""
    assert run.source is not None
    groups = optimizer_groups(run.module, run.optimizers, saver.strategy)
    held, lost = recorded(run.module)
    metrics_file = run.run_dir / "metrics.jsonl" if run.run_dir is not None else None
    plugins = {}
    for name, call in run.calls.listeners("on_save"):
        state: dict[str, Any] = {}
        call(trainer=run.trainer, module=run.module, state=state)
        plugins[name] = saver.encode(state, f"plugin/{name}", saver.whole)
    return {
        "module": {
            "class": f"{type(run.module).__module__}.{type(run.module).__qualname__}",
            "arguments": held,
            "unrecorded": lost,
            "transient": sorted(transient_names(run.module)),
            "frozen": run.frozen_digests,
            "pretrained": saver.encode(pretrained_record(run.module), "module.pretrained", saver.whole),
        },
        "optimizers": {label: saver.optimizer(label, o, groups[label]) for label, o in run.optimizers.items()},
        "schedulers": {
            label: {"kind": s.kind, "state": saver.encode(s.state_dict(), f"scheduler/{label}", saver.whole)}
            for label, s in run.schedulers.items()
        },
        "scaler": run.engine.scaler_state(),
        "seed": run.seed,
        "data": data_identity(run) | {"state": saver.encode(run.source.state, "data", saver.whole)},
        "progress": run.progress.state(),
        "latest": saver.encode(run.latest, "latest", saver.whole),
        "plugins": plugins,
        "metrics_bytes": metrics_file.stat().st_size if metrics_file is not None and metrics_file.exists() else 0,
    }


def _own_state(run: Run, saver: Saver, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    rank = f"rank/{run.engine.rank:05d}"
    for name, buffer in buffers.items():
        saver.own(f"{rank}/buffers/{name}", buffer)
    return {
        "rng": saver.encode(rng_state(), f"{rank}/rng", saver.own),
        "metrics": saver.encode(run.metrics.state(), f"{rank}/metrics", saver.own),
        "buffers": sorted(buffers),
        "torchmetrics": saver.encode(torchmetrics_state(run.module), f"{rank}/torchmetrics", saver.own),
    }


def data_identity(run: Run) -> dict[str, Any]:
    assert run.source is not None
    return {
        "num_samples": run.source.num_samples,
        "global_batch_size": run.source.global_batch,
        "kind": run.source.kind,
        "shuffle": run.source.shuffle,
        "fingerprint": fingerprint(run.source.data),
    }
