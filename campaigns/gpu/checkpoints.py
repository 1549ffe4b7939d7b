"""Checkpoints of a 10 GB state on a GPU: how long training stalls, and how fast they are written and read.

    python -m campaigns.gpu.checkpoints --out figures --folder /fast/disk      # 8 minutes
    python -m campaigns.gpu.checkpoints --device cpu                           # a rehearsal with 6 MB

An update's time is from one device-wide wait to the next; a save's stall is the time of the next update above the median. For comparison
there are one copy of the same bytes from the device into pinned memory, `torch.save`, and torch's distributed checkpoint.

Passes when the second and later asynchronous saves stop training no longer than `MOST_STALL` times that copy, the host's
memory in use grows by no more than `MOST_PINNED` of the state, and a resumed run continues from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from campaigns.gpu.gpt import SIZES, Module, Recipe, Stamps, clean, trainer
from campaigns.gpu.measuring import Host, LeftOut, Report, arguments, device
from fabricate import TrainModule

MOST_STALL, MOST_PINNED = 1.25, 1.4
SAVES, BETWEEN = 4, 12
"""The number of saves in a run, and of updates between them."""


def recipe_of(place: Host, gigabytes: float) -> Recipe:
    """The recipe of a GPT whose weights and AdamW state have about this size."""
    size = dataclasses.replace(SIZES["1.3B"], length=512, rows=4) if place.real else SIZES["tiny"]
    layers = max(1, round((gigabytes * 1e9 / 12 - size.vocabulary * size.width) / (12 * size.width**2)))
    size = dataclasses.replace(size, layers=layers) if place.real else size
    return Recipe(size, SAVES * BETWEEN + 4, "bf16")


def saving(place: Host, recipe: Recipe, folder: Path, save: str, copy_seconds: float) -> dict[str, Any]:
    """The figures of one run with saves: the stalls of the first and the later saves, and seconds until each was durable."""
    stamps, run_dir, before = Stamps(place), folder / save, psutil.virtual_memory().available
    fitted = trainer(recipe, save=save, save_every=BETWEEN, keep=1, run_dir=run_dir, plugins=[stamps])
    with contextlib.redirect_stdout(io.StringIO()):
        fitted.fit(Module(recipe, place.device), recipe.loader(place))
    clean(place)
    seconds = stamps.seconds()
    usual = statistics.median(seconds)
    # seconds[i] is the time between updates i + 1 and i + 2; a save follows each BETWEEN-th update.
    stalls = [seconds[number * BETWEEN - 1] - usual for number in range(1, SAVES + 1)]
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    durable = [line["seconds"] for line in lines if line["event"] == "saved"]
    newest = max((run_dir / "checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in newest.iterdir())
    figures = {
        "bytes": size, "usual_seconds": usual, "first_stall": stalls[0], "later_stalls": stalls[1:], "durable_seconds": durable,
        "gigabytes_per_second": [size / 1e9 / seconds for seconds in durable if seconds],
        "host_grew": before - psutil.virtual_memory().available, "failed": [],
    }  # fmt: skip
    if place.real and save == "async":
        figures |= {"contexts": contexts()}
        if (longest := max(stalls[1:])) > MOST_STALL * copy_seconds + 0.02:
            figures["failed"].append(
                f"a later save stops training for {longest:.2f} s, a copy takes {copy_seconds:.2f} s"
            )
        if figures["host_grew"] > MOST_PINNED * size:
            figures["failed"].append(
                f"the host's memory grew by {figures['host_grew'] / 1e9:.1f} GB for a state of {size / 1e9:.1f}"
            )
    return figures


def contexts() -> list[str]:
    """The processes with memory on a GPU, from nvidia-smi."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def resuming(place: Host, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Seconds from the call of fit to the end of its first update, fresh and resumed from the synchronous run's checkpoint."""
    if not (folder / "sync" / "checkpoints").is_dir():
        raise LeftOut("nothing was saved to resume")
    figures: dict[str, Any] = {}
    for name, updates, run_dir in (("fresh", 1, None), ("resumed", recipe.updates + 1, folder / "sync")):
        longer, stamps, began = dataclasses.replace(recipe, updates=updates), Stamps(place), time.perf_counter()
        fitted = trainer(longer, save_every=None, run_dir=run_dir, plugins=[stamps])
        with contextlib.redirect_stdout(io.StringIO()):
            figures[f"{name}_steps"] = fitted.fit(Module(longer, place.device), recipe.loader(place)).steps
        figures[name] = stamps.at[0] - began
        figures[f"{name}_updates"] = len(stamps.at)
        clean(place)
    went_on = figures["resumed_steps"] == recipe.updates + 1 and figures["resumed_updates"] == 1
    return figures | {"failed": [] if went_on else ["the run did not continue from its last checkpoint"]}


def copied(place: Host, recipe: Recipe) -> dict[str, Any]:
    """Seconds to copy as many bytes as the state has from the device into pinned memory, and to allocate that memory."""
    bytes_ = sum(p.numel() * 12 for p in Module(recipe, place.device).parameters())
    source = torch.empty(bytes_ // 4, device=place.device)
    began = time.perf_counter()
    target = torch.empty(bytes_ // 4, pin_memory=place.real)
    pinning_seconds, times = time.perf_counter() - began, []
    for _ in range(3):
        read = place.clock()
        target.copy_(source, non_blocking=True)
        times.append(read() / 1000)
    return {"bytes": bytes_, "copy_seconds": min(times[1:]), "pinning_seconds": pinning_seconds}


def others(place: Host, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The figures of torch.save and of torch's distributed checkpoint for the same state; neither makes it durable."""
    import torch.distributed.checkpoint as dcp

    module: TrainModule = Module(recipe, place.device)
    optimizer = recipe.optimizer(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    seconds: dict[str, Any] = {}

    writers = {
        "torch.save": lambda: torch.save(state, folder / "plain.pt"),
        "distributed checkpoint": lambda: dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True),
    }
    for name, write in writers.items():
        place.synchronize()
        began = time.perf_counter()
        write()
        seconds[name] = time.perf_counter() - began
    return seconds


def main() -> int:
    """Run the cases; return the exit code."""
    parser = arguments(__doc__, 480)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the state")
    parser.add_argument("--folder", type=Path, help="on which disk; the system's temporary folder")
    options = parser.parse_args()
    place = device(options)
    report = Report("checkpoints", place, options)
    recipe = recipe_of(place, options.gigabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as directory:
        folder = Path(directory)
        copy = report.case("copy", copied, place, recipe)
        clean(place)
        for save in ("async", "sync"):
            report.case(f"{save} saves", saving, place, recipe, folder, save, copy.get("copy_seconds", 0.0), takes=120)
        report.case("resuming", resuming, place, recipe, folder, takes=60)
        report.case("others", others, place, recipe, folder, takes=60)
    rows = []
    for name in ("async saves", "sync saves"):
        figures = report.cases.get(name, {})
        if "first_stall" in figures:
            later, rate = (
                statistics.median(figures["later_stalls"]),
                statistics.median(figures["gigabytes_per_second"] or [0.0]),
            )
            rows.append(
                [name, f"{figures['bytes'] / 1e9:.2f}", f"{figures['first_stall']:.3f}", f"{later:.3f}", f"{rate:.2f}"]
            )
    return report.end(["saves", "GB", "first: training stands, s", "later, s", "GB/s until durable"], rows)


if __name__ == "__main__":
    sys.exit(main())
