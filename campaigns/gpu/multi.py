"""Campaigns that need several GPUs: a rank that dies while the others wait for the device, scaling, the cost of communication.

    python -m campaigns.gpu.multi --out figures              # on every GPU that torch sees
    python -m campaigns.gpu.multi --device cpu               # a rehearsal with two ranks

Ranks are started without torchrun, which would end the other ranks when one dies; here they have to notice it. Passes when every other rank
ends within `MOST_SECONDS` of the kill with an error that names the dead rank, and weak scaling keeps `LEAST_EFFICIENCY`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from campaigns.gpu import ROOT
from campaigns.gpu.gpt import SIZES, Module, Recipe, strategy_of, trainer
from campaigns.gpu.measuring import Cuda, Host, Report, Window, arguments, device, emit, emitted
from fabricate import Callback, Trainer

MOST_SECONDS, LEAST_EFFICIENCY = 60.0, 0.9
MOMENTS = ("forward", "log", "save")
KILL_AT, BUFFER = 5, 2**26


class Killed(Callback):
    """Kills the process of the last rank at `moment`, like a loss of power."""

    def __init__(self, moment: str, mark: Path) -> None:
        self._moment, self._mark, self._armed = moment, mark, False

    def _now(self, moment: str) -> None:
        if self._armed and moment == self._moment and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            self._mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(self, step: int) -> None:
        self._armed = step >= KILL_AT

    def on_accumulate(self) -> None:
        self._now("forward")

    def on_log(self) -> None:
        self._now("log")

    def on_save(self) -> None:
        self._now("save")


def ranks(count: int, seconds: float, *arguments: str) -> list[tuple[int, float, str]]:
    """Start `count` ranks of this script; return the exit code, the time of the end and the output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, processes = [sys.executable, "-m", "campaigns.gpu.multi", *arguments], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            place = {
                "RANK": number,
                "LOCAL_RANK": number,
                "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_PORT": port,
            }
            variables = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                **{k: str(v) for k, v in place.items()},
            }
            with Path(folder, f"{number}.log").open("w") as log:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log))
        ended, deadline = [0.0] * count, time.time() + seconds
        while not all(ended) and time.time() < deadline:
            for number, process in enumerate(processes):
                if not ended[number] and process.poll() is not None:
                    ended[number] = time.time()
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.wait()
        return [
            (p.returncode, end, Path(folder, f"{n}.log").read_text())
            for n, (p, end) in enumerate(zip(processes, ended, strict=True))
        ]


def killed(place: Host, count: int, strategy: str, moment: str) -> dict[str, Any]:
    """Kill the last rank, and check how the others end."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "mark")
        rest = ["--device", place.kind, "--kill", moment, strategy, folder]
        ended = ranks(count, 150, *rest)
        if not mark.exists():
            return {"failed": ["the rank was not killed"], "output": [output[-2000:] for _, _, output in ended]}
        at, gone = float(mark.read_text()), f"rank {count - 1}"
    others, failed = ended[:-1], []
    seconds = [round(end - at, 1) if end else None for _, end, _ in others]
    for number, (code, end, output) in enumerate(others):
        if not end or end - at > MOST_SECONDS:
            failed.append(f"rank {number} did not end within {MOST_SECONDS:.0f} s")
        elif not code:
            failed.append(f"rank {number} ended with exit code 0")
        elif gone not in output:
            failed.append(f"rank {number} does not say that {gone} is gone")
    return {"seconds_to_end": seconds, "said": [output[-600:] for _, _, output in others], "failed": failed}


def scaling(place: Host, counts: list[int], strategy: str, size: str) -> dict[str, Any]:
    """Milliseconds per update for increasing numbers of ranks with the same rows per rank, and of an all-reduce of 256 MiB."""
    figures: dict[str, Any] = {}
    for count in counts:
        ended = ranks(count, 200, "--device", place.kind, "--scale", strategy, size)
        figures[str(count)] = emitted(ended[0][2])
        if not figures[str(count)]:
            return {
                "failed": [f"{count} ranks: exit codes {[code for code, _, _ in ended]}"],
                "output": ended[0][2][-3000:],
            }
    first = figures[str(counts[0])]["milliseconds"]
    efficiency = {count: first / each["milliseconds"] for count, each in figures.items()}
    lowest = min(efficiency.values())
    failed = (
        [f"efficiency {lowest:.2f}, expected {LEAST_EFFICIENCY}"] if place.real and lowest < LEAST_EFFICIENCY else []
    )
    return {"ranks": figures, "efficiency": efficiency, "failed": failed}


def be_killed(place: Host, moment: str, strategy: str, folder: str) -> None:
    """Run one rank of `killed`."""
    recipe = Recipe(SIZES["short" if place.real else "tiny"], 200, "bf16")
    fitted = trainer(
        recipe, strategy=strategy_of(strategy), log_every=4, save_every=6, run_dir=Path(folder, "run"), timeout="2 minutes",
        plugins=[Killed(moment, Path(folder, "mark"))],
    )  # fmt: skip
    fitted.fit(Module(recipe, torch.device("cpu")), recipe.data(), batch_size=recipe.size.rows)


class Shares(Callback):
    """Records the newest rates, including the share of communication if the strategy measures it."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def on_log(self, trainer: Trainer) -> None:
        self.rates = trainer.rates


