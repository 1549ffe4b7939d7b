"""Checkpoints against plain files of the same bytes, in one run: the time that the loop waits, until a save is durable, and for loading.

    python -m benchmarks.checkpoint [--size MIB] [--rounds N] [--directory DIR] [--json FILE]

All measurements are inside a fit, one after another: after an update, a hook writes the state with `safetensors.torch.save_file`, makes it
durable and copies it in memory; then the loop saves its checkpoint. Figures are medians of the rounds, [best] beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from benchmarks.tables import machine, table
from fabricate import Callback, Trainer, TrainModule, hookimpl
from fabricate.checkpoint.format.directory import Reader

SHARES = (0.0, 0.5, 0.9)
EPOCH, BATCH = 1_000_000, 5_000
LAYERS = 24


class Wide(TrainModule):
    """`LAYERS` square layers; with AdamW the state is three times the weights. The time of a step is small in comparison."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LAYERS))

    def training_step(self, batch: Any) -> torch.Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class Measures(Callback):
    """Records times around the boundary of each second update, which saves. plain: write files and copies of the same tensors before it.
    pause: seconds to wait in the updates between, so that asynchronous writing is complete before the next save."""

    def __init__(self, directory: Path, plain: bool, pause: float) -> None:
        self.directory, self.plain, self.pause = directory, plain, pause
        self.stopped: list[float] = []
        self.seconds: dict[str, list[float]] = {"safetensors": [], "safetensors, durable": [], "copy": []}
        self.bytes = 0
        self._copies: dict[str, torch.Tensor] = {}
        self._since = 0.0

    @hookimpl
    def train_step(self) -> None:
        if self._since:
            self.stopped.append(time.perf_counter() - self._since)
            self._since = 0.0

    def on_step(self, trainer: Trainer, module: TrainModule, step: int) -> None:
        if step % 2:
            time.sleep(self.pause)
            return
        state = {f"model/{name}": p.detach() for name, p in module.named_parameters()}
        for name, parameter in module.named_parameters():
            moments = trainer.optimizers["main"].state[parameter]
            state |= {f"{key}/{name}": value for key, value in moments.items() if value.ndim}
        self.bytes = sum(value.nbytes for value in state.values())
        if self.plain:
            file = self.directory / "plain.safetensors"
            began = time.perf_counter()
            save_file(state, file)
            self.seconds["safetensors"].append(time.perf_counter() - began)
            durable(file)
            self.seconds["safetensors, durable"].append(time.perf_counter() - began)
            file.unlink()
            settle()
            fresh = not self._copies
            if fresh:
                self._copies = {name: torch.empty_like(value) for name, value in state.items()}
            for _ in range(1 + fresh):  # the first copy writes to new memory
                began = time.perf_counter()
                for name, value in state.items():
                    self._copies[name].copy_(value)
                copied = time.perf_counter() - began
            self.seconds["copy"].append(copied)
        settle()
        self._since = time.perf_counter()


def durable(file: Path) -> None:
    """Make a file and its name durable."""
    for path, flags in ((file, os.O_RDWR), (file.parent, os.O_RDONLY)):
        descriptor = os.open(path, flags)
        os.fsync(descriptor)
        os.close(descriptor)


def settle() -> None:
    """Flush all writes to the disk, so that no measurement includes those of another."""
    os.sync()


def fit(directory: Path, size: int, rounds: int, save: str, pause: float = 0.0) -> tuple[Measures, list[float]]:
    """Save `rounds` times after a first save that is not counted; return the measurements, and the seconds until each save was durable."""
    width = int((size * 2**20 / (3 * 4 * LAYERS)) ** 0.5)
    measures = Measures(directory, save == "sync", pause)
    run_dir = directory / save
    trainer = Trainer(
        max_steps=2 * rounds + 3, save_every=2, save=save, keep=1, run_dir=run_dir, seed=1, progress=False,
        log_every=1000, plugins=[measures],
    )  # fmt: skip
    trainer.fit(Wide(width), TensorDataset(torch.randn(2 * rounds + 3, width)), batch_size=1)
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return measures, [line["seconds"] for line in lines if line["event"] == "saved"]


