"""The overhead of fabricate on a GPU: four sizes, eager and compiled, compared with the loop by hand, Accelerate and Lightning.

    python -m campaigns.gpu.speed --out figures              # 9 minutes; the sizes that fit into the time
    python -m campaigns.gpu.speed --device cpu               # a rehearsal

The loops of a row alternate. Times are between two events of the device, a number of updates apart, and ratios are within rounds. The loop
by hand runs twice in each round, and the difference of its two runs is the noise. "as a user has it": fabricate with its defaults (a log
line every 10 updates, the progress bar, a run directory) and clipping, compared with a loop by hand that clips and reads the loss every 10
updates.

Passes when, at 124M and larger, fabricate's ratio to by hand is within 1 % or the noise, whichever is larger; when no update
waits for the device more often than by hand; and when both loops train the same weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.loops import forget_accelerator
from campaigns.gpu.gpt import (
    SIZES,
    Recipe,
    Size,
    Trained,
    apart,
    by_hand,
    clean,
    compile_blocks,
    fabricated,
    loss_of,
    vector,
)
from campaigns.gpu.measuring import Host, LeftOut, Report, Window, arguments, device, needs

MOST_APART = 0.2
"""The largest distance between the weights of two loops, relative to the distance from the untrained ones: a GPU's kernels add in any
order, and AdamW makes a whole step for the smallest gradient. With the same batches in another order the distance is 0.9."""
MOST_OVER = 0.01
WARM_UP = 8
Loop = Callable[[Recipe, Host, Window], Trained]


def with_defaults(recipe: Recipe, place: Host, window: Window) -> Trained:
    """Train with fabricate's defaults; it saves at the end of the fit only."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        return fabricated(recipe, place, window, log_every=10, progress=True, run_dir=folder, save_every=None)


def raw_accelerate(recipe: Recipe, place: Host, window: Window) -> Trained:
    """Train as in Accelerate's documentation."""
    from accelerate import Accelerator

    forget_accelerator()
    accelerator = Accelerator(cpu=not place.real, mixed_precision="bf16")
    model: Any = recipe.size.build(place.device)
    compile_blocks(model, recipe.compile)
    model, optimizer, loader = accelerator.prepare(model, recipe.optimizer(model.parameters()), recipe.loader(place))
    model.train()
    for step, (tokens,) in enumerate(loader, 1):
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        if recipe.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        window.updated(step)
    outcome = Trained([], vector(accelerator.unwrap_model(model)))
    forget_accelerator()
    return outcome


