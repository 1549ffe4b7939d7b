"""Weak and strong scaling over the ranks of this machine, with the shares of time that fabricate measures.

    python -m benchmarks.scaling [--ranks 1 2] [--json FILE]

Weak: 8 rows per rank on any number of ranks. Strong: 16 rows in all. The figures are wall-clock time: run it on an idle machine.

"On paper" extrapolates the weak ddp run of two ranks to more ranks: the computation takes as long, and a ring all-reduce over n ranks sends
2 (n - 1) / n of the gradients' bytes, for large n twice as many as over two ranks (Patarasuk and Yuan, 2009: bandwidth optimal all-reduce
algorithms). Latency and shared networks are not included.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tables import table

STEPS, LOG_EVERY = 120, 20
ROWS = {"weak": 8, "strong": 16}
ON_PAPER = (4, 8, 64)


def train(strategy: str, rows: int, folder: Path) -> None:
    """Run one rank of a fit, which writes the measurements to `folder`/metrics.jsonl."""
    import torch

    from benchmarks.module import Module
    from benchmarks.works import WORKS, Clock
    from fabricate import Trainer

    torch.set_num_threads(1)
    work = dataclasses.replace(
        WORKS["gpt"], steps=STEPS * rows // WORKS["gpt"].batch_size * int(os.environ["WORLD_SIZE"])
    )
    trainer = Trainer(
        max_steps=STEPS, strategy=strategy, precision="fp32", log_every=LOG_EVERY, save_every=None, run_dir=folder, progress=False
    )  # fmt: skip
    trainer.fit(Module(work, Clock()), work.dataset(), batch_size=rows)


def torchrun(ranks: int, module: str, *arguments: str) -> None:
    """Run `module` on `ranks` ranks of this machine, one thread each; their output is shown if one of them fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{process.stderr[-3000:]}")


def measure(strategy: str, ranks: int, rows: int) -> dict[str, float]:
    """The medians over the log intervals of one fit, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(ranks, "benchmarks.scaling", "--train", strategy, str(rows), folder)
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    laps = [line["clock"] for line in lines if line["stage"] == "train"][1:]
    return {name: statistics.median(lap[name] for lap in laps) for name in laps[0] if name not in ("time", "seconds")}


def on_paper(alone: dict[str, Any], pair: dict[str, Any]) -> list[dict[str, Any]]:
    """The extrapolation of `pair`, the weak ddp run of two ranks, to more ranks. alone: the run of one rank."""
    communicated = pair["seconds_per_step"] * pair["communication_share"]
    rows = []
    for ranks in ON_PAPER:
        travelled = communicated * 2 * (ranks - 1) / ranks
        seconds = pair["seconds_per_step"] - communicated + travelled
        rows.append(
            {
                "kind": "on paper, weak",
                "strategy": "ddp",
                "ranks": ranks,
                "rows": pair["rows"],
                "seconds_per_step": seconds,
                "samples_per_second": ranks * alone["rows"] / seconds,
                "data_share": pair["data_share"] * pair["seconds_per_step"] / seconds,
                "communication_share": travelled / seconds,
            }
        )
    return rows


def main() -> None:
    """Measure and print the table, or run one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--train", nargs=3, metavar=("STRATEGY", "ROWS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        strategy, rows, folder = options.train
        train(strategy, int(rows), Path(folder))
        return
    figures: list[dict[str, Any]] = []
    for kind, total in ROWS.items():
        for ranks in options.ranks:
            for strategy in ("ddp", "fsdp") if ranks > 1 else ("single",):
                own = total if kind == "weak" else total // ranks
                figures.append(
                    {"kind": kind, "strategy": strategy, "ranks": ranks, "rows": own, **measure(strategy, ranks, own)}
                )
    alone = {f["kind"]: f["samples_per_second"] for f in figures if f["ranks"] == 1}
    first = {(f["kind"], f["strategy"], f["ranks"]): f for f in figures}
    if (pair := first.get(("weak", "ddp", 2))) and (single := first.get(("weak", "single", 1))):
        figures += on_paper(single, pair)
        alone["on paper, weak"] = alone["weak"]
    rows = []
    for f in figures:
        faster = f["samples_per_second"] / alone[f["kind"]]
        share = f.get("communication_share")
        rows.append(
            [
                f"{f['kind']}, {f['strategy']}",
                str(f["ranks"]),
                str(f["rows"]),
                f"{1000 * f['seconds_per_step']:.1f}",
                f"{faster:.2f}",
                f"{faster / f['ranks']:.0%}",
                f"{f['data_share']:.1%}",
                "none" if f["ranks"] == 1 else f"{share:.1%}" if share is not None else "not known",
            ]
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    header = [
        "scaling",
        "ranks",
        "rows per rank",
        "ms per step",
        "throughput",
        "efficiency",
        "waiting for data",
        "communication",
    ]
    print(table(header, rows))
    print(f"Medians over log intervals of {LOG_EVERY} steps, {STEPS} steps each; gloo, one thread per rank.")


if __name__ == "__main__":
    main()
