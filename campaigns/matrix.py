"""Tables which show that no setting is silently ignored: every strategy and option with every precision takes effect in a fit or is
refused, and so do the settings of launchers (campaigns.launches).

A cell that runs has the values observed in the second update on rank 0: the output dtype of a linear layer, the dtype of its parameters,
the share of parameters and of optimizer state that this rank keeps between updates, and the optimizer. A refused cell has the reason, and
no step ran.

    python -m campaigns.matrix --out docs/matrix.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from campaigns import launches
from fabricate import FabricateError, Trainer, TrainModule
from fabricate.testing import close_pools, run_ranks

STRATEGIES = (
    "single",
    "ddp",
    "ddp:find_unused_parameters=true",
    "ddp:gradient_as_bucket_view=true",
    "ddp:static_graph=true",
    "ddp:communication_hook=bf16",
    "fsdp",
    "fsdp:wrap=none",
    "fsdp:reshard_after_forward=false",
    "fsdp:offload=cpu",
    "fsdp:param_dtype=fp32",
    "fsdp:activation_checkpointing=true",
    "fsdp:accumulate=whole",
    "fsdp:shard=node",
    "fsdp:tp=2",
    "tp=2",
    "cp=2",
    "diloco",
    "zero1",
    "zero2",
    "zero2:offload_optimizer=cpu",
    "zero3",
    "zero3:offload_param=cpu",
)
PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp8:emulate=true")
COMPUTES_IN = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""The output dtype of a linear layer; float8 exists only inside the layer."""
WHOLE, SHARDED = ("single", "ddp", "diloco"), ("fsdp", "zero1", "zero2", "zero3")
NOWHERE = ("tp=2", "cp=2")
"""Options that every strategy refuses."""
PAGE = """# Which strategies run with which precisions

`python -m campaigns.matrix --out docs/matrix.md` wrote this page from real fits on CPU ranks. If a combination ran, its
cell gives

- the dtype of a linear layer's output;
- the dtype of the parameters that the layer computed with;
- the shares of the parameters and of the optimizer state that rank 0 keeps between updates;
- the class of the optimizer, and the device.

If a combination is refused, its cell has the error, which was raised before the first step. Under `zero3`, DeepSpeed
does not shard small parameters (`stage3_param_persistence_threshold`), and all parameters of this small net are below
that threshold.
"""
LAUNCHES = """
## By launcher

Each row combines a launcher with a `strategy=` of the script. A plan was resolved in the environment that the launcher
sets. The cell gives the resulting strategy, precision, device and number of ranks, or the error.
`tests/extras/test_launchers.py` starts real ranks with each launcher.
"""


@dataclass
class Cell:
    """The observations of one fit. refused: the error before the first step, else empty."""

    strategy: str
    precision: str
    ranks: int
    steps: int = 0
    activations: str = ""
    parameters: str = ""
    parameter_share: float = 0.0
    optimizer_share: float = 0.0
    optimizer: str = ""
    device: str = ""
    refused: str = ""


def name(dtype: torch.dtype) -> str:
    """The name of the dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


def local_elements(tensors: Iterable[torch.Tensor]) -> int:
    """Elements of `tensors` in this rank's memory, each piece of memory once."""
    local = [t.to_local() if isinstance(t, torch.distributed.tensor.DTensor) else t for t in tensors]
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in local}
    return sum(pieces.values())


