"""A tiny model in every precision on one GPU: it has to train as by hand, without more waits for the device.

    python -m campaigns.gpu.smoke --out figures                   # 6 minutes
    python -m campaigns.gpu.smoke --device cpu --only fp32        # a rehearsal of some cases

Passes when each loss equals that of the loop by hand on the same device within `TOLERANCE`, or the case is refused before step 1; when no
update waits for the device more often than the loop by hand, except where the plan announces it; when evaluation, prediction and torchrun
with one process work; and when memory that runs out and an index out of range end with a message that helps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import sys
import tempfile
from typing import Any

import torch

from campaigns.gpu.gpt import SIZES, Module, Recipe, by_hand, clean, differ, fabricated, loss_of, trainer
from campaigns.gpu.measuring import (
    Host,
    LeftOut,
    Report,
    Window,
    arguments,
    device,
    last_error,
    needs,
    started,
    torchrun,
)
from fabricate import ConfigurationError

PRECISIONS = ("fp32", "fp32:tf32=true", "bf16", "fp16", "bf16-true")
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2, "bf16-true": 1e-2}
"""The largest relative difference of a loss."""
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "plain": ({}, {}, 0),
    "accumulate 2": ({"accumulation": 2}, {}, 0),
    "clip": ({"clip": 0.5}, {}, 0),
    "skip": ({"clip": 0.5}, {"nonfinite": "skip"}, 1),
    "compile": ({"compile": {"dynamic": False}}, {}, 0),
    "async save": ({}, {"save": "async", "save_every": 3, "run_dir": ""}, 0),
    "deterministic": ({}, {"deterministic": True}, 0),
}
"""By name: options of both loops, options of fabricate alone, and the additional waits per update that these may cause. A run_dir is a new
folder."""
COMPILED = ("fp32", "bf16", "fp16")
REHEARSED = ("fp32", "fp16")
"""The precisions whose variants run in a rehearsal; "plain" runs in all, except TF32, which a CPU does not have."""
UPDATES, COUNTED = 10, 5


def precisions(place: Host, variant: str) -> tuple[str, ...]:
    """The precisions in which a variant runs."""
    if not place.real:
        return tuple(p for p in PRECISIONS if "tf32" not in p) if variant == "plain" else REHEARSED
    return COMPILED if variant == "compile" else PRECISIONS


def compared(place: Host, precision: str, variant: str) -> dict[str, Any]:
    """The figures of one precision and variant: losses compared with the loop by hand, and the waits of both."""
    if precision == "bf16-true":
        needs("optimi")
    both, only, allowed = VARIANTS[variant]
    if "compile" in both and not place.real:
        both = {"compile": {"backend": "aot_eager"}}
    recipe = Recipe(SIZES["tiny"], UPDATES, precision, **both)
    figures: dict[str, Any] = {"failed": []}
    with tempfile.TemporaryDirectory() as folder:
        changes = {key: folder if key == "run_dir" else value for key, value in only.items()}
        hand = by_hand(recipe, place)
        clean(place)
        try:
            own = fabricated(recipe, place, losses=True, **changes)
        except ConfigurationError as exc:
            return {"refused": str(exc)}
    figures["losses_differ"] = differ(own.losses, hand.losses)
    most = TOLERANCE[recipe.kind]
    if not figures["losses_differ"] <= most:
        figures["failed"].append(f"losses differ by {figures['losses_differ']:.1e}, allowed {most:.0e}")
    if variant != "async save":  # campaigns.gpu.checkpoints measures its waits
        figures |= waits(place, recipe, allowed, changes)
        figures["failed"] += figures.pop("waits_failed")
    return figures


def waits(place: Host, recipe: Recipe, allowed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Waits of the host for the device per update, by hand and by fabricate."""
    windows = {name: Window(place, UPDATES - COUNTED - 1, COUNTED, waits=True) for name in ("by hand", "fabricate")}
    by_hand(recipe, place, windows["by hand"])
    clean(place)
    fabricated(recipe, place, windows["fabricate"], **changes)
    clean(place)
    counts = {name: window.waits.total() / COUNTED for name, window in windows.items()}
    extra = counts["fabricate"] - counts["by hand"]
    failed = [f"{extra:g} waits per update more than by hand, allowed {allowed}"] if extra > allowed else []
    return {
        "waits_per_update": counts,
        "where": dict(windows["fabricate"].waits),
        "runtime_calls": {name: window.trace for name, window in windows.items()},
        "waits_failed": failed,
    }


