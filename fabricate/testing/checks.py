"""The conformance kit: `check_strategy`, `check_precision` and `check_plugin`, each a one-line test.

Owns which fits run on how many ranks; all fits of one world size are one job. `reference` owns what a rank records, `judge` what is
compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate.testing.judge import (
    Report,
    judge_agreement,
    judge_close,
    judge_dtype,
    judge_failing_rank,
    judge_loaded,
    judge_logged,
    judge_names,
    judge_neutral,
    judge_replicas,
    judge_resumed,
    judge_saved,
    judge_shards,
    subject,
    subjects,
)
from fabricate.testing.reference import SAVE_STEP, Case, Fit, Subject, adam, by_hand, named

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer


def check_strategy(
    strategy: str | Callable[[], Any],
    *,
    world_sizes: Sequence[int] = (2, 3),
    plugins: Sequence[str | Callable[[], Any]] = (),
    equivalent: bool = True,
    timeout: float = 60.0,
) -> None:
    """Check a strategy on gloo ranks of this machine; raises `KitFailure`, a kind of AssertionError.

    strategy: a name with options as for ``Trainer(strategy=...)``, or a class or factory without arguments, defined at the top level of a
    file. world_sizes: numbers of ranks; those that the strategy's `check` refuses are left out. If it refuses all, its own bounds are used.
    plugins: names or factories of plugins that run with it. equivalent: whether training equals one process that takes the whole batch
    (relative 1e-5); False for another algorithm. timeout: seconds per world size.

    Checked: import, the update's arithmetic (accumulation, clipping by norm and by value, a ragged end, token weights, two optimizers),
    capability declarations, checkpoints (names, exact resume, readable in one process) and that a failing rank ends the job.

        def test_my_strategy():
            check_strategy("mine:every=2", equivalent=False)
    """
    report = Report("check_strategy", strategy)
    beside = subjects("check_strategy", plugins)
    clean = report.clean("strategy", world_sizes)
    report.stop_if_failed()
    sizes = clean.accepted
    with tempfile.TemporaryDirectory(prefix="fabricate-kit-") as directory:
        for world_size in sizes:
            root = Path(directory) / str(world_size)
            _check_strategy_on(report, world_size, root, beside, clean.declared, equivalent, timeout)
            report.stop_if_failed()
        alone = [
            Fit(
                f"loading what {size} rank{'s' * (size > 1)} saved",
                _resumable(size),
                Subject("single"),
                resume=_saved(Path(directory) / str(size)),
                accept_changes=("plugins",),
            )
            for size in sizes
        ]
        for fit, trace in zip(alone, report.run(alone, 1, timeout)[0], strict=True):
            judge_loaded(report, fit.label, trace, Path(fit.resume))
    fit = Fit("a failing rank", _resumable(sizes[0]), report.subject, plugins=beside)
    judge_failing_rank(report, fit, sizes[0], timeout)
    report.stop_if_failed()


def check_precision(
    precision: str | Callable[[], Any],
    *,
    rtol: float = 0.05,
    strategies: Sequence[str] = ("single", "ddp"),
    plugins: Sequence[str | Callable[[], Any]] = (),
    optimizer: Callable[[list[Parameter]], Optimizer] | None = None,
    timeout: float = 60.0,
) -> None:
    """Check a precision with each of `strategies` ("single" on one rank, others on two); raises `KitFailure`.

    precision: a name with options as for ``Trainer(precision=...)``, or a class or factory without arguments, defined at the top level of a
    file. rtol: the largest relative difference of the validation loss after a dozen updates from that of fp32. optimizer: a class or
    function at the top level of a file that makes an optimizer from a list of parameters, for a precision that refuses SGD with momentum.

    Checked: import, closeness to fp32, the dtype in which layers compute (it must be the declared one), checkpoint names, equal replicas,
    exact resume.

        def test_my_precision():
            check_precision("mine:recipe=rowwise", rtol=0.1)
    """
    report = Report("check_precision", precision)
    report.clean("precision", (1,))
    report.stop_if_failed()
    beside = subjects("check_precision", plugins)
    for strategy in strategies:
        world_size = _world_size(strategy)
        where = _where(strategy, world_size)
        made = subject("check_precision", optimizer) if optimizer else None
        case = Case(4 * world_size, accumulation=2, steps=12, val_rows=16, optimizer=made)
        plain = Fit(where, case, Subject(strategy), plugins=beside)
        with tempfile.TemporaryDirectory(prefix="fabricate-kit-") as directory:
            root = Path(directory)
            fits = [plain, *_resume(replace(plain, precision=report.subject), root)]
            ranks = report.run(fits, world_size, timeout)
            if ranks[0][-1].drifted:  # the fits ended there
                judge_replicas(report, where, [rank[-1] for rank in ranks])
                report.stop_if_failed()
            judge_dtype(report, where, ranks[0][1])
            judge_close(report, where, ranks[0][0], ranks[0][1], rtol)
            judge_replicas(report, where, [rank[1] for rank in ranks])
            judge_names(report, where, root / "whole", case, "convert(module) has to keep the names in state_dict()")
            judge_resumed(report, where, ranks, root, case)
        report.stop_if_failed()


def check_plugin(
    plugin: str | Callable[[], Any],
    *,
    neutral: bool = True,
    strategies: Sequence[str] = ("single", "ddp"),
    plugins: Sequence[str | Callable[[], Any]] = (),
    timeout: float = 60.0,
) -> None:
    """Check a plugin that implements hooks, with each of `strategies` ("single" on one rank, others on two); raises `KitFailure`.

    plugin: a name with options as for ``Trainer(plugins=[...])``, or a class or factory without arguments, defined at the top level of a
    file. neutral: whether a run with the plugin is bitwise the run without it; False for a plugin that is meant to change the training.
    plugins: other plugins, which run before it.

    Checked: import, hook arguments, neutrality (weights, losses, metrics, random generators), state through a checkpoint and
    exact resume, equal replicas, no rank left behind, and that a failing rank ends the job.

        def test_my_plugin():
            check_plugin("mine:decay=0.9", strategies=("single", "ddp", "fsdp"))
    """
    report = Report("check_plugin", plugin)
    report.clean("plugin", (1,))
    report.stop_if_failed()
    beside = subjects("check_plugin", plugins)
    for strategy in strategies:
        world_size = _world_size(strategy)
        where, case = _where(strategy, world_size), _resumable(world_size)
        without = Fit(f"without it, {where}", case, Subject(strategy), plugins=beside)
        with tempfile.TemporaryDirectory(prefix="fabricate-kit-") as directory:
            root = Path(directory)
            with_it = replace(without, label=where, plugins=(*beside, report.subject))
            again = replace(with_it, label=f"once more, {where}")
            ranks = report.run([without, *_resume(with_it, root), again], world_size, timeout)
            if ranks[0][-1].drifted:  # the fits ended there
                judge_saved(report, where, [rank[-1] for rank in ranks])
                report.stop_if_failed()
            logged = [rank.pop() for rank in ranks]
            if neutral:
                judge_neutral(report, where, ranks)
            judge_saved(report, where, [rank[1] for rank in ranks])
            judge_names(report, where, root / "whole", case, "leave the module's layers and their names as they are")
            judge_resumed(report, where, ranks, root, case)
            judge_logged(report, where, logged, ranks)
        report.stop_if_failed()
    several = next((s for s in strategies if _world_size(s) > 1), strategies[0])
    size = _world_size(several)
    fit = Fit("a failing rank", _resumable(size), Subject(several), plugins=(*beside, report.subject))
    judge_failing_rank(report, fit, size, timeout)
    report.stop_if_failed()


def _world_size(strategy: str) -> int:
    return 1 if strategy.partition(":")[0] == "single" else 2


def _where(strategy: str, world_size: int) -> str:
    return f"{strategy} on {world_size} rank{'s' * (world_size > 1)}"


def _saved(root: Path) -> str:
    """The checkpoint of the uninterrupted run that a run is resumed from."""
    return str(root / "whole" / "checkpoints" / f"step-{SAVE_STEP:08d}")


def _resumable(world_size: int) -> Case:
    """A case with everything that a resume has to restore: shuffling, dropout, accumulation, a ragged end, token weights."""
    # With one validation row, the other ranks have no data: this shows whether a forward needs all ranks.
    return Case(
        4 * world_size,
        accumulation=2,
        ragged=True,
        by_token=True,
        optimizer=subject("the kit", adam),
        dropout=0.1,
        shuffle=True,
        val_rows=1,
    )


def _resume(fit: Fit, root: Path) -> list[Fit]:
    """`fit` with checkpoints, and the same fit resumed from one of them."""
    whole = replace(fit, label=f"saving, {fit.label}", run_dir=str(root / "whole"))
    again = replace(fit, label=f"resuming, {fit.label}", run_dir=str(root / "resumed"), resume=_saved(root))
    return [whole, again]


def _check_strategy_on(
    report: Report,
    world_size: int,
    root: Path,
    plugins: tuple[Subject, ...],
    declared: dict[str, Any],
    equivalent: bool,
    timeout: float,
) -> None:
    where = f"{world_size} rank{'s' * (world_size > 1)}"
    batch = 4 * world_size
    cases = {
        "whole batches": Case(batch),
        "accumulation": Case(batch, accumulation=2),
        "clipping": Case(batch, max_grad_norm=0.1),
        "a ragged end": Case(batch, ragged=True),
        "token weights": Case(batch, by_token=True),
        "all of these": Case(batch, accumulation=2, max_grad_norm=0.1, ragged=True, by_token=True),
    }
    if declared["exposes_gradients"]:
        cases["clipping by value"] = Case(batch, max_grad_value=0.01)
    if declared["several_optimizers"]:
        cases["two optimizers"] = Case(batch, accumulation=2, several=True)
    resumable = _resumable(world_size)
    hear = declared["exposes_gradients"]
    fits = [Fit(f"{name}, {where}", case, report.subject, None, plugins, hear) for name, case in cases.items()]
    fits += _resume(Fit(where, resumable, report.subject, plugins=plugins), root)
    ranks = report.run(fits, world_size, timeout)
    sizes = {name: parameter.numel() for name, parameter in named(resumable.module())}
    for number in range(0 if declared["replicas_drift"] else len(ranks[0])):
        if not judge_replicas(report, fits[number].label, [rank[number] for rank in ranks]):
            report.stop_if_failed()  # the fits ended there
    judge_shards(report, where, [rank[0] for rank in ranks], sizes, declared["shards_parameters"])
    for number, (fit, case) in enumerate(zip(fits, cases.values(), strict=False)):
        traces = [rank[number] for rank in ranks]
        if equivalent and not judge_agreement(report, fit.label, traces, by_hand(case), hear):
            break
    judge_saved(report, where, [rank[-2] for rank in ranks])
    judge_names(report, where, root / "whole", resumable, "prepare() has to keep the names of the module's parameters")
    judge_resumed(report, where, ranks, root, resumable)
