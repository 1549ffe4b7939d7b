"""GPT-2 on a GPU: model FLOPs utilisation, memory and host synchronisations, fabricate beside a loop by hand in one process.

    python -m benchmarks.gpu                                                      # GPT-2 small in bf16, about ten minutes
    python -m benchmarks.gpu --size tiny --updates 4 --rounds 1 --backend aot_eager      # the same code where there is no GPU

Both loops train the same model on the same tokens with fused AdamW under bf16 autocast, eager and with compiled blocks, and
alternate. Counted is wall-clock time from one synchronisation with the device to the next, `--updates` updates apart; between
the two, anything that makes the host wait for the GPU is an error (`torch.cuda.set_sync_debug_mode`). Without a GPU nothing is
said of utilisation, memory or synchronisations: such a run shows that the script works, no more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.tables import machine, table
from fabricate import Trainer, TrainModule

PEAKS = {"H200": 989.0, "H100 80GB": 989.0, "GH200": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "4090": 165.0}
"""Dense bf16 TFLOP/s by a part of the device's name, from the makers' data sheets; for others pass --peak."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT-2 without dropout, and the rows of a batch."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    rows: int

    def build(self) -> GPT2LMHeadModel:
        """The same weights every time, on the CPU."""
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=self.layers, n_embd=self.width, n_head=self.heads, n_positions=self.length, vocab_size=self.vocabulary,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        config.use_cache = False
        return GPT2LMHeadModel(config)

    def data(self, updates: int) -> TensorDataset:
        """Random tokens, (rows, length + 1), int64."""
        generator = torch.Generator().manual_seed(1)
        shape = (updates * self.rows, self.length + 1)
        return TensorDataset(torch.randint(self.vocabulary, shape, generator=generator))

    def flops(self) -> float:
        """Of one update: 6 per token and weight (position embeddings are looked up, not multiplied) and 12 per token, layer,
        position and width for attention, recomputation not counted (PaLM, arXiv:2204.02311, appendix B)."""
        weights = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        each = 6 * weights + 12 * self.layers * self.length * self.width
        return float(each * self.rows * self.length)


SIZES = {
    "small": Size(
        layers=12, width=768, heads=12, length=1024, vocabulary=50304, rows=16
    ),  # 50257 up to a multiple of 128
    "tiny": Size(layers=2, width=16, heads=2, length=8, vocabulary=32, rows=2),
}


MOST_APART = 0.2
"""Between the weights of two loops, of the way from the untrained ones: a GPU's kernels add up in any order, and AdamW makes a
whole step of the smallest gradient. The same batches in another order are 0.9 apart."""


class Steady:
    """Called after each update: times `updates` of them from the `warm_up`-th on, in which nothing may wait for the device."""

    def __init__(self, device: torch.device, warm_up: int, updates: int) -> None:
        self._cuda = device.type == "cuda"
        self._first, self._last = warm_up, warm_up + updates
        self._began = 0.0
        self.milliseconds = 0.0
        """Per update."""
        self.peak_mib = 0.0
        """Most memory that tensors had on the device meanwhile."""

    def updated(self, step: int) -> None:
        """Update `step`, from 1, is queued."""
        if step == self._first:
            if self._cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.set_sync_debug_mode("error")
            self._began = time.perf_counter()
        elif step == self._last:
            if self._cuda:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                self.peak_mib = torch.cuda.max_memory_allocated() / 2**20
            self.milliseconds = 1000 * (time.perf_counter() - self._began) / (self._last - self._first)


Loop = Callable[[Size, torch.device, Steady, int, str | None], torch.nn.Module]
"""Trains that many updates, blocks compiled by that backend if one is given; returns the model."""


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the next token; `tokens`: (rows, length + 1)."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The same for both."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)


def by_hand(size: Size, device: torch.device, steady: Steady, updates: int, backend: str | None) -> torch.nn.Module:
    """What one would write for one GPU."""
    model = size.build().to(device)
    if backend is not None:
        for block in model.transformer.h:
            block.compile(backend=backend, dynamic=None)
    optimizer = optimizer_of(model)
    model.train()
    loader = DataLoader(size.data(updates), batch_size=size.rows, pin_memory=device.type == "cuda")
    for step, (batch,) in enumerate(loader, 1):
        tokens = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steady.updated(step)
    return model


class Module(TrainModule):
    """The same model as a TrainModule."""

    def __init__(self, size: Size, steady: Steady) -> None:
        super().__init__()
        self.gpt = size.build()
        self._steady = steady

    def training_step(self, batch: Any) -> torch.Tensor:
        return loss_of(self.gpt, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)

    def on_step(self, step: int) -> None:
        self._steady.updated(step)


