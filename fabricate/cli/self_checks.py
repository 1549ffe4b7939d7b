"""`fabricate verify-resume` and `check-invariance`: checks that start the user's own script.

Owns the output and the exit codes: 1 if a check fails, 2 for a wrong command or a script that fails without the check. Must not know: how
the checks work (`fabricate.selfcheck`). Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from fabricate.cli.checkpoints import print_differences
from fabricate.cli.launch import Launching, launching, prepared
from fabricate.cli.tables import print_table
from fabricate.errors import ConfigurationError


@click.command("verify-resume", cls=Launching, context_settings={"ignore_unknown_options": True})
@click.option("--at", type=click.IntRange(1), required=True, metavar="N", help="Kill it in the update after step N.")
@click.option("--into", type=click.Path(path_type=Path), metavar="DIR", help="Keep logs, checkpoints and notes in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@launching
@click.pass_context
def verify_resume(ctx: click.Context, /, at: int, into: Path | None, as_json: bool, **options: Any) -> None:
    """Check that SCRIPT resumes exactly: run it whole, run it again and kill it (SIGKILL) after step N, resume, compare.

    Says which component differs first: weights, an optimizer, random generators, the position in the data, metrics, a
    plugin's state, an attribute that a plugin keeps and does not save. Exit code 1 if anything does. SCRIPT itself is not
    changed; its run_dir is put elsewhere. The options of `fabricate run` are recognised.

    \b
    Examples:
      fabricate verify-resume train.py --at 50
      fabricate verify-resume train.py --at 50 --nproc 2 --strategy fsdp -- --epochs 1
    """
    from fabricate.selfcheck.resume_check import verify_resume as verify

    if options["max_restarts"]:
        raise ConfigurationError(
            f"--max-restarts {options['max_restarts']}: verify-resume restarts the script itself. Leave --max-restarts out"
        )
    command, environment = prepared(**options)
    if into is not None and into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise ConfigurationError(f"--into {str(into)!r} is not an empty folder. Give a new one")
    place = tempfile.TemporaryDirectory(prefix="fabricate-resume-") if into is None else contextlib.nullcontext(into)
    with place as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tell = (lambda text: None) if as_json else click.echo
        verdict = verify(command, environment, at, Path(folder).absolute(), tell)
    if as_json:
        click.echo(json.dumps(verdict.to_json()))
    elif not verdict.differences:
        click.echo(
            f"exact: the run that was resumed from step {verdict.resumed_from} ends bit for bit like the run that was never stopped"
        )
    else:
        first = verdict.differences[0]
        click.echo(f"not exact: the first difference is in {first.component}, {verdict.when}: {first.name}")
        click.echo(_HINTS[verdict.when])
        print_differences(verdict.differences)
    if verdict.differences:
        ctx.exit(1)


@click.command("check-invariance", context_settings={"ignore_unknown_options": True})
@click.option("--global-batch", type=click.IntRange(1), default=12, metavar="N", help="Rows per update; default: 12.")
@click.option("--steps", type=click.IntRange(1), default=4, metavar="N", help="Updates; default: 4.")
@click.option("--worlds", default="1,2,3", metavar="N,N", help="Numbers of ranks; default: 1,2,3.")
@click.option("--strategy", default="ddp", metavar="NAME", help="The strategy with more than one rank; default: ddp.")
@click.option("--precision", default="fp32", metavar="NAME", help="Default: fp32.")
@click.option(
    "--tolerance",
    type=float,
    default=1e-5,
    metavar="X",
    help="The largest difference that counts as rounding; default: 1e-5.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def check_invariance(
    ctx: click.Context,
    /,
    script: Path,
    arguments: tuple[str, ...],
    global_batch: int,
    steps: int,
    worlds: str,
    strategy: str,
    precision: str,
    tolerance: float,
    as_json: bool,
) -> None:
    """Check that SCRIPT learns the same however its batches are split: into ranks, micro-batches and accumulation steps.

    Runs its fit with the same global batches in every split, and prints the largest relative difference of losses and
    final weights from one process that takes them whole. Exit code 1 if one is over the tolerance. For the check, batch
    sizes, strategy, precision and run_dir are replaced, dropout is switched off and validation left out.

    \b
    Examples:
      fabricate check-invariance train.py
      fabricate check-invariance train.py --worlds 1,2 --strategy fsdp --global-batch 8 -- --epochs 1
    """
    from fabricate.selfcheck.invariance import measure

    counts = worlds.split(",")
    if not all(count.strip().isdecimal() for count in counts):
        raise ConfigurationError(f"--worlds {worlds!r}: give numbers of ranks joined by commas, such as 1,2,3")
    with tempfile.TemporaryDirectory(prefix="fabricate-invariance-") as folder:
        measured = measure(
            script,
            arguments,
            Path(folder),
            dict(os.environ),
            global_batch_size=global_batch,
            steps=steps,
            world_sizes=[int(count) for count in counts],
            strategy=strategy,
            precision=precision,
            tolerance=tolerance,
            tell=(lambda text: None) if as_json else click.echo,
        )
    if as_json:
        click.echo(json.dumps(measured.to_json()))
    else:
        rows = [(str(s), f"{s.loss:.1e}", f"{s.weights:.1e}", s.tensor) for s in measured.splits]
        print_table(("ranks x micro-batch x accumulation", "losses", "weights", "largest in"), rows)
        for note in measured.notes:
            click.echo(f"note: {note}")
        verdict = "at most" if measured.largest <= tolerance else "NOT at most"
        click.echo(
            f"largest relative difference over {measured.steps} updates: {measured.largest:.1e}, {verdict} {tolerance:.0e}"
        )
    if measured.largest > tolerance:
        ctx.exit(1)


_HINTS = {
    "before the kill": "The two starts differ before the kill, so the training itself is not deterministic. Give the Trainer a seed. Call "
    "seed_everything before layers are built outside configure_model. Let augmentations draw from the global generators of torch, NumPy "
    "or Python, which are seeded for every batch.",
    "after the resume": "Something is missing in the checkpoint. For a plugin it holds what on_save puts into `state`, which "
    "on_load has to "
    "restore. For a data set it holds the position. Draw random numbers from the global generators of torch, NumPy or Python.",
    "at the end": "All that the checkpoint holds was restored. Look for other state: in global variables, in files, in the data.",
}
