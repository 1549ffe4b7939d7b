"""The cost before and around the steps: imports, the first step, memory, stack frames above a step, resuming far into an epoch.

    python -m benchmarks.startup --json FILE

Every figure of a framework is the median of several fresh processes.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = 1_000_000
IMPORTS = {
    "import torch": "torch",
    "import accelerate": "accelerate",
    "import fabricate": "fabricate",
    "from fabricate import Trainer, TrainModule": "fabricate",
    "import pytorch_accelerated": "pytorch_accelerated",
    "import ignite.engine": "ignite",
    "import lightning": "lightning",
    "from transformers import Trainer": "transformers",
}
PACKAGES = {
    "fabricate": "fabricate",
    "transformers.Trainer": "transformers",
    "Lightning": "lightning",
    "Fabric": "lightning",
    "pytorch-accelerated": "pytorch_accelerated",
    "Ignite": "ignite",
    "Accelerate": "accelerate",
}
_IMPORT = """
import json, resource, sys, time
began = time.process_time()
{statement}
seconds = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({{"cpu_seconds": seconds, "modules": len(sys.modules), "peak_mib": peak / 1024}}))
"""


def _fresh(arguments: list[str], times: int) -> dict[str, Any]:
    """The median of each number in the JSON objects that `times` processes print last."""
    runs = []
    for _ in range(times):
        process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        if process.returncode:
            raise SystemExit(f"{arguments[:3]} failed:\n{process.stderr[-2000:]}")
        runs.append(json.loads(process.stdout.splitlines()[-1]))
    return {key: statistics.median(f[key] for f in runs) for key in runs[0]}


def imports(times: int) -> dict[str, Any]:
    """CPU seconds, modules and peak memory of importing, by statement."""
    from importlib.util import find_spec

    return {
        statement: _fresh(["-c", _IMPORT.format(statement=statement)], times)
        for statement, package in IMPORTS.items()
        if find_spec(package) is not None
    }


def first_steps(times: int) -> dict[str, Any]:
    """CPU seconds from the start of a process to the end of its first step, peak memory, and stack frames above a step, by loop."""
    from benchmarks.loops import LOOPS
    from benchmarks.peers import available

    command = ["-m", "benchmarks.startup", "--first-step"]
    loops = {name: _fresh([*command, name, "quiet"], times) for name in {**LOOPS, **available()}}
    for name, figures in loops.items():
        figures["peak_mib_gpt"] = _fresh([*command, name, "gpt"], 1)["peak_mib"]
    return loops


def _first_step(name: str, case: str) -> None:
    """Run one whole case, in a separate process. The first step ends when the second forward begins."""
    import resource

    import torch

    from benchmarks.loops import LOOPS
    from benchmarks.peers import available
    from benchmarks.works import WORKS, Clock

    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        {**LOOPS, **available()}[name](WORKS[case], clock, Path(folder))
    own = f"{os.sep}{PACKAGES.get(name, 'no package')}{os.sep}"
    result = {
        "cpu_seconds": clock.stamps[1] / 1e9,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "frames": sum(own in frame.replace("lightning_fabric", "lightning") for frame in clock.frames),
    }
    print("\n" + json.dumps(result))


def resuming() -> dict[str, Any]:
    """CPU seconds to the first batch of 8 at a share of a shuffled epoch of a million rows, by method."""
    import accelerate
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from fabricate.data.source import Loading
    from fabricate.data.user_data import open_source

    rows = TensorDataset(torch.zeros(ROWS, 1))

    def ours(position: int) -> None:
        source = open_source(rows, argument="train", loading=Loading(8), training=True, rank=0, world_size=1)
        windows = source.windows(0, position)
        next(next(windows).micro_batches)
        windows.close()

    def skipped(position: int) -> None:
        accelerate.PartialState(cpu=True)
        next(iter(accelerate.skip_first_batches(DataLoader(rows, batch_size=8, shuffle=True), position // 8)))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    def discarded(position: int) -> None:
        batches = iter(DataLoader(rows, batch_size=8, shuffle=True))
        for _ in range(position // 8 + 1):
            next(batches)

    results: dict[str, Any] = {}
    for name, method in (
        ("fabricate", ours),
        ("accelerate.skip_first_batches", skipped),
        ("iterate and discard", discarded),
    ):
        results[name] = {}
        for share in (0.0, 0.5, 0.9):
            seconds = []
            for _ in range(1 if method is discarded else 5):
                began = time.process_time()
                method(int(ROWS * share))
                seconds.append(time.process_time() - began)
            results[name][f"{share:.0%}"] = statistics.median(seconds)
    return results


def main() -> None:
    """Measure everything, or be the process of one first step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--first-step", nargs=2, metavar=("LOOP", "CASE"))
    parser.add_argument("--times", type=int, default=3, help="fresh processes per figure")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    if options.first_step:
        _first_step(*options.first_step)
        return
    # Write bytecode, as pip does for installed packages; an editable checkout may have none.
    compileall.compile_dir(Path(__file__).parents[1] / "fabricate", quiet=1)
    results = {"imports": imports(options.times), "first_step": first_steps(options.times), "resume": resuming()}
    text = json.dumps(results, indent=1)
    print(text, file=sys.stderr)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
