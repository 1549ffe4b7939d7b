"""Compares Accelerate's examples/by_feature, unmodified, with the methods of examples/transformers/by_feature.py.

    python -m campaigns.by_feature --source CHECKOUT                               # of the repository of Accelerate
    python -m campaigns.by_feature --source CHECKOUT --out docs/from-accelerate.md

The exit code is 1 if a loss, the weights or a metric differ without a known reason.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import accelerate
import torch

from campaigns.by_feature.cases import CASES
from campaigns.by_feature.sides import LANGUAGE, Outcome, by_accelerate, by_fabricate, start, write_hub
from fabricate.testing import close_pools

HEADING = "## Accelerate's examples by feature\n"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """A line of the table. name: of the example or its variant. losses: the largest relative difference among those expected to be equal.
    all_losses: the same over all losses. weights: the distance at the end, relative to the distance from the start."""

    name: str
    count: str
    losses: float
    all_losses: float
    weights: float
    metrics: tuple[str, str]
    faults: list[str]


def apart(ours: list[float], theirs: list[float]) -> float:
    return max((abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def compared(name: str, label: str, ours: Outcome, theirs: Outcome, first: dict[str, torch.Tensor]) -> Row:
    """The line of the table for a case."""
    case, shared = CASES[name], min(len(ours.losses), len(theirs.losses))
    equal = shared if case.equal is None else case.equal
    near, far = apart(ours.losses[:equal], theirs.losses[:equal]), apart(ours.losses[:shared], theirs.losses[:shared])
    way = _norm(first, theirs.weights)
    weights = _norm(ours.weights, theirs.weights) / way
    names = [metric for metric in ("accuracy", "f1") if metric in theirs.metrics and metric in ours.metrics]
    metrics = [", ".join(f"{n} {each.metrics[n]:.4f}" for n in names) for each in (theirs, ours)]
    return Row(label, str(len(ours.losses) // (2 if name == LANGUAGE else 1)), near, far, weights, (metrics[0], metrics[1]),
               list(_wrong(label, case.reason, ours, theirs, near, weights, metrics)))  # fmt: skip


def _wrong(
    label: str, reason: str, ours: Outcome, theirs: Outcome, near: float, weights: float, metrics: list[str]
) -> Iterator[str]:
    if near > TOLERANCE:
        yield f"{label}: a loss differs by {near:.1e}"
    if len(ours.losses) != len(theirs.losses) and not reason:
        yield f"{label}: {len(ours.losses)} and {len(theirs.losses)} losses"
    if weights > 1e-2 and not reason:
        yield f"{label}: the weights differ by {weights:.1e} of their way"
    if metrics[0] != metrics[1]:
        yield f"{label}: {metrics[0]} by Accelerate, {metrics[1]} by fabricate"


def _norm(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(left[n].double() - right[n].double()).norm() for n in right]).norm())


def observe(name: str, source: Path) -> Iterator[Row]:
    """The lines of the table for a case."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_hub(folder, CASES[name].rows)
        first = start(folder, name)
        theirs = by_accelerate(name, folder, source)
        if name != "checkpointing":
            yield compared(name, name, by_fabricate(name, folder), theirs, first)
            return
        begun, ended = by_fabricate(name, folder, stop_after=1), by_fabricate(name, folder)
        ours = Outcome(begun.losses + ended.losses, ended.weights, ended.metrics)
        yield compared(name, f"{name}, only fabricate's run resumed after an epoch", ours, theirs, first)
        resumed = by_accelerate(name, folder, source, "--resume_from_checkpoint", "epoch_0")
        yield compared(name, f"{name}, both resumed after an epoch", ended, resumed, first)


def table(rows: list[tuple[str, Row]]) -> str:
    heads = ["example", "with fabricate", "losses", "differ by at most", "weights"]
    heads += ["metrics: theirs", "ours", "why they differ"]
    lines = [heads, ["---"] * len(heads)]
    for name, row in rows:
        case = CASES[name]
        losses = f"{row.losses:.1e}"
        if case.equal is not None:
            losses += f" in the first {case.equal}, {row.all_losses:.1e} in all"
        label = f"`{name}`{row.name.removeprefix(name)}"
        lines.append([label, case.does, row.count, losses, f"{row.weights:.1e}", *row.metrics, case.reason])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(text: str, source: Path) -> str:
    """The text below `HEADING` of the page."""
    init = (source / "src" / "accelerate" / "__init__.py").read_text(encoding="utf-8")
    version = (re.findall(r'__version__ = "(.+)"', init) or ["?"])[0]
    return f"""
`python -m campaigns.by_feature --source CHECKOUT --out docs/from-accelerate.md` wrote this table. It ran the unmodified
examples of the repository at {version} on a CPU, with accelerate {accelerate.__version__}. `examples/transformers/by_feature.py` has a
method of one to ten lines for each of them; Accelerate's scripts have 228 to 343 lines.

Both sides get the same tiny model without dropout, the same rows in the same order, the same batches and the same
schedule. The column "differ by at most" gives the largest relative difference of a loss over all micro-batches. For the
language model, it gives the largest difference over all updates, of the loss and of the gradient's norm. "Weights" is
the distance between the final weights of the two sides, divided by the distance between Accelerate's initial and final
weights.

{text}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--source", type=Path, required=True, help="a checkout of the repository of Accelerate")
    parser.add_argument("--out", type=Path, help="the page whose table is written")
    options = parser.parse_args()
    rows = []
    for name in options.examples or CASES:
        for row in observe(name, options.source.resolve()):
            rows.append((name, row))
            print(row, flush=True)
    close_pools()
    text, faults = table(rows), [fault for _, row in rows for fault in row.faults]
    print(text, *faults, sep="\n")
    if options.out is not None:
        page = options.out.read_text(encoding="utf-8")
        before, heading, after = page.partition(HEADING)
        rest = after.partition("\n## ")
        options.out.write_text(f"{before}{heading}{section(text, options.source)}{rest[1]}{rest[2]}", encoding="utf-8")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