def fabricated(size: Size, device: torch.device, steady: Steady, updates: int, backend: str | None) -> torch.nn.Module:
    """fabricate, quiet; no log boundary falls into the counted updates."""
    module = Module(size, steady)
    trainer = Trainer(
        max_steps=updates,
        precision="bf16",
        strategy="single",
        compile={"backend": backend} if backend is not None else False,
        log_every=10**9,
        progress=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the plan
        trainer.fit(module, DataLoader(size.data(updates), batch_size=size.rows, pin_memory=device.type == "cuda"))
    return module.gpt


LOOPS: dict[str, tuple[Loop, bool]] = {
    "by hand, eager": (by_hand, False),
    "fabricate, eager": (fabricated, False),
    "by hand, blocks compiled": (by_hand, True),
    "fabricate, compile=True": (fabricated, True),
}


def measure(
    size: Size, device: torch.device, rounds: int, warm_up: int, updates: int, backend: str
) -> dict[str, dict[str, Any]]:
    """Figures by loop. Raises when fabricate trained other weights than the loop by hand beside it."""
    found: dict[str, dict[str, Any]] = {name: {"milliseconds": [], "peak_mib": 0.0} for name in LOOPS}
    names = list(LOOPS)
    untrained = _weights(size.build())
    for number in range(rounds):
        weights: dict[tuple[Loop, bool], torch.Tensor] = {}
        for name in names if number % 2 == 0 else reversed(names):
            loop, compiled = LOOPS[name]
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            steady = Steady(device, warm_up, updates)
            # One update more than is counted: what a loop does at its end is no part of it.
            try:
                model = loop(size, device, steady, warm_up + updates + 1, backend if compiled else None)
            finally:
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            weights[loop, compiled] = _weights(model)
            found[name]["milliseconds"].append(steady.milliseconds)
            found[name]["peak_mib"] = max(found[name]["peak_mib"], steady.peak_mib)
            del model
        for name, (loop, compiled) in LOOPS.items():
            hand = weights[by_hand, compiled]
            apart = float((weights[loop, compiled] - hand).norm() / (hand - untrained).norm())
            found[name]["apart"] = max(apart, found[name].get("apart", 0.0))
            if apart > MOST_APART:
                raise SystemExit(f"{name} trained something else: its weights are {apart:.0%} of the way apart")
    return found


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def main() -> None:
    """Measure and print the table; exit code 1 when a GPU was measured and a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=10, help="updates before those that are counted")
    parser.add_argument("--updates", type=int, default=30, help="that are counted")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--peak", type=float, help="the device's dense bf16 TFLOP/s, where its name does not tell")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size: Size = SIZES[options.size]
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    peak = options.peak or next((peak for part, peak in PEAKS.items() if part in device_name), None)
    found = measure(size, device, options.rounds, options.warm_up, options.updates, options.backend)
    rows, missed = [], []
    for name, figures in found.items():
        times = figures["milliseconds"]
        hand = found["by hand, blocks compiled" if LOOPS[name][1] else "by hand, eager"]
        figures["of_by_hand"] = statistics.median(a / b for a, b in zip(times, hand["milliseconds"], strict=True))
        rate = size.flops() / (statistics.median(times) / 1000) / 1e12
        figures["mfu"] = rate / peak if peak is not None else None
        memory = figures["peak_mib"] / hand["peak_mib"] if hand["peak_mib"] else None
        if device.type == "cuda" and (figures["of_by_hand"] > 1.01 or (memory or 0) > 1.01):
            missed.append(name)
        rows.append(
            [
                name,
                f"{statistics.median(times):.2f} [{min(times):.2f}]",
                f"{figures['of_by_hand']:.3f}",
                f"{rate:.1f}" if device.type == "cuda" else "",
                f"{figures['mfu']:.1%}" if figures["mfu"] is not None else "",
                f"{figures['peak_mib']:.0f}" if device.type == "cuda" else "",
                f"{figures['apart']:.0e}" if figures["apart"] else "bit-identical",
            ]
        )
    header = [
        "loop",
        "ms per update, median [best]",
        "of by hand",
        "model TFLOP/s",
        "MFU",
        "peak MiB",
        "weights apart",
    ]
    print(table(header, rows))
    waits = (
        "nothing waited for the device"
        if device.type == "cuda"
        else "a rehearsal: no figure here says anything of a GPU"
    )
    print(
        f"GPT-2 {options.size}, {size.rows} x {size.length} tokens, bf16; {options.rounds} rounds of {options.updates} counted "
        f"updates; {device_name}{f', {peak:g} TFLOP/s dense bf16' if peak else ''}; {waits}."
    )
    if options.json:
        results = {"device": device_name, "machine": machine(), "peak_tflops": peak, "loops": found}
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if missed:
        sys.exit(f"more than 1% slower or larger than by hand: {', '.join(missed)}")


if __name__ == "__main__":
    main()
