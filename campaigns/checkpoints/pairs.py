"""Every checkpoint under every strategy: written by one topology, and read by another, which continues as if it had written it.

For each pair of topologies (a strategy and a number of ranks), the reader saves its state again after loading, and the result has to equal
the checkpoint bit for bit. Then it continues to train, and its losses and the order of its samples have to be those of one process that
never stopped. The module has tied weights, a frozen layer, a buffer, sizes that no number of ranks divides, two parameter groups and a
schedule; the checkpoint is saved in the middle of an epoch.

    python -m campaigns.checkpoints pairs
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.state.logical import read_whole
from fabricate.testing import run_ranks

ROWS, GLOBAL_BATCH, STEPS, SAVED = 30, 12, 8, 4  # three updates per epoch, the last of six rows
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Topology:
    """A strategy with a number of ranks."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy} x{self.ranks}"


SINGLE = Topology("single", 1)
SHARDED = ("fsdp", "zero1", "zero2", "zero3")
TOPOLOGIES = (SINGLE, *(Topology(name, ranks) for name in ("ddp", *SHARDED) for ranks in (2, 3)))


@dataclass(frozen=True)
class Case:
    """The training, the strategies without it, and the tolerance of losses: in narrow dtypes, strategies round at different places."""

    optimizer: str = "adamw"
    precision: str = "fp32"
    tolerance: float = TOLERANCE
    without: tuple[str, ...] = ()

    def topologies(self) -> list[Topology]:
        """The topologies that accept the optimizer."""
        return [each for each in TOPOLOGIES if each.strategy not in self.without]


_WHOLE_TENSORS = ("zero1", "zero2", "zero3")  # refuse optimizers that are not elementwise
CASES = {
    "adamw": Case(),
    "momentum": Case("momentum"),
    "lion": Case("lion", without=_WHOLE_TENSORS),
    # torch's does not accept sharded parameters either
    "adafactor": Case("adafactor", without=("fsdp", *_WHOLE_TENSORS)),
    "bf16": Case(precision="bf16", tolerance=0.02),
    "fp16": Case(
        precision="fp16:init_scale=256", tolerance=0.02
    ),  # a scale at which no update is skipped, because the skipped updates depend on the ranks
}


class Rows(Dataset[Any]):
    """Rows that begin with their number."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 12, (ROWS, 5), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        return row, self.tokens[row]


class Net(TrainModule):
    """The module that the docstring above describes. It records the rows of each micro-batch."""

    scale: torch.Tensor

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.embedding = torch.nn.Embedding(12, 7)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(7, 9), torch.nn.Linear(9, 7)])
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.norm = torch.nn.LayerNorm(7)
        self.head = torch.nn.Linear(7, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(7))
        self.rows: list[list[int]] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        tokens = batch[1]
        hidden = self.frozen(self.embedding(tokens)) * self.scale
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        logits = self.head(self.norm(hidden))
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def on_accumulate(self, batch: Any, weight: Any) -> None:
        self.rows.append(batch[0].tolist() if weight else [])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-6)
        elif self.optimizer == "momentum":
            optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        elif self.optimizer == "lion":
            from optimi import Lion

            optimizer = Lion(groups, lr=0.001)
        else:
            optimizer = torch.optim.Adafactor(groups, lr=0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class Watch(Callback):
    """Records every update's loss and the end of its rows; saves the loaded state again before the first update."""

    def __init__(self, again: Path | None) -> None:
        self.again = again
        self.losses: list[float] = []
        self.ends: list[int] = []

    def on_epoch_start(self, trainer: Trainer) -> None:
        if self.again is not None:
            trainer.save(self.again)
            self.again = None

    def on_step(self, module: TrainModule, loss: torch.Tensor) -> None:
        assert isinstance(module, Net)
        self.losses.append(float(loss))
        self.ends.append(len(module.rows))


LossesAndRows = tuple[list[float], list[list[list[int]]]]
"""The losses, and the rows by update and micro-batch."""


def fit(topology: Topology, case: Case, run_dir: Path, steps: int, resume: Path | None = None) -> LossesAndRows:
    """Run a fit, or the rest of one, on this rank."""
    torch.manual_seed(7)
    module = Net(case.optimizer)
    watch = Watch(None if resume is None else run_dir / "again")
    trainer = Trainer(
        strategy=topology.strategy, precision=case.precision, max_steps=steps, save_every=f"{SAVED} steps", keep="all",
        run_dir=run_dir, seed=5, global_batch_size=GLOBAL_BATCH, log_every=100, progress=False, plugins=[watch],
    )  # fmt: skip
    trainer.fit(module, Rows(), batch_size=2, resume=resume or "auto")
    return watch.losses, [module.rows[start:end] for start, end in zip([0, *watch.ends], watch.ends, strict=False)]


def write(topology: Topology, case: Case, root: str) -> LossesAndRows:
    """Run the whole fit of a topology. All its ranks."""
    return fit(topology, case, Path(root, str(topology)), STEPS)


