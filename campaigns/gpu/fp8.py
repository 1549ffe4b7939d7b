"""fp8 on a GPU: its speed relative to bf16, the distance of its losses, and a ragged batch.

    python -m campaigns.gpu.fp8 --out figures                # 6 minutes; needs torchao
    python -m campaigns.gpu.fp8 --device cpu                 # a rehearsal: float8 emulated

Passes when the tensorwise recipe, compiled, is at least `LEAST_GAIN` times as fast as bf16 compiled, fabricate costs no more than the
loop by hand with the same conversion, and the mean loss of the last tenth of a training lies within `MOST_APART` of bf16's.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from typing import Any

from campaigns.gpu.gpt import SIZES, Module, Recipe, by_hand, clean, fabricated, trainer
from campaigns.gpu.measuring import Host, Report, Window, arguments, device, needs
from fabricate import ConfigurationError

LEAST_GAIN, MOST_OVER, MOST_APART = 1.2, 1.02, 0.02
RECIPES = ("tensorwise", "rowwise")


def precision(place: Host, recipe: str) -> str:
    """The precision fp8 with its options."""
    return f"fp8:recipe={recipe}" if place.real else f"fp8:recipe={recipe},emulate=true"


def speed(place: Host, size: str, compiled: bool, rounds: int, updates: int) -> dict[str, Any]:
    """Milliseconds per update of bf16 and fp8, by hand and by fabricate."""
    needs("torchao")
    options = ({"dynamic": False} if place.real else {"backend": "aot_eager"}) if compiled else None
    names = ["bf16", *(precision(place, recipe) for recipe in RECIPES)]
    loops = {"by hand": by_hand, "fabricate": fabricated}
    times: dict[str, list[float]] = {f"{name}, {loop}": [] for name in names for loop in loops}
    for number in range(rounds):
        for key in times if number % 2 == 0 else reversed(times):
            name, _, loop = key.rpartition(", ")
            recipe, window = Recipe(SIZES[size], updates + 7, name, compile=options), Window(place, 5, updates)
            loops[loop](recipe, place, window)
            clean(place)
            times[key].append(window.milliseconds)
    base, failed = times["bf16, fabricate"], []
    ratios = {key: statistics.median(b / a for a, b in zip(own, base, strict=True)) for key, own in times.items()}
    first = f"{names[1]}, fabricate"
    if place.real and compiled and ratios[first] < LEAST_GAIN:
        failed.append(f"{ratios[first]:.2f} times as fast as bf16, {LEAST_GAIN} expected")
    for name in names:
        own, hand = times[f"{name}, fabricate"], times[f"{name}, by hand"]
        over = statistics.median(a / b for a, b in zip(own, hand, strict=True))
        if place.real and over > MOST_OVER:
            failed.append(f"{name}: {over:.3f} of by hand")
    return {"milliseconds": times, "of_bf16": ratios, "failed": failed}


def learning(place: Host, updates: int) -> dict[str, Any]:
    """The mean loss of the last tenth of the same training, in bf16 and fp8."""
    needs("torchao")
    size, last = SIZES["short" if place.real else "tiny"], max(1, updates // 10)
    size, means = dataclasses.replace(size, vocabulary=1024 if place.real else 128), {}
    for name in ("bf16", *(precision(place, recipe) for recipe in RECIPES)):
        losses = fabricated(Recipe(size, updates, name, lr=1e-3), place, losses=True).losses
        means[name], first = sum(losses[-last:]) / last, losses[0]
        clean(place)
    failed = [
        f"{n}: loss {m:.4f}, bf16 {means['bf16']:.4f}"
        for n, m in means.items()
        if abs(m / means["bf16"] - 1) > MOST_APART
    ]
    return {"first": first, "loss": means, "failed": failed}


def ragged(place: Host) -> dict[str, Any]:
    """A last batch whose number of rows is not a multiple of 16 is trained, or an error names the reason."""
    needs("torchao")
    size = dataclasses.replace(SIZES["tiny"], length=31, rows=16)
    recipe = Recipe(size, 3, precision(place, "tensorwise"), rows=16 * 2 + 3)
    try:
        trainer(recipe).fit(Module(recipe, place.device), recipe.loader(place))
    except ConfigurationError as exc:
        return {"refused": str(exc)}
    except RuntimeError as exc:
        helps = "16" in str(exc) or any("16" in note for note in getattr(exc, "__notes__", ()))
        return {"error": str(exc)[:500], "failed": [] if helps else ["the error does not say what sizes fp8 needs"]}
    return {"trained": True}


def main() -> int:
    """Run the cases; return the exit code."""
    options = arguments(__doc__, 360).parse_args()
    place = device(options)
    report = Report("fp8", place, options)
    size, rounds, updates = ("1.3B", 3, 10) if place.real else ("tiny", 1, 2)
    report.case("ragged batch", ragged, place, takes=20)
    report.case(f"{size}, compiled", speed, place, size, True, rounds, updates, takes=150)
    report.case("losses", learning, place, 300 if place.real else 20, takes=60)
    report.case(f"{size}, eager", speed, place, size, False, 2, updates, takes=90)
    rows = [
        [f"{case}: {name}", f"{statistics.median(times):.2f}", f"{figures['of_bf16'][name]:.2f}"]
        for case, figures in report.cases.items()
        for name, times in figures.get("milliseconds", {}).items()
    ]
    rows += [[f"losses: {n}", f"{loss:.4f}", ""] for n, loss in report.cases.get("losses", {}).get("loss", {}).items()]
    return report.end(["size and loop", "ms per update, or loss", "times as fast as bf16"], rows)


if __name__ == "__main__":
    sys.exit(main())
