"""The two tables of docs/lightning.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from campaigns.lightning.cases import CASES

HEADING = "## Public code that was run\n"
INTRODUCTION = """
`python -m campaigns.lightning --source CHECKOUT --out docs/lightning.md` wrote this part. The classes are unmodified;
data and pretrained models are small ones made for this comparison. Lightning and fabricate train each case from the
same weights, with the same order of rows. The table gives the largest relative difference of a training loss, the
largest difference of a weight (relative to the largest value of its tensor), and the largest difference of a value that
was logged, evaluated or predicted. *Own data* is the number of updates in a fit with the loaders or the data module of
the original code, which shuffle.
"""
RESUMED = """
### Killed and resumed

The same code trains with its own data and saves every second update. It is killed (SIGKILL) after the update that the
table names, before the next one, and resumed from its last checkpoint. The final weights are compared with those of a
fit that was never interrupted. The table shows how many tensors of the module differ, and by how much.
"""


def write(path: Path, ran: Mapping[str, Any], went_on: Mapping[str, Any], at: Mapping[str, int]) -> None:
    """Write both tables below the heading of the page."""
    before, heading, _ = path.read_text(encoding="utf-8").partition(HEADING)
    lines = [before + heading.rstrip("\n"), INTRODUCTION, *_rows(ran), RESUMED, *_resumed(went_on, at), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _rows(ran: Mapping[str, Any]) -> Iterator[str]:
    yield "| code | from | updates | losses differ by | weights differ by | metrics differ by | own data |"
    yield "|---|---|---|---|---|---|---|"
    for case in CASES:
        if (result := ran.get(case.name)) is None:
            continue
        name = f"{case.name} ({case.note})" if case.note else case.name
        source = f"{case.repository} `{case.file.rpartition('/')[2]}`"
        if why := result.get("missing_package") or result.get("refused"):
            yield f"| {name} | {source} | {'not run' if 'missing_package' in result else 'refused'}: {why} | | | | |"
        else:
            figures = " | ".join(_figure(result.get(what)) for what in ("losses", "weights", "metrics"))
            yield f"| {name} | {source} | {result.get('steps', '')} | {figures} | {result['own'] or 'the same'} |"


def _figure(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def _resumed(went_on: Mapping[str, Any], at: Mapping[str, int]) -> Iterator[str]:
    yield "| code | killed after update | under Lightning | under fabricate |"
    yield "|---|---|---|---|"
    for name, results in went_on.items():
        cells = " | ".join(_outcome(results[by]) for by in ("lightning", "fabricate"))
        yield f"| {name} | {at[name]} | {cells} |"


def _outcome(result: Mapping[str, Any]) -> str:
    if "failed" in result:
        return result["failed"]
    if not result["differ"]:
        return "the same bits"
    return f"{result['differ']} of {result['tensors']} tensors differ, by up to {result['apart']:.0%}"