def lightning(recipe: Recipe, place: Host, window: Window) -> Trained:
    """Train with Lightning's Trainer, without output."""
    try:
        import lightning.pytorch as library
    except ImportError:
        import pytorch_lightning as library  # the same library with its older name

    class Lit(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gpt = recipe.size.build(place.device)
            compile_blocks(self.gpt, recipe.compile)

        def training_step(self, batch: Any) -> torch.Tensor:
            return loss_of(self.gpt, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return recipe.optimizer(self.parameters())

        def on_train_batch_end(self, *args: Any) -> None:
            window.updated(self.trainer.global_step)

    module = Lit()
    trainer = library.Trainer(
        accelerator="gpu" if place.real else "cpu", devices=1, precision="bf16-mixed", max_steps=recipe.updates,
        gradient_clip_val=recipe.clip, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=10**9, barebones=False,
    )  # fmt: skip
    trainer.fit(module, recipe.loader(place))
    return Trained([], vector(module.gpt))


PEERS: dict[str, tuple[Loop, tuple[tuple[str, ...], ...]]] = {
    "Accelerate": (raw_accelerate, (("accelerate",),)),
    "Lightning": (lightning, (("lightning",), ("pytorch_lightning",))),
}
"""The loops by name, and packages of which one has to be installed."""


def peers() -> dict[str, Loop]:
    """The loops of other frameworks that can be imported here."""
    loops = {}
    for name, (loop, ways) in PEERS.items():
        for way in ways:
            with contextlib.suppress(LeftOut):
                needs(*way)
                loops[name] = loop
    return loops


def compared(place: Host, recipe: Recipe, loops: Mapping[str, Loop], rounds: int, seconds: float) -> dict[str, Any]:
    """Figures by loop. The others are compared with the first loop; "again" is its second run in each round. Ends early if another round
    would not fit into `seconds`."""
    every = {**loops, "again": next(iter(loops.values()))}
    names, whole = list(every), place.clock()
    figures: dict[str, dict[str, Any]] = {name: {"milliseconds": [], "peak_mib": 0.0} for name in names}
    untrained = vector(recipe.size.build(place.device))
    for number in range(rounds):
        began, weights = whole(), {}
        for name in names if number % 2 == 0 else reversed(names):
            window = Window(place, WARM_UP, recipe.updates - WARM_UP - 1)
            weights[name] = every[name](recipe, place, window).weights
            clean(place)
            figures[name]["milliseconds"].append(window.milliseconds)
            figures[name]["peak_mib"] = max(figures[name]["peak_mib"], window.peak / 2**20)
        for name in names:
            distance = apart(weights[name], weights[names[0]], untrained)
            figures[name]["apart"] = max(distance, figures[name].get("apart", 0.0))
        if (whole() + whole() - began) / 1000 > seconds:
            break
    return judged(place, recipe, figures, names)


def judged(place: Host, recipe: Recipe, figures: dict[str, dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The ratios, utilisation and noise, with the failures."""
    hand, failed = figures[names[0]]["milliseconds"], []
    for name, each in figures.items():
        each["of_by_hand"] = statistics.median(a / b for a, b in zip(each["milliseconds"], hand, strict=True))
        rate = recipe.size.flops() * recipe.accumulation / (statistics.median(each["milliseconds"]) / 1000) / 1e12
        each["teraflops"] = rate
        each["mfu"] = rate / place.peak if place.peak is not None else None
        if each["apart"] > MOST_APART and name.startswith(("fabricate", "again")):
            failed.append(f"{name} trained something else: its weights are {each['apart']:.0%} of the way apart")
    noise = max(abs(b / a - 1) for a, b in zip(hand, figures["again"]["milliseconds"], strict=True))
    over = figures["fabricate"]["of_by_hand"] - 1
    if place.real and recipe.size.parameters() > 1e8 and over > max(MOST_OVER, noise):
        failed.append(f"{over:.1%} slower than by hand, the noise is {noise:.1%}")
    return {"loops": figures, "noise": noise, "rounds": len(hand), "failed": failed}


def quiet(
    place: Host, size: str, compile: Mapping[str, Any] | None, rounds: int, updates: int, seconds: float
) -> dict[str, Any]:
    """The figures of the loops without output; other frameworks eager only."""
    recipe = Recipe(SIZES[size], WARM_UP + updates + 1, compile=compile)
    loops: dict[str, Loop] = {"by hand": by_hand, "fabricate": fabricated, **(peers() if compile is None else {})}
    return compared(place, recipe, loops, rounds, seconds)


def usual(place: Host, size: str, rounds: int, updates: int, seconds: float) -> dict[str, Any]:
    """The figures of fabricate with its defaults."""
    recipe = Recipe(SIZES[size], WARM_UP + updates + 1, clip=1.0, read_every=10)
    return compared(place, recipe, {"by hand": by_hand, "fabricate": with_defaults}, rounds, seconds)


def logging(place: Host, size: str, rounds: int, updates: int, seconds: float) -> dict[str, Any]:
    """The cost of the interval of log boundaries with steps of 5 ms."""
    recipe = Recipe(SIZES[size], WARM_UP + updates + 1)
    loops: dict[str, Loop] = {"by hand": by_hand, "fabricate": fabricated}
    for every in (1, 10, 100):
        loops[f"fabricate, log_every={every}"] = functools.partial(fabricated, log_every=every)
    return compared(place, recipe, loops, rounds, seconds)


def waits(place: Host, size: str) -> dict[str, Any]:
    """Waits of the host for the device, and the device's idle share, in one run of each loop."""
    updates, figures = 10, dict[str, Any]()
    recipe = Recipe(SIZES[size], WARM_UP + updates + 1, clip=1.0)
    for name, loop in (("by hand", by_hand), ("fabricate", fabricated)):
        window = Window(place, WARM_UP, updates, waits=True)
        loop(recipe, place, window)
        clean(place)
        figures[name] = {
            "per_update": window.waits.total() / updates,
            "where": dict(window.waits),
            "trace": window.trace,
        }
    extra = figures["fabricate"]["per_update"] - figures["by hand"]["per_update"]
    return figures | {"failed": [f"{extra:g} waits per update more than by hand"] if extra > 0 else []}


def pretrained(place: Host, rounds: int, updates: int, seconds: float) -> dict[str, Any]:
    """The figures of transformers' GPT-2 of the same size, eager, without a target, because its versions change."""
    needs("transformers")
    recipe = Recipe(Pretrained(**dataclasses.asdict(SIZES["124M" if place.real else "tiny"])), WARM_UP + updates + 1)
    return compared(place, recipe, {"by hand": by_hand, "fabricate": fabricated}, rounds, seconds) | {"failed": []}


@dataclasses.dataclass(frozen=True)
class Pretrained(Size):
    """transformers' GPT-2."""

    def build(self, place: torch.device) -> torch.nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        class Logits(GPT2LMHeadModel):  # type: ignore[misc]
            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = super().forward(input_ids=tokens).logits
                return logits

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=self.layers, n_embd=self.width, n_head=self.heads, n_positions=self.length, vocab_size=self.vocabulary,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        config.use_cache = False
        with place:
            return Logits(config)


def main() -> int:
    """Run the measurements that fit into the time; return the exit code."""
    parser = arguments(__doc__, 530)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    place = device(options)
    report = Report("speed", place, options)
    rounds, updates = (options.rounds, 20) if place.real else (1, 2)
    sizes = ("124M", "short", "350M", "1.3B") if place.real else ("tiny",)
    static, dynamic = ({"dynamic": False}, {"dynamic": True}) if place.real else ({"backend": "aot_eager"},) * 2
    first = sizes[0]
    report.case(f"{first}, waits", waits, place, first)
    report.case(f"{first}, eager", quiet, place, first, None, rounds, updates, 60.0, takes=40)
    report.case(f"{first}, as a user has it", usual, place, first, rounds, updates, 30.0, takes=30)
    report.case(f"{first}, compiled, static", quiet, place, first, static, rounds, updates, 60.0, takes=60)
    for size in sizes[1:]:
        report.case(f"{size}, eager", quiet, place, size, None, rounds, updates, 60.0, takes=50)
    report.case(f"{sizes[-1]}, compiled, static", quiet, place, sizes[-1], static, 2, updates, 60.0, takes=80)
    small = "short" if place.real else "tiny"
    report.case(f"{small}, log_every", logging, place, small, rounds, 10 * updates, 30.0, takes=25)
    report.case(f"{first}, compiled, dynamic", quiet, place, first, dynamic, 2, updates, 40.0, takes=60)
    report.case("GPT-2 of transformers, eager", pretrained, place, 2, updates, 20.0, takes=25)
    if place.real:
        tuned = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
        report.case(f"{first}, compiled, max-autotune", quiet, place, first, tuned, 1, updates, 60.0, takes=120)
    rows = []
    for case, figures in report.cases.items():
        for name, each in figures.get("loops", {}).items():
            times, mfu = each["milliseconds"], each["mfu"]
            rows.append(
                [
                    f"{case}: {name}", f"{statistics.median(times):.2f} [{min(times):.2f}]", f"{each['of_by_hand']:.3f}",
                    f"{each['teraflops']:.1f}", f"{mfu:.1%}" if mfu is not None else "", f"{each['peak_mib']:.0f}",
                    f"{each['apart']:.0e}",
                ]
            )  # fmt: skip
    header = [
        "size and loop",
        "ms per update, median [best]",
        "of by hand",
        "model TFLOP/s",
        "MFU",
        "peak MiB",
        "weights apart",
    ]
    return report.end(header, rows)


if __name__ == "__main__":
    sys.exit(main())
