"""The tables of the comparison, and the faults in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from campaigns.transformers_scripts.cases import CASES, TOLERANCE
from campaigns.transformers_scripts.sides import EXAMPLES, Outcome

HEADING = "## Five scripts, side by side\n"


@dataclass(frozen=True)
class Row:
    """The outcomes of a case on each side; `script` is that of transformers' script, if a checkout was given."""

    name: str
    ours: Outcome
    trainer: Outcome
    script: Outcome | None


def distance(ours: Outcome, theirs: Outcome) -> float:
    """The largest relative difference of the loss of an update."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))


def wrong(row: Row) -> Iterator[str]:
    """The differences without a known reason."""
    case = CASES[row.name]
    for side, theirs in (("transformers.Trainer", row.trainer), ("the script", row.script)):
        if theirs is None:
            continue
        if len(theirs.losses) != len(row.ours.losses):
            yield f"{row.name}: {side} made {len(theirs.losses)} updates, fabricate {len(row.ours.losses)}"
            continue
        first = abs(theirs.losses[0] - case.factor * row.ours.losses[0]) / abs(theirs.losses[0])
        if first > TOLERANCE or (case.factor == 1 and distance(row.ours, theirs) > TOLERANCE):
            yield f"{row.name}: a loss of {side} differs by {max(first, distance(row.ours, theirs)):.1e}"
        for metric in set(case.metrics) - set(case.unequal):
            here, there = row.ours.metrics[metric], theirs.metrics[metric]
            if abs(here - there) > 1e-4 * max(abs(there), 1):  # transformers' scripts round some
                yield f"{row.name}: {metric} is {there} by {side}, {here} by fabricate"


def lines_of(name: str, source: Path | None) -> tuple[str, int]:
    """The numbers of lines of transformers' script, with its imports from its folder, and of fabricate's."""
    case = CASES[name]
    ours = len((EXAMPLES / f"{case.script}.py").read_text(encoding="utf-8").splitlines())
    if source is None:
        return "-", ours
    folder = source / "examples" / "pytorch" / case.folder
    files = [folder / file for file in (f"{case.script}.py", *case.others)]
    return str(sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)), ours


def table(rows: Sequence[Row], source: Path | None) -> str:
    """The tables in Markdown."""
    heads = ["script", "lines, theirs", "lines, ours", "updates", "a loss differs by at most: `transformers.Trainer`"]
    heads += ["their script", "metrics at the end: theirs", "ours", "what differs, and why"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        case = CASES[row.name]
        theirs, ours = lines_of(row.name, source)
        script = "-" if row.script is None else f"{distance(row.ours, row.script):.1e}"
        metrics = [
            ", ".join(f"{metric} {side.metrics[metric]:.5g}" for metric in case.metrics)
            for side in (row.trainer, row.ours)
        ]
        cells = [f"`{case.script}`{row.name.removeprefix(case.script)}", theirs, str(ours), str(len(row.ours.losses))]
        lines.append([*cells, f"{distance(row.ours, row.trainer):.1e}", script, *metrics, case.reason])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(text: str, source: Path) -> str:
    """The text below `HEADING` of the page."""
    init = (source / "src" / "transformers" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "(.+)"', init)
    version = match[1] if match else "?"
    return f"""
`python -m campaigns.transformers_scripts --source CHECKOUT --out docs/from-transformers.md` wrote this table:
transformers {transformers.__version__}, the scripts of the repository at {version}, one process on a CPU. `examples/transformers` has a
fabricate version of each script, which accepts the same command line.

Three programs are compared: our script; `transformers.Trainer` with the model and data of our script; and transformers'
own script, unmodified. All get the same command line, the same model (tiny, without dropout) and the same data in the
same order. In `run_mlm`, all three derive the masks from the tokens of the batch. The table gives the largest relative
difference over all updates. Line counts are for whole files; for `run_qa` they include `trainer_qa.py` and
`utils_qa.py`, which transformers' script needs. `tiny.py`, which builds the tiny models, is not counted.

{text}
"""