def loading(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds to read the checkpoint of the fit, and a plain file of the same tensors, from the page cache."""
    (path,) = (directory / "sync" / "checkpoints").glob("step-*")
    plain = directory / "plain.safetensors"
    with Reader(path) as reader:
        names = [name for name, record in reader.manifest.tensors.items() if record.dtype == "F32" and record.shape]
        state = {name: torch.frombuffer(reader.read(name), dtype=torch.float32) for name in names}
    save_file(state, plain)
    times: dict[str, list[float]] = {"safetensors": [], "verified": [], "loaded, every block verified": []}

    def read_plain() -> None:
        for name, value in load_file(plain).items():
            state[name].copy_(value)

    def verify() -> None:
        with Reader(path) as reader:
            reader.verify()

    def read() -> None:
        with Reader(path) as reader:
            for name, value in state.items():
                reader.read_into(name, memoryview(value.numpy()).cast("B"))

    ways: dict[str, Callable[[], None]] = dict(zip(times, (read_plain, verify, read), strict=True))
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


class Small(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class FirstBatch(Callback):
    """The time at which the first backward after a resume has ended."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_accumulate(self) -> None:
        self.at = self.at or time.perf_counter()


def resuming(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds from the call of `fit` to the end of its first backward, by the share of a shuffled epoch that was read before."""
    rows = TensorDataset(torch.randn(EPOCH, 4))
    updates = EPOCH // BATCH
    times: dict[str, list[float]] = {}
    for share in SHARES:
        steps = max(1, int(updates * share))
        run_dir = directory / f"at-{share}"
        common: dict[str, Any] = {"seed": 1, "progress": False, "save_every": None, "log_every": 1000, "keep": 1}
        Trainer(max_steps=steps, run_dir=run_dir, **common).fit(Small(), rows, batch_size=BATCH)
        (path,) = (run_dir / "checkpoints").glob("step-*")
        for _ in range(rounds + 1):
            first = FirstBatch()
            began = time.perf_counter()
            trainer = Trainer(max_steps=steps + 1, plugins=[first], **common)
            trainer.fit(Small(), rows, batch_size=BATCH, resume=path)
            times.setdefault(f"{share:.0%}", []).append(first.at - began)
    return {share: seconds[1:] for share, seconds in times.items()}


def measure(directory: Path, size: int, rounds: int) -> dict[str, Any]:
    """All measurements, in seconds, and the bytes of the state."""
    sync, until = fit(directory, size, rounds, "sync")
    beside, until_beside = fit(directory, size, rounds, "async", pause=3 * max(until))
    seconds = {name: values[1:] for name, values in sync.seconds.items()}
    return {
        "bytes": sync.bytes,
        "rounds": rounds,
        "writing": {
            **seconds,
            "checkpoint": until[1 : rounds + 1],
            "async: the loop stops": beside.stopped[1:],
            "async: until durable": until_beside[1 : rounds + 1],
        },
        "loading": loading(directory, rounds),
        "resuming": resuming(directory, rounds),
    }


def text(figures: dict[str, Any]) -> str:
    """The tables, and the two ratios that are promised."""
    size = figures["bytes"]

    def rows(part: str, of: str) -> list[list[str]]:
        base = statistics.median(figures[part][of])
        return [
            [name, f"{statistics.median(s):.3f} [{min(s):.3f}]", f"{size / statistics.median(s) / 1e9:.2f}",
             f"{statistics.median(s) / base:.2f}"]
            for name, s in figures[part].items()
        ]  # fmt: skip

    paired = {
        "until durable, of a durable safetensors write": ("checkpoint", "safetensors, durable"),
        "the async loop stops, of the copy": ("async: the loop stops", "copy"),
    }
    promises = []
    for name, (ours, theirs) in paired.items():
        ratios = [a / b for a, b in zip(figures["writing"][ours], figures["writing"][theirs], strict=False)]
        promises.append(f"{name}: {statistics.median(ratios):.2f} (rounds: {', '.join(f'{r:.2f}' for r in ratios)})")
    resume = [[f"at {share}", f"{statistics.median(s):.3f} [{min(s):.3f}]"] for share, s in figures["resuming"].items()]
    return "\n".join(
        [
            f"State of {size / 2**20:.0f} MiB, {figures['rounds']} rounds.\n",
            table(["writing", "seconds", "GB/s", "of safetensors, durable"], rows("writing", "safetensors, durable")),
            *(f"- {promise}" for promise in promises),
            "",
            table(["loading", "seconds", "GB/s", "of safetensors"], rows("loading", "safetensors")),
            table([f"resuming in an epoch of {EPOCH:,} samples", "seconds to the first backward"], resume),
        ]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1152, help="MiB of weights and optimizer state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where to write; default: the temporary directory")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder, contextlib.redirect_stdout(io.StringIO()):
        figures = {"machine": machine(), **measure(Path(folder), options.size, options.rounds)}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    print(text(figures))


if __name__ == "__main__":
    main()
