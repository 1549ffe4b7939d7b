"""`fabricate check-invariance` for tests: the test fails if the results of a script depend on how its batches are split.

Owns the judgement; the command runs the script, in other processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from fabricate import FabricateError
from fabricate.testing.judge import KitFailure


def check_invariance(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    global_batch_size: int = 12,
    steps: int = 4,
    world_sizes: Sequence[int] = (1, 2, 3),
    strategy: str = "ddp",
    precision: str = "fp32",
    tolerance: float = 1e-5,
) -> dict[str, Any]:
    """Run `script` with the same global batches split in every way, and raise `KitFailure` if results differ.

    The script is an ordinary one that calls `Trainer.fit`; its run_dir, batch sizes, strategy and precision are replaced for the check,
    dropout layers are switched off, validation is one batch at the end. One process that takes the global batch whole is the reference.
    Call this function from one process: it starts the ranks.

    Args:
        script, arguments: as for `python SCRIPT ARGUMENTS`.
        global_batch_size: rows per update; each split is world size x micro-batch x accumulation.
        steps: the maximum number of updates.
        world_sizes: numbers of ranks; those that do not divide the global batch are left out.
        strategy: used with more than one rank; one process is "single".
        tolerance: the largest relative difference of a loss or a weight that counts as rounding.

    Returns what `fabricate check-invariance --json` prints: "largest", "steps", "notes", "splits", each with its "world_size",
    "micro_batch", "accumulation", and the relative differences "loss" and "weights", and "unseen": a text, also given as a warning, if
    the updates change the weights so little that a wrong gradient would not show, else "".

    Raises FabricateError for a script that fails without the check or cannot be split.

    Example::

        def test_accumulation_is_exact():
            fabricate.testing.check_invariance("train.py", world_sizes=(1, 2))
    """
    options = {
        "--global-batch": global_batch_size,
        "--steps": steps,
        "--worlds": ",".join(map(str, world_sizes)),
        "--strategy": strategy,
        "--precision": precision,
        "--tolerance": tolerance,
    }
    report = _report(script, arguments, options)
    if report["largest"] > tolerance:
        worst = max(report["splits"], key=lambda split: max(split["loss"], split["weights"]))
        split = " x ".join(str(worst[name]) for name in ("world_size", "micro_batch", "accumulation"))
        raise KitFailure(
            f"{os.fspath(script)}: split as {split} (ranks x micro-batch x accumulation), losses differ by {worst['loss']:.1e} and "
            f"weights by {worst['weights']:.1e} ({worst['tensor']}) from one process that takes the batch of {global_batch_size} whole; "
            f"expected at most {tolerance:.0e}. If training_step returns a mean over something other than rows, return its weight too: "
            "{'loss': loss, 'weight': number}. " + " ".join(report["notes"])
        )
    if report["unseen"]:
        warnings.warn(f"{os.fspath(script)}: {report['unseen']}", stacklevel=2)
    return report


def _report(script: str | os.PathLike[str], arguments: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "fabricate", "check-invariance", "--json"]
    command += [f"{name}={value}" for name, value in options.items()]
    done = subprocess.run([*command, os.fspath(script), "--", *arguments], capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise FabricateError(done.stderr.strip().removeprefix("error: "))
    report: dict[str, Any] = json.loads(done.stdout)
    return report
