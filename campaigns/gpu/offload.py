"""ZeRO-Offload on one GPU: 3 billion parameters with the optimizer on the host, compared with DeepSpeed by hand.

    python -m campaigns.gpu.offload --out figures            # 8 minutes; needs deepspeed
    python -m campaigns.gpu.offload --device cpu             # a rehearsal

Each side runs in a separate process, as one rank of torchrun; the engine, the optimizer and the batches are the same. DeepSpeedCPUAdam is
compiled first, and its time is a separate figure.

Passes when fabricate's median update takes at most `MOST_OVER` of DeepSpeed's by hand and the losses are the same within bf16's rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from campaigns.gpu.gpt import SIZES, Losses, Module, Recipe, Stamps, differ, loss_of, strategy_of, trainer
from campaigns.gpu.measuring import Host, Report, arguments, device, emit, emitted, last_error, needs, started, torchrun

MOST_OVER, MOST_APART = 1.05, 3e-2
WARM_UP, COUNTED, CLIP = 2, 5, 1.0


def deepspeed_adam(parameters: Any) -> torch.optim.Optimizer:
    """DeepSpeed's Adam for the host, compiled by the first call."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(parameters, lr=3e-4, weight_decay=0.1, adamw_mode=True)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, fused=True),
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1),
    "deepspeed": deepspeed_adam,
}
STRATEGIES = {"zero2": "zero2:offload_optimizer=cpu", "zero3": "zero3:offload_optimizer=cpu,offload_param=cpu"}


class Offloaded(Module):
    """The module with an optimizer given by name."""

    def __init__(self, recipe: Recipe, place: torch.device, optimizer: str) -> None:
        super().__init__(recipe, place)
        self._optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self._optimizer](self.parameters())


def fabricated(place: Host, recipe: Recipe, strategy: str, optimizer: str) -> tuple[list[float], list[float]]:
    """Train with fabricate; return the losses and the times of the updates."""
    losses, stamps = Losses(), Stamps(place)
    fitted = trainer(recipe, strategy=strategy_of(STRATEGIES[strategy]), plugins=[losses, stamps])
    with contextlib.redirect_stdout(io.StringIO()):
        fitted.fit(Offloaded(recipe, place.device, optimizer), recipe.loader(place))
    return losses.read(), stamps.at


def by_hand(place: Host, recipe: Recipe, strategy: str, optimizer: str) -> tuple[list[float], list[float]]:
    """Train with DeepSpeed as in its tutorials."""
    if not place.real:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("nccl" if place.real else "gloo")
    model, stage = recipe.size.build(place.device), 2 if strategy == "zero2" else 3
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    zero |= {"offload_param": {"device": "cpu", "pin_memory": True}} if stage == 3 else {}
    content = {
        "train_micro_batch_size_per_gpu": recipe.size.rows, "gradient_accumulation_steps": 1, "gradient_clipping": CLIP,
        "bf16": {"enabled": True}, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), config=content)
    losses, at = [], []
    for (batch,) in recipe.loader(place):
        loss = loss_of(engine, batch.to(place.device, non_blocking=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        place.synchronize()
        at.append(time.perf_counter())
    return torch.stack(losses).float().tolist(), at


LOOPS = {"by hand": by_hand, "fabricate": fabricated}


def child(place: Host, loop: str, strategy: str, optimizer: str) -> None:
    """Run the single rank, and print the figures."""
    size = SIZES["3B"] if place.real else SIZES["tiny"]
    recipe = Recipe(size, WARM_UP + COUNTED, clip=CLIP)
    began = time.perf_counter()
    if optimizer == "deepspeed":
        deepspeed_adam([torch.nn.Parameter(torch.zeros(8))])
    built, first = time.perf_counter() - began, time.perf_counter()
    losses, at = LOOPS[loop](place, recipe, strategy, optimizer)
    each = [b - a for a, b in zip(at[WARM_UP - 1 :], at[WARM_UP:], strict=False)]
    figures = {"losses": losses, "seconds_per_update": each, "first_update": at[0] - first, "build_seconds": built}
    emit(figures | {"peak_mib": place.peak_allocated() / 2**20})


def compared(place: Host, report: Report, strategy: str, optimizer: str) -> dict[str, Any]:
    """The figures of both loops, each in a process."""
    needs("deepspeed")
    figures: dict[str, Any] = {"failed": []}
    for loop in LOOPS:
        command = torchrun(1, "campaigns.gpu.offload", "--device", place.kind, "--child", loop, strategy, optimizer)
        process = started(command, report.left() if place.real else 300)
        figures[loop] = emitted(process.stdout)
        if not figures[loop]:
            return figures | {"failed": [f"{loop}: {last_error(process)}"], "output": process.stdout[-4000:]}
    medians = {loop: statistics.median(figures[loop]["seconds_per_update"]) for loop in LOOPS}
    figures["of_by_hand"] = medians["fabricate"] / medians["by hand"]
    figures["losses_differ"] = differ(figures["fabricate"]["losses"], figures["by hand"]["losses"])
    if place.real and figures["of_by_hand"] > MOST_OVER:
        figures["failed"].append(f"{figures['of_by_hand']:.3f} of DeepSpeed by hand, allowed {MOST_OVER}")
    if figures["losses_differ"] > MOST_APART:
        figures["failed"].append(f"losses differ by {figures['losses_differ']:.1e}")
    return figures


def main() -> int:
    """Run the cases; return the exit code."""
    parser = arguments(__doc__, 480)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = device(options)
    if options.child is not None:
        child(place, *options.child)
        return 0
    report = Report("offload", place, options)
    cases = [("zero2", "fused"), ("zero2", "deepspeed"), ("zero3", "fused"), ("zero2", "torch")]
    for strategy, optimizer in cases if place.real else cases[:1]:
        report.case(f"{strategy}, {optimizer}", compared, place, report, strategy, optimizer, takes=100)
    rows = []
    for name, figures in report.cases.items():
        if "of_by_hand" in figures:
            seconds = [statistics.median(figures[loop]["seconds_per_update"]) for loop in LOOPS]
            rows.append(
                [
                    name,
                    *(f"{s:.3f}" for s in seconds),
                    f"{figures['of_by_hand']:.3f}",
                    f"{figures['losses_differ']:.0e}",
                ]
            )
    header = ["strategy, optimizer", "DeepSpeed by hand, s per update", "fabricate", "ratio", "losses differ by"]
    return report.end(header, rows)


if __name__ == "__main__":
    sys.exit(main())