def read(topology: Topology, case: Case, root: str, writers: Sequence[Topology]) -> list[LossesAndRows]:
    """Run the second half of fits that `writers` began. All ranks of the topology."""
    fits = []
    for writer in writers:
        saved = Path(root, str(writer), "checkpoints", f"step-{SAVED:08d}")
        fits.append(fit(topology, case, Path(root, f"{writer} to {topology}"), STEPS, resume=saved))
    return fits


def order(ranks: Iterable[LossesAndRows]) -> list[list[int]]:
    """The rows of each update in their global order: in each micro-batch, those of rank 0 first."""
    updates = zip(*(rows for _, rows in ranks), strict=True)
    return [[row for step in zip(*update, strict=True) for rows in step for row in rows] for update in updates]


def state(path: Path) -> dict[str, Any]:
    """The model and the optimizers of a checkpoint, tensor by tensor and value by value."""
    with Reader(path) as reader:
        names = [name for name in reader.manifest.tensors if name.startswith(("model/", "optimizer/"))]
        values: dict[str, Any] = {name: read_whole(reader, name) for name in names}
        shared = reader.json("state.json")
        assert isinstance(shared, dict)
        shared["progress"].pop("seconds")
        for counter in ("clean", "hysteresis"):  # only DeepSpeed's loss scale has these counters
            (shared["scaler"] or {}).pop(counter, None)
        return values | {name: shared[name] for name in ("optimizers", "schedulers", "scaler", "progress")}


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same bit for bit. Different dtypes are compared in the narrower one: under ZeRO in half precision frozen
    weights have it, because DeepSpeed keeps float32 copies of trained weights only."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return bool(one == other)
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(one.to(narrow), other.to(narrow))


@dataclass(frozen=True)
class Result:
    """The result of a pair: the largest relative difference of a loss, and the faults."""

    case: str
    writer: Topology
    reader: Topology
    apart: float
    faults: tuple[str, ...]


def observe(name: str, pairs: Iterable[tuple[Topology, Topology]]) -> Iterator[Result]:
    """The results of the pairs (writer, reader), reader by reader."""
    case, wanted = CASES[name], list(pairs)
    with tempfile.TemporaryDirectory() as root:
        for topology in dict.fromkeys((SINGLE, *(writer for writer, _ in wanted))):
            answers = run_ranks(write, topology.ranks, topology, case, root, timeout=600)
            if topology == SINGLE:
                losses, rows = answers[0][0], order(answers)
        for reader in dict.fromkeys(reader for _, reader in wanted):
            writers = [writer for writer, other in wanted if other == reader]
            by_rank = run_ranks(read, reader.ranks, reader, case, root, writers, timeout=600)
            for number, writer in enumerate(writers):
                results = [rank[number] for rank in by_rank]
                apart = max(abs(a - b) / abs(b) for a, b in zip(results[0][0], losses[SAVED:], strict=True))
                faults = []
                if apart > case.tolerance:
                    faults.append(f"its losses lie {apart:.1e} apart")
                if order(results) != rows[SAVED:]:
                    faults.append("its samples came in another order")
                saved = state(Path(root, str(writer), "checkpoints", f"step-{SAVED:08d}"))
                again = state(Path(root, f"{writer} to {reader}", "again"))
                other = [key for key in sorted({*saved, *again}) if not equal(saved.get(key), again.get(key))]
                if other:
                    faults.append(f"after loading it held other {', '.join(other[:4])}")
                yield Result(name, writer, reader, apart, tuple(faults))


def pairs(name: str, long: bool) -> list[tuple[Topology, Topology]]:
    """The pairs of a case. Long form: all pairs with AdamW in float32, otherwise a ring, in which each topology writes once and reads once.
    Short form: a ring with AdamW in float32, otherwise a ring of five."""
    every = CASES[name].topologies()
    if long and name == "adamw":
        return [(writer, reader) for writer in every for reader in every]
    if not long and name != "adamw":
        few = {"single x1", "ddp x2", "fsdp x3", "zero1 x2", "zero3 x3"}
        every = [topology for topology in every if str(topology) in few]
    return list(zip(every, [*every[1:], every[0]], strict=True))


def run(long: bool) -> dict[str, dict[str, dict[str, float]]]:
    """The largest difference of a loss, by case, writer and reader. AssertionError if a pair has faults."""
    results = [result for name in CASES for result in observe(name, pairs(name, long))]
    faults = [f"{r.case}, {r.writer} to {r.reader}: {'; '.join(r.faults)}" for r in results if r.faults]
    if faults:
        raise AssertionError("\n".join(faults))
    table: dict[str, dict[str, dict[str, float]]] = {}
    for r in results:
        table.setdefault(r.case, {}).setdefault(str(r.writer), {})[str(r.reader)] = r.apart
    return table
