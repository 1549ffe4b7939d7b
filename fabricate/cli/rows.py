"""`fabricate rows`: the rows that made a step of a run, and the steps that saw a row.

Owns the options and the output. Must not know: how the order is computed (`recorded.rows`). Imports torch only if a script is run for its
data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fabricate.cli.recorded.files import read_run
from fabricate.cli.recorded.rows import Fit, Orders, Part, fits, recorded_order, rows_of_step, uses_of_row
from fabricate.cli.tables import print_table
from fabricate.errors import ConfigurationError

_LONGEST = 300
"""The maximum number of characters of a row's text."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(1), metavar="N", help="The rows that made step N.")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Only those of rank R.")
@click.option("--row", metavar="K", help="The steps that saw row K.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument(
    "script", metavar="[SCRIPT]", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def rows(
    run_dir: Path,
    step: int | None,
    rank: int | None,
    row: str | None,
    as_json: bool,
    script: Path | None,
    arguments: Sequence[str],
) -> None:
    """Show which rows of the training data made step N of the run in RUN_DIR, or which steps saw row K.

    The order of the data is a function of the seed and the position, so it is computed; nothing is logged for it. Resumes, other
    numbers of ranks in between, accumulation and skipped updates are taken into account. With SCRIPT the rows themselves are shown:
    it is run up to its first fit, which gives its data and trains nothing. An order that a sampler of the script's draws needs it.

    \b
    Examples:
      fabricate rows runs/first --step 500
      fabricate rows runs/first --step 500 --rank 1 train.py --epochs 3
      fabricate rows runs/first --row 1234
    """
    if (step is None) == (row is None):
        raise ConfigurationError(
            "fabricate rows: give --step N for the rows of a step, or --row K for the steps of a row"
        )
    if row is not None and rank is not None:
        raise ConfigurationError("--rank needs --step; --row already shows the rank that read the row")
    recorded = fits(read_run(run_dir), sampler=script is not None)
    data = _Data(script, arguments, _described(recorded, step)) if script is not None else None
    orders: Orders = recorded_order if data is None else data.order
    shown = _of_row(recorded, row, orders) if row is not None else _of_step(recorded, step or 0, rank, orders)
    numbers = [shown["row"]] if row is not None else [number for part in shown["parts"] for number in part["rows"]]
    if data is not None:
        shown["data"] = data.texts(numbers, shown.get("epoch", 0))
        for note in data.notes:
            click.echo(f"note: {note}", err=True)
    if as_json:
        click.echo(json.dumps(shown, indent=1))
    else:
        _print(shown)


def _described(recorded: list[Fit], step: int | None) -> Mapping[str, Any]:
    """The description of the data that made a step; without a step, of the last fit's data."""
    made = (fit.data for fit in recorded if step is not None and fit.begin < step <= fit.end)
    return next(made, recorded[-1].data)


def _of_step(recorded: list[Fit], step: int, rank: int | None, orders: Orders) -> dict[str, Any]:
    """The rows of a step, as JSON values."""
    epoch, parts = rows_of_step(recorded, step, orders)
    data = _described(recorded, step)
    ranks, per_row = data["ranks"] * data["ranks_per_row"], data["ranks_per_row"]
    if rank is not None:
        if rank >= ranks:
            raise ConfigurationError(
                f"--rank {rank}: step {step} ran on {ranks} ranks; give a rank from 0 to {ranks - 1}"
            )
        parts = [Part(rank, part.micro_step, part.rows) for part in parts if part.rank == rank // per_row * per_row]
    return {"step": step, "epoch": epoch, "ranks": ranks, "parts": [part._asdict() for part in parts]}


def _of_row(recorded: list[Fit], row: str, orders: Orders) -> dict[str, Any]:
    """The uses of a row, as JSON values."""
    number = int(row) if row.lstrip("-").isdecimal() else row
    units = {fit.data["units"] for fit in recorded if fit.data["drawn"] != "sampler"}
    if units and not (isinstance(number, int) and 0 <= number < max(units)):
        raise ConfigurationError(
            f"--row {row}: the data has {max(units):,} rows; give a number from 0 to {max(units) - 1}"
        )
    return {"row": number, "uses": [use._asdict() for use in uses_of_row(recorded, number, orders)]}


def _print(shown: Mapping[str, Any]) -> None:
    if "parts" in shown:
        total = sum(len(part["rows"]) for part in shown["parts"])
        click.echo(f"step {shown['step']}, epoch {shown['epoch']}, {total} rows")
        parts = [(str(p["rank"]), str(p["micro_step"]), " ".join(map(str, p["rows"]))) for p in shown["parts"]]
        print_table(("rank", "micro-batch", "rows"), parts)
    elif shown["uses"]:
        uses = []
        for use in shown["uses"]:
            step = f"{use['step']}" if use["applied"] else f"skipped after {use['step']}"
            uses.append((step, *(str(use[name]) for name in ("epoch", "rank", "micro_step"))))
        print_table(("step", "epoch", "rank", "micro-batch"), uses)
    else:
        click.echo(f"no step has seen row {shown['row']}")
    if "data" in shown:
        print_table(("row", "as the data set gives it now"), list(shown["data"].items()))


class _Data:
    """The training data of a script: the order of its rows, and the rows."""

    def __init__(self, script: Path, arguments: Sequence[str], recorded: Mapping[str, Any]) -> None:
        from fabricate.cli.recorded.script_data import opened

        self._source, self.notes = opened(script, arguments, recorded)

    def order(self, data: Mapping[str, Any], epoch: int) -> Any:
        """The order of an epoch, as the fit drew it."""
        return self._source.order_of(epoch) if data["drawn"] == "sampler" else recorded_order(data, epoch)

    def texts(self, numbers: Sequence[Any], epoch: int) -> dict[str, str]:
        """The text of each row in `epoch`, by number."""
        from fabricate.data.random_scope import set_epoch

        set_epoch(self._source.data, epoch)
        return {
            str(number): _text(row)[:_LONGEST]
            for number, row in zip(numbers, self._source.read(list(numbers)), strict=True)
        }


def _text(value: Any) -> str:
    """A row as one line of text; large tensors and arrays by their shape and dtype."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(each)}" for name, each in value.items())
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        small = sum(value.shape) <= 16 and len(value.shape) <= 1
        return str(value.tolist()) if small else f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    return repr(value)
