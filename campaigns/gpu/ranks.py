"""Several ranks on one GPU, over gloo: every strategy compared with the loop by hand; then one rank over NCCL, with offloads.

    python -m campaigns.gpu.ranks --out figures                              # 8 minutes
    python -m campaigns.gpu.ranks --device cpu --only "2: ddp"               # a rehearsal of some cases

The ranks of a start share the device. They open a group over gloo, which copies tensors of the GPU, before fabricate would open one over
NCCL, which refuses two ranks on one device. This is slow, but it runs the placement, streams and arithmetic of DDP, FSDP2 and ZeRO on a
GPU. Only NCCL is missing; the start with one rank uses it.

Passes when every loss equals that of the loop by hand over the same global batches, within the case's tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from campaigns.gpu.gpt import SIZES, Losses, Module, Recipe, by_hand, differ, strategy_of, trainer
from campaigns.gpu.measuring import Host, LeftOut, Report, arguments, device, last_error, needs, started, torchrun
from fabricate import Callback, Trainer

UPDATES, ROWS, CASE_SECONDS = 10, 8, 90
EXACT, HALF = 1e-4, 3e-2


@dataclasses.dataclass(frozen=True)
class Case:
    """One fit. tolerance: for the losses; None if there is no equal loop by hand, so that the loss only has to fall. packages: the packages
    it needs. rehearsed: whether it also runs on a CPU; all of them have other tests there."""

    strategy: str
    precision: str = "fp32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float | None = EXACT
    packages: tuple[str, ...] = ()
    rehearsed: bool = False

    @property
    def name(self) -> str:
        """The name of the case, without the number of ranks."""
        return ", ".join([self.strategy, self.precision, *map(str, self.options)])


TWICE = {"accumulation": 2, "clip": 0.5}
DEEPSPEED = ("deepspeed",)
SHARED = (
    Case("ddp"),
    Case("ddp", options=TWICE, rehearsed=True),
    Case("ddp", "bf16", tolerance=HALF),
    Case("ddp:communication_hook=bf16", tolerance=HALF),
    Case("ddp:find_unused_parameters=true"),
    Case("fsdp"),
    Case("fsdp", options=TWICE),
    Case("fsdp:accumulate=whole", options=TWICE),
    Case("fsdp:offload=cpu", options=TWICE, rehearsed=True),
    Case("fsdp:activation_checkpointing=true"),
    Case("fsdp", "bf16", tolerance=HALF),
    Case("fsdp:param_dtype=bf16", "bf16", options=TWICE, tolerance=HALF),
    Case("fsdp:tp=2"),
    Case("ddp", options={"ema": 0.9}),
    Case("ddp", options={"torchmetrics": True}, packages=("torchmetrics",)),
    Case("fsdp", options={"torchmetrics": True}, packages=("torchmetrics",), rehearsed=True),
    Case("diloco", tolerance=None, rehearsed=True),
)
SHARED_BY_FOUR = (Case("fsdp:shard=2", options=TWICE), Case("fsdp:tp=2", options=TWICE))
ALONE = (
    Case("ddp", options=TWICE),
    Case("fsdp", options=TWICE),
    Case("fsdp:offload=cpu", options=TWICE, rehearsed=True),
    *(Case(f"zero{stage}", options=TWICE, packages=DEEPSPEED) for stage in (1, 2, 3)),
    Case("zero2:offload_optimizer=cpu", options=TWICE, packages=DEEPSPEED, rehearsed=True),
    Case("zero3:offload_optimizer=cpu,offload_param=cpu", options=TWICE, packages=DEEPSPEED),
    Case("zero2", "bf16", options=TWICE, tolerance=HALF, packages=DEEPSPEED),
)
STARTS = {2: SHARED, 4: SHARED_BY_FOUR, 1: ALONE}
"""The cases of each start by the number of ranks. With one rank, fabricate opens the group, as for a user's script."""


class SumOnly(Callback):
    """Makes FSDP2 sum and divide, because on a GPU it uses an average, which NCCL has and gloo does not."""

    def on_fit_start(self, trainer: Trainer) -> None:
        for model in trainer.accelerator._models:
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)


class Measured(Module):
    """The module with a torchmetrics object, which has to be on the device."""

    def __init__(self, recipe: Recipe, place: torch.device) -> None:
        super().__init__(recipe, place)
        import torchmetrics

        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any) -> dict[str, Any]:
        outputs = super().validation_step(batch)
        self.mean.update(outputs["loss"], weight=len(batch[0]))
        self.log("mean", self.mean)
        return outputs