def be_scaled(place: Host, strategy: str, size: str) -> None:
    """Run one rank of `scaling`; rank 0 prints the figures."""
    updates, count = (30, int(os.environ["WORLD_SIZE"])) if place.real else (4, int(os.environ["WORLD_SIZE"]))
    recipe, window, shares = Recipe(SIZES[size], updates + 9), Window(place, 6, updates), Shares()
    data = recipe.size.data(recipe.updates * count)
    alone = "single" if count == 1 else strategy
    with contextlib.redirect_stdout(io.StringIO()):
        fitted = trainer(recipe, strategy=strategy_of(alone), log_every=8, plugins=[shares])
        fitted.fit(Module(recipe, place.device, window), data, batch_size=recipe.size.rows, shuffle=False)
    figures: dict[str, Any] = {"milliseconds": window.milliseconds, "rates": shares.rates}
    if count > 1:
        numbers = torch.ones(BUFFER if place.real else 1024, device=place.device)
        dist.all_reduce(numbers)
        read = place.clock()
        for _ in range(10):
            dist.all_reduce(numbers)
        seconds = read() / 10_000
        figures["bus_gigabytes_per_second"] = numbers.nbytes * 2 * (count - 1) / count / seconds / 1e9
    if os.environ["RANK"] == "0":
        emit(figures)


class Own(Cuda):
    """The GPU of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)


def main() -> int:
    """Run the cases; return the exit code."""
    parser = arguments(__doc__, 1500)
    parser.add_argument("--kill", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--scale", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = device(options)
    if options.kill or options.scale:
        own = Own() if place.real else place
        be_killed(own, *options.kill) if options.kill else be_scaled(own, *options.scale)
        return 0
    count = torch.cuda.device_count() if place.real else 2
    if count < 2:
        print("not run: several GPUs are needed, torch sees one", file=sys.stderr)
        return 2
    report = Report("multi", place, options)
    for strategy in ("ddp", "fsdp") if place.real else ("ddp",):
        for moment in MOMENTS if place.real else MOMENTS[-1:]:
            report.case(f"{strategy}, killed in {moment}", killed, place, count, strategy, moment, takes=150)
    counts = [number for number in (1, 2, 4, 8, 16) if number <= count]
    for strategy in ("ddp", "fsdp") if place.real else ("ddp",):
        size = "124M" if place.real else "tiny"
        report.case(f"{strategy}, weak scaling", scaling, place, counts, strategy, size, takes=60 * len(counts))
    rows = []
    for name, figures in report.cases.items():
        figure = figures.get("seconds_to_end") or figures.get("efficiency") or ""
        rows.append([name, str(figure), "" if figures.get("failed") else "yes"])
    return report.end(["case", "seconds until the others end, or efficiency by ranks", "as it should be"], rows)


if __name__ == "__main__":
    sys.exit(main())