class Observed(TrainModule):
    """A small net that records dtypes, shares and the optimizer in its cell."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)])
        self.tp_plan = {"blocks.0": "colwise", "blocks.1": "rowwise"}
        self.whole = sum(p.numel() for p in self.parameters())

    def on_fit_start(self) -> None:
        self.blocks[0].register_forward_hook(self.computed, prepend=True)  # while the parameters are gathered

    def computed(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.cell.parameters = name(next(layer.parameters()).dtype)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.cell.device = self.device.type
        hidden = self.blocks[0](batch[0])
        self.cell.activations = name(hidden.dtype)
        return mse_loss(self.blocks[1](torch.relu(hidden)).float(), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_step(self, trainer: Trainer, step: int) -> None:
        (optimizer,) = trainer.optimizers.values()
        moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
        self.cell.steps = step
        self.cell.optimizer = type(optimizer).__name__
        self.cell.parameter_share = local_elements(p.data for p in self.parameters()) / self.whole
        self.cell.optimizer_share = local_elements(moments) / self.whole


def fits(world_size: int, pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Run a fit for each strategy and precision, in one process group. All ranks."""
    rows = TensorDataset(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    cells = [Cell(strategy, precision, world_size) for strategy, precision in pairs]
    for cell in cells:
        trainer = Trainer(strategy=cell.strategy, precision=cell.precision, max_steps=2, seed=1, progress=False)
        try:
            trainer.fit(Observed(cell), rows, batch_size=4)
        except FabricateError as exc:
            cell.refused = str(exc).partition("\n")[0]
    return [asdict(cell) for cell in cells]


def wrong(cell: Cell) -> str:
    """The fault of a cell that is neither in effect nor refused; empty if it is correct."""
    if cell.refused:
        return "refused after a step had run" if cell.steps else ""
    if cell.strategy in NOWHERE:
        return "runs, and no strategy does it"
    strategy, precision = cell.strategy.partition(":")[0], cell.precision.partition(":")[0]
    gathered = "float32" if "param_dtype=fp32" in cell.strategy else COMPUTES_IN[precision]
    if strategy == "fsdp" and cell.parameters != gathered:
        return f"computes with parameters in {cell.parameters} instead of {gathered}"
    if cell.steps != 2:
        return f"{cell.steps} steps instead of 2"
    if cell.activations != COMPUTES_IN[precision]:
        return f"computes in {cell.activations}"
    share = 1.0 if strategy in WHOLE else 1 / cell.ranks
    if not abs(cell.optimizer_share - share) < 0.1:
        return f"keeps {cell.optimizer_share:.2f} of the optimizer state instead of {share:.2f}"
    return "" if cell.optimizer == "AdamW" else f"{cell.optimizer} steps instead of AdamW"


def observe() -> list[Cell]:
    """All cells, as observed on rank 0. On one rank, "single" runs in every precision, the other strategies in fp32."""
    everything = [(strategy, precision) for strategy in STRATEGIES for precision in PRECISIONS]
    alone = [(strategy, precision) for strategy, precision in everything if "single" in strategy or precision == "fp32"]
    cells: list[Cell] = []
    for world_size, pairs in ((1, alone), (2, everything)):
        cells += [Cell(**cell) for cell in run_ranks(fits, world_size, world_size, pairs, timeout=600)[0]]
    return cells


def text(cell: Cell) -> str:
    """A cell of the page."""
    if cell.refused:
        return "refused: " + cell.refused.replace("|", "\\|")
    return (
        f"{cell.activations}, parameters {cell.parameters}, keeps {cell.parameter_share:.0%} and {cell.optimizer_share:.0%}, "
        f"{cell.optimizer}, {cell.device}"
    )


def main() -> int:
    """Print the table; return 1 if a cell is neither in effect nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells = observe()
    close_pools()
    lines = [PAGE, "| strategy | precision | ranks | what happened |", "|---|---|---|---|"]
    lines += [f"| `{c.strategy}` | `{c.precision}` | {c.ranks} | {text(c)} |" for c in cells]
    starts = launches.plans()
    lines += [
        LAUNCHES,
        "| started as | `strategy=` | in effect on rank 0 |",
        "|---|---|---|",
        *map(launches.text, starts),
    ]
    print("\n".join(lines))
    faults = [f"{c.strategy}, {c.precision}, {c.ranks} ranks: {wrong(c)}" for c in cells if wrong(c)]
    faults += [f"{start.how}, {start.asked}: {launches.wrong(start)}" for start in starts if launches.wrong(start)]
    print("\n".join(faults) or "every cell takes effect or is refused")
    if options.out is not None:
        options.out.write_text("\n".join([*lines, ""]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