def fit(case: Case, place: Host, world_size: int) -> dict[str, Any]:
    """Train the case on this rank, and by hand. All ranks; rank 0 uses the result."""
    size = dataclasses.replace(SIZES["tiny"], rows=ROWS, dropout=0.0)
    settings, wanted = {}, dict(case.options)
    extras: list[Any] = [SumOnly()] if world_size > 1 else []
    metric = wanted.pop("torchmetrics", False)
    if decay := wanted.pop("ema", None):
        from fabricate_ema import EMA

        extras.append(EMA(decay=decay))
    recipe = Recipe(size, UPDATES, case.precision, lr=1e-3, fused=False, **wanted)
    readers = world_size // (2 if "tp=2" in case.strategy else 1)
    losses = Losses()
    # In the loop by hand, a micro-batch has the rows of all ranks.
    hand = by_hand(dataclasses.replace(recipe, size=dataclasses.replace(size, rows=ROWS * readers)), place)
    module = (Measured if metric else Module)(recipe, place.device)
    data = size.data(UPDATES * recipe.accumulation * readers)
    with contextlib.redirect_stdout(io.StringIO()):
        fitted = trainer(
            recipe, strategy=strategy_of(case.strategy), plugins=[losses, *extras], timeout="1 minute", **settings
        )
        result = fitted.fit(module, data, data if metric else None, batch_size=ROWS, shuffle=False)
    own = losses.read()
    figures: dict[str, Any] = {"losses": own, "by_hand": hand.losses, "metrics": result.metrics, "failed": []}
    if case.tolerance is None:
        if not own[-1] < own[0]:
            figures["failed"].append(f"the loss does not fall: {own[0]} to {own[-1]}")
        return figures
    figures["losses_differ"] = differ(own, hand.losses)
    if not figures["losses_differ"] <= case.tolerance:
        figures["failed"].append(f"losses differ by {figures['losses_differ']:.1e}, allowed {case.tolerance:.0e}")
    if metric:
        mean, loss = (
            next(v for n, v in result.metrics.items() if n in (f"val_{name}", name)) for name in ("mean", "loss")
        )
        if abs(mean / loss - 1) > EXACT:
            figures["failed"].append(f"torchmetrics says {mean}, the loop {loss}")
    return figures


def rank(place: Host, names: list[str], path: Path) -> None:
    """Run one rank: all cases, one after the other; rank 0 appends a line of JSON for each to the file `path`. Ends at the first error,
    because the ranks are then out of step."""
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        if place.real:
            torch.cuda.set_device(place.device)
        dist.init_process_group(place.group_backend())
    for case in STARTS[world_size]:
        if case.name not in names:
            continue
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        figures = fit(case, place, world_size)
        faulthandler.cancel_dump_traceback_later()
        if int(os.environ["RANK"]) == 0:
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([case.name, figures]) + "\n")


def start(report: Report, place: Host, ranks: int) -> None:
    """Run the cases on `count` ranks. After a case that ends its processes, new ones are started for the others."""
    waiting = {}
    for case in STARTS[ranks]:
        if not report.chosen(f"{ranks}: {case.name}") or not (place.real or case.rehearsed):
            continue
        try:
            needs(*case.packages)
        except LeftOut as exc:
            report.record(f"{ranks}: {case.name}", {"left_out": str(exc)})
        else:
            waiting[case.name] = case
    while waiting:
        if report.left() < 25 and place.real:
            for name in waiting:
                report.record(f"{ranks}: {name}", {"left_out": f"{report.left():.0f} s left"})
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "found.jsonl")
            path.touch()
            command = torchrun(
                ranks, "campaigns.gpu.ranks", "--device", place.kind, "--found", str(path), "--cases", *waiting
            )
            process = started(command, report.left() if place.real else 600)
            for name, figures in map(json.loads, path.read_text().splitlines()):
                report.record(f"{ranks}: {name}", figures)
                del waiting[name]
        if process.returncode and waiting:
            name = next(iter(waiting))
            output = process.stdout.partition("torch/distributed/elastic/")[0]  # without torchrun's lines
            report.record(f"{ranks}: {name}", {"failed": [last_error(process)], "output": output[-6000:]})
            del waiting[name]


def main() -> int:
    """Start the ranks, and print what they found; the exit code is the verdict."""
    parser = arguments(__doc__, 480)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = device(options)
    if options.found is not None:
        rank(place, options.cases, options.found)
        return 0
    report = Report("ranks", place, options)
    for ranks in STARTS:
        start(report, place, ranks)
    rows = [
        [
            name,
            f"{figures['losses_differ']:.0e}" if "losses_differ" in figures else "",
            "" if figures.get("failed") else "yes",
        ]
        for name, figures in report.cases.items()
        if "left_out" not in figures
    ]
    return report.end(["ranks and case", "losses differ by", "as by hand"], rows)


if __name__ == "__main__":
    sys.exit(main())