def evaluated(place: Host) -> dict[str, Any]:
    """Validation and prediction compared with the same by hand."""
    recipe = Recipe(SIZES["tiny"], 4, "fp32", rows=29)  # the last batch has 5 rows
    module = Module(recipe, place.device)
    module.gpt.to(place.device)
    data, rows = recipe.data(), recipe.data().tensors[0].to(place.device)
    with torch.no_grad():
        expected, tokens = float(loss_of(module.gpt, rows)), module.gpt(rows[:, :-1])[:, -1].argmax(-1).cpu()
    with contextlib.redirect_stdout(io.StringIO()):
        metrics = trainer(recipe).validate(module, data, batch_size=8)
        predictions = trainer(recipe).predict(module, data, batch_size=8)
    loss = next(value for name, value in metrics.items() if name.endswith("loss"))
    same = torch.equal(torch.stack([torch.as_tensor(p) for p in predictions]).cpu(), tokens)
    failed = [] if abs(loss / expected - 1) < 1e-4 else [f"validation loss {loss}, by hand {expected}"]
    failed += [] if same else ["predictions differ from those by hand"]
    return {"loss": loss, "by_hand": expected, "predictions": len(predictions), "failed": failed}


def under_torchrun(place: Host) -> dict[str, Any]:
    """Run this script in one process of torchrun, which sets RANK and LOCAL_RANK."""
    process = started(torchrun(1, "campaigns.gpu.smoke", "--device", place.kind, "--only", "fp32, plain"), 120)
    return {"failed": [] if process.returncode == 0 else [last_error(process)], "output": process.stdout[-2000:]}


def too_large(place: Host) -> None:
    """In a separate process, run a fit that needs too much memory."""
    torch.cuda.set_per_process_memory_fraction(0.01)
    recipe = Recipe(dataclasses.replace(SIZES["124M"], rows=64), 2, "fp32")
    trainer(recipe).fit(Module(recipe, torch.device("cpu")), recipe.loader(place))


def out_of_range(place: Host) -> None:
    """In a separate process, train with a label that is not in the vocabulary: a device-side assert on CUDA."""
    recipe = Recipe(SIZES["tiny"], 2, "fp32")
    module, data = Module(recipe, place.device), recipe.data()
    data.tensors[0][:, -1] = recipe.size.vocabulary  # the last token is only a target
    trainer(recipe, log_every=1).fit(module, data, batch_size=8)


ENDINGS = {"too large": (too_large, "out of memory on rank 0"), "out of range": (out_of_range, "device-side assert")}
"""The functions that run in a separate process, and the text that their errors must contain on a GPU."""


def ending(place: Host, name: str) -> dict[str, Any]:
    """Check that the process ends in time, with an error instead of a signal, and with the expected text."""
    if name == "too large" and not place.real:
        raise LeftOut("it limits a GPU's memory")
    command = [sys.executable, "-m", "campaigns.gpu.smoke", "--device", place.kind, "--ending", name]
    process, text = started(command, 120), ENDINGS[name][1]
    failed = [] if process.returncode == 1 else [last_error(process)]
    failed += [] if text in process.stdout or not place.real else [f"the error does not say {text!r}"]
    return {"output": process.stdout[-1500:], "failed": failed}


def main() -> int:
    """Run the cases; return the exit code."""
    parser = arguments(__doc__, 360)
    parser.add_argument("--ending", choices=ENDINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = device(options)
    if options.ending is not None:
        ENDINGS[options.ending][0](place)
        return 0
    report = Report("smoke", place, options)
    report.case("evaluate and predict", evaluated, place)
    for name in ENDINGS:
        report.case(name, ending, place, name, takes=40)
    report.case("torchrun, one process", under_torchrun, place, takes=40)
    for variant in VARIANTS:
        for precision in precisions(place, variant):
            report.case(f"{precision}, {variant}", functools.partial(compared, place, precision, variant), takes=20)
    rows = []
    for name, figures in report.cases.items():
        counts = figures.get("waits_per_update", {})
        differ_by = f"{figures['losses_differ']:.0e}" if "losses_differ" in figures else figures.get("refused", "")
        rows.append([name, differ_by, *(f"{counts[loop]:g}" if counts else "" for loop in ("by hand", "fabricate"))])
    return report.end(["case", "losses differ by", "waits per update, by hand", "fabricate"], rows)


if __name__ == "__main__":
    sys.exit(main())
