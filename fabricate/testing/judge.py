"""The comparisons of the conformance kit, and the texts of its failures.

Owns the report and one function per check, which takes what ranks recorded. It runs only the process of `Report.clean` and the job of
`judge_failing_rank`; `checks` decides which fits run.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fabricate import ConfigurationError, RankError
from fabricate.testing._clean import Examined, examine
from fabricate.testing.ranks import run_alone, run_ranks
from fabricate.testing.reference import (
    BOOM,
    MARK,
    SAVE_STEP,
    Case,
    Fit,
    Part,
    Subject,
    Trace,
    read_checkpoint,
    run_fits,
)

TOLERANCE = 1e-5  # for losses and weights, relative to the largest: the effect of the order of summation in float32
_PRECISE = {"bf16": "bfloat16", "fp16": "float16"}
Ranks = list[list[Trace]]
"""Traces by rank, then by fit."""


class KitFailure(AssertionError):
    """A plugin failed checks. The message lists each failed check, what was expected, what was found and what to do."""


class Report:
    """The failed checks of a plugin, in order."""

    def __init__(self, function: str, given: object) -> None:
        self.subject = subject(function, given)
        self.who = f"{function}({self.subject})"
        self.failed: list[str] = []

    def expect(self, holds: bool, check: str, expected: str, found: str, remedy: str) -> bool:
        """Record the check as failed unless `holds`; return `holds`."""
        if not holds:
            self.failed.append(f"{check}\n  expected: {expected}\n  found: {found}\n  what to do: {remedy}")
        return holds

    def stop_if_failed(self) -> None:
        """Raise `KitFailure` if a check has failed: later checks would only repeat the failure."""
        if self.failed:
            count = f"{len(self.failed)} check{'s' * (len(self.failed) > 1)} failed"
            raise KitFailure("\n\n".join([f"{self.who}: {count}", *self.failed]))

    def run(self, fits: list[Fit], world_size: int, timeout: float) -> Ranks:
        """The traces of `fits`, run one after another in one job of `world_size` ranks."""
        try:
            return run_ranks(run_fits, world_size, fits, timeout=timeout)
        except RankError as exc:
            text = str(exc)
            first = text.partition("\n--- ")[0].strip()
            during = [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
            # gloo aborts a process that receives a message of a different collective.
            apart = "did not finish in" in first or "died: signal" in first
            check = "ranks out of step" if apart else "hook arguments" if "PluginError: " in first else "training"
            remedy = (
                "every rank has to call every collective, in the same order (a strategy whose forward has some declares "
                "lockstep = True); the stacks below show where each rank is"
                if apart
                else "see the traceback below"
            )
            self.expect(False, f"{check}: {during[-1] if during else 'starting'}", "all ranks finish", first, remedy)
            try:
                self.stop_if_failed()
            except KitFailure as failure:
                raise KitFailure(f"{failure}\n\n{text.removeprefix(first).strip()}") from None
            raise

    def clean(self, kind: str, world_sizes: Sequence[int]) -> Examined:
        """Import, build and plan in a new process. Returns what a strategy declares and which world sizes it accepts."""
        try:
            answer = run_alone(examine, self.subject, kind, list(world_sizes))
        except RankError as exc:
            self.expect(False, "import", "it can be imported in a process of its own", str(exc), "see its output")
            self.stop_if_failed()
            raise
        self.expect(
            not answer.error,
            "import",
            f"it can be imported, built and named in Trainer({kind}=...)",
            answer.error.strip(),
            "see the traceback",
        )
        self.expect(
            not answer.printed,
            "import side effects",
            "importing and building print nothing",
            repr(answer.printed[:2000]),
            "remove the output, or move the import that makes it into the function that needs it",
        )
        for what, (before, after) in answer.changed.items():
            self.expect(
                False,
                "import side effects",
                f"importing, building and planning leave {what} alone",
                f"{before[:500]} before, {after[:500]} after",
                "move the work, or the import that does it, into the hook or method that needs it",
            )
        self.expect(
            bool(answer.accepted or answer.error),
            "refused",
            f"it runs on {' or '.join(map(str, world_sizes))} ranks of this machine",
            "; ".join(answer.refused),
            "pass world_sizes= that it accepts, or options with which it runs here",
        )
        return answer


def subject(function: str, given: object) -> Subject:
    if isinstance(given, str):
        return Subject(given)
    name = getattr(given, "__qualname__", "")
    if not (inspect.isclass(given) or inspect.isfunction(given)) or "<" in name:
        raise ConfigurationError(
            f"{function}({given!r}): give a name, or a class or function without arguments at the top level of a file: every rank "
            "and every run makes an object of its own"
        )
    file = inspect.getsourcefile(given)
    if file is None:
        raise ConfigurationError(f"{function}({name}): it has no source file that a rank could import")
    return Subject(name, given.__module__, os.path.abspath(file), name)


def subjects(function: str, given: Iterable[object]) -> tuple[Subject, ...]:
    return tuple(subject(function, each) for each in given)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def judge_agreement(report: Report, label: str, ranks: list[Trace], hand: Trace, hear_gradients: bool) -> bool:
    """Whether losses, gradients and weights of every rank agree with the loop by hand."""
    for rank, trace in enumerate(ranks):
        if hear_gradients and not _gradients_agree(report, label, rank, trace, hand):
            return False
        if not _weights_agree(report, label, rank, trace, hand):
            return False
    return True


_AGREEMENT = f"losses, gradients and weights of one process with the whole batch, relative {TOLERANCE:g}"


def _gradients_agree(report: Report, label: str, rank: int, trace: Trace, hand: Trace) -> bool:
    missing = [n for n in hand.gradients if n not in trace.gradients]
    if not report.expect(
        not missing,
        f"exposes_gradients: {label}",
        "parameter.grad holds this rank's part of the gradient in on_before_step",
        f"None on rank {rank} for {_some(missing)}",
        "keep gradients in parameter.grad, or declare exposes_gradients = False",
    ):
        return False
    distances = {n: _distance(part, hand.gradients[n]) for n, part in trace.gradients.items()}
    wrong = [n for n, distance in distances.items() if distance > 10 * TOLERANCE]
    ratio, farthest = _ratio(trace.gradients, hand.gradients), max(distances.values(), default=0.0)
    found = f"is {ratio:.3g} times as large as it should be"
    remedy = "gradients have to be averaged over ranks exactly once, in the backward of the window's last micro-batch"
    if abs(ratio - 1) < 0.01:
        found = f"differs by up to {farthest:.1g} of its largest element"
        remedy = "a strategy that rounds or compresses gradients is not equivalent"
    return report.expect(
        not wrong,
        f"agreement with one process: {label}",
        _AGREEMENT,
        f"on rank {rank} the gradient of {_some(wrong)} {found} in on_before_step",
        f"{remedy}; with equivalent=False this is not checked",
    )


def _weights_agree(report: Report, label: str, rank: int, trace: Trace, hand: Trace) -> bool:
    off = _first_other_loss(trace.losses, hand.losses)
    far = [n for n, part in trace.last.items() if not _distance(part, hand.last[n]) <= TOLERANCE]
    return report.expect(
        off is None and not far,
        f"agreement with one process: {label}",
        _AGREEMENT,
        f"on rank {rank} losses {trace.losses[:3]}... for {hand.losses[:3]}...; weights off: {_some(far) or 'none'}"
        + (f"; first at step {off}" if off else ""),
        "check prepare(), no_sync() and backward(); with equivalent=False this is not checked",
    )


def _first_other_loss(losses: list[float], expected: list[float]) -> int | None:
    """The first step with an unexpected loss (1 if the numbers of steps differ); None if there is none."""
    if len(losses) != len(expected):
        return 1
    pairs = enumerate(zip(losses, expected, strict=True), 1)
    return next((step for step, (a, b) in pairs if not abs(a - b) <= TOLERANCE * max(expected)), None)


def _distance(part: Part, whole: Part) -> float:
    """The largest difference, relative to the largest element of the whole tensor."""
    start, values = part
    wanted = whole[1][start : start + values.numel()]
    if wanted.shape != values.shape:
        return math.inf
    largest = float(whole[1].abs().max())
    return float((values - wanted).abs().max()) / max(largest, 1e-12) if values.numel() else 0.0


def _ratio(found: dict[str, Part], wanted: dict[str, Part]) -> float:
    """The norm of the gradient as a multiple of the expected norm."""
    parts = [(part, wanted[name][1][part[0] : part[0] + part[1].numel()]) for name, part in found.items()]
    norms = [
        math.sqrt(sum(float(t.square().sum()) for t in of)) for of in ([p[1] for p, _ in parts], [w for _, w in parts])
    ]
    return norms[0] / max(norms[1], 1e-12)


def judge_replicas(report: Report, where: str, ranks: list[Trace]) -> bool:
    """Whether ranks that hold the same elements held the same values after each update."""
    apart = _apart([[weights for weights, _ in trace.steps] for trace in ranks])
    return report.expect(
        not apart,
        f"equal replicas: {where}",
        "ranks that hold the same elements of a weight hold the same values after each update",
        f"after {apart}",
        "average gradients over ranks, and change weights in the same way on all of them; a strategy that is meant to let "
        "ranks drift declares replicas_drift = True",
    )


def judge_saved(report: Report, where: str, ranks: list[Trace]) -> None:
    """Check that all ranks held the same weights whenever a checkpoint was written."""
    apart = _apart([[weights for _, weights in trace.saved] for trace in ranks])
    report.expect(
        not apart,
        f"one model in a checkpoint: {where}",
        "ranks hold the same weights when a checkpoint is written, because each writes a part of them",
        f"at checkpoint {apart.removeprefix('update ')}",
        "change weights in the same way on all ranks; a strategy that lets ranks drift synchronises in write_checkpoint",
    )


def _apart(ranks: list[list[dict[str, str]]]) -> str:
    """A description of the first moment at which two ranks held different values of the same elements; empty if there is none. `ranks`: by
    rank and moment, a result of `reference.digests`."""
    for moment, held in enumerate(zip(*ranks, strict=False), 1):
        first: dict[str, tuple[int, str]] = {}
        for rank, digests in enumerate(held):
            for elements, digest in digests.items():
                other, first_digest = first.setdefault(elements, (rank, digest))
                if first_digest != digest:
                    return f"update {moment} ranks {other} and {rank} hold different values of {elements}"
    return ""


def judge_loaded(report: Report, label: str, trace: Trace, checkpoint: Path) -> None:
    """Check that the weights of a resumed fit before its first update are those of the checkpoint."""
    saved = read_checkpoint(checkpoint)
    wrong = [name for name, (_, values) in trace.first.items() if not torch.equal(values, saved[f"model/{name}"])]
    report.expect(
        not wrong,
        f"one checkpoint, any strategy: {label}",
        "one process without the plugin reads the weights",
        f"other values in {_some(wrong)}",
        "local_part(tensor) has to return this rank's elements and where they begin in the flattened tensor",
    )


def judge_shards(report: Report, where: str, ranks: list[Trace], sizes: dict[str, int], declared: bool) -> None:
    """Check that what each rank holds, in elements and in memory, agrees with `shards_parameters`. `sizes`: elements by parameter."""
    total = sum(sizes.values())
    held = [sum(values.numel() for _, values in trace.last.values()) for trace in ranks]
    if not declared:
        report.expect(
            all(number == total for number in held),
            f"shards_parameters = False: {where}",
            f"every rank holds all {total} elements",
            f"elements by rank {held}",
            "declare shards_parameters = True, or correct local_part()",
        )
        return
    if len(ranks) == 1:
        return
    memory = [trace.bytes_held // 4 for trace in ranks]
    if not report.expect(
        max(*held, *memory) < 0.9 * total,
        f"shards_parameters = True: {where}",
        f"each rank holds a part of the {total} elements, about {total // len(ranks)}",
        f"elements by rank {held}, in memory room for {memory}",
        "shard in prepare(), or declare shards_parameters = False",
    ):
        return
    # Several ranks may hold copies of a shard (their values were compared above), but no element may be missing.
    parts = {name: sorted({(t.last[name][0], t.last[name][1].numel()) for t in ranks}) for name in sizes}
    torn = [name for name, ranges in parts.items() if not _tiles(ranges, sizes[name])]
    report.expect(
        not torn,
        f"shards: {where}",
        "the parts of all ranks together are the whole of each parameter, once",
        f"gaps or overlaps in {_some(torn)}",
        "local_part(tensor) has to return this rank's elements and where they begin in the flattened tensor",
    )


def _tiles(parts: list[tuple[int, int]], size: int) -> bool:
    end = 0
    for start, count in parts:
        if count and start != end:
            return False
        end += count
    return end == size


def judge_failing_rank(report: Report, fit: Fit, world_size: int, timeout: float) -> None:
    """Check that an exception of the last rank in on_step ends the job, which must not hang or continue, and that the error names the
    rank."""
    last = world_size - 1
    try:
        run_ranks(run_fits, world_size, [replace(fit, failing_rank=last)], timeout=timeout)
    except RankError as exc:
        outcome = str(exc)
    else:
        outcome = "every rank finished as if nothing had happened"
    report.expect(
        f"rank {last} raised ValueError: {BOOM}" in outcome,
        f"a failing rank, {world_size} rank{'s' * (world_size > 1)}",
        f"an exception in on_step on rank {last} leaves Trainer.fit there and ends the job",
        outcome.partition("\n--- ")[0].strip(),
        "do not catch the exception in a wrapper, and call no collective in on_exception, on_teardown or a finally block",
    )


def judge_dtype(report: Report, where: str, trace: Trace) -> None:
    """Check that the dtype of an activation agrees with the precision's declaration and with Accelerate's setting."""
    declared = trace.declared_dtype
    report.expect(
        trace.observed == declared,
        f"compute dtype: {where}",
        f"layers compute in {declared}, as compute_dtype says",
        f"the output of a Linear in training_step is {trace.observed}",
        "declare the dtype that forward_context() gives, or enter the context that gives it",
    )
    expected = _PRECISE.get(trace.mixed_precision, trace.observed)
    report.expect(
        trace.observed == expected,
        f"compute dtype: {where}",
        f"layers compute in {expected}, as Accelerate is told (mixed_precision={trace.mixed_precision!r})",
        f"the output of a Linear in training_step is {trace.observed}",
        "return the autocast context from forward_context(), or set mixed_precision = 'no'",
    )


def judge_close(report: Report, where: str, reference: Trace, trace: Trace, rtol: float) -> None:
    """Check that the last validation loss is close to that of the same training in fp32."""
    wanted, loss = reference.metrics[-1][1]["val_loss"], trace.metrics[-1][1]["val_loss"]
    report.expect(
        abs(loss - wanted) <= rtol * abs(wanted),
        f"close to fp32: {where}",
        f"validation loss {wanted:.6g} after {len(reference.losses)} updates, relative {rtol:g}",
        f"{loss:.6g}, relative {abs(loss - wanted) / abs(wanted):.3g}"
        + (f"; {trace.skipped} updates were skipped" if trace.skipped else ""),
        "pass the rtol that this precision can keep, or look for a layer that it should leave alone",
    )


def judge_names(report: Report, where: str, run_dir: Path, case: Case, remedy: str) -> None:
    """Check that the model's tensors in the newest checkpoint have the names of the plain module's."""
    plain = {f"model/{name}" for name in case.module().state_dict()}
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    names = {name for name in read_checkpoint(newest) if name.startswith("model/")}
    report.expect(
        names == plain,
        f"checkpoint names: {where}",
        "the tensors in a checkpoint are named as in the plain module, so that any strategy loads them",
        f"missing {_some(sorted(plain - names)) or 'none'}; unknown {_some(sorted(names - plain)) or 'none'}",
        remedy,
    )


def judge_neutral(report: Report, where: str, ranks: Ranks) -> None:
    """Check that the first two fits of each rank, without and with the plugin, are bitwise the same."""
    remedy = (
        "draw from a torch.Generator of its own and work on copies of weights; a plugin that is meant to change the run is "
        "checked with neutral=False"
    )
    for rank, (without, with_it, _) in enumerate(ranks):
        expected = "losses, weights, metrics and random generators bitwise as without it"
        difference = ""
        for step, (before, after) in enumerate(zip(without.steps, with_it.steps, strict=False), 1):
            changed = [
                what for what, a, b in zip(("weights", "random generators"), before, after, strict=True) if a != b
            ]
            if changed:
                difference = f"different {' and '.join(changed)} on rank {rank}, first after step {step}"
                break
        if not difference and len(without.steps) != len(with_it.steps):
            difference = f"{len(with_it.steps)} updates instead of {len(without.steps)} ({with_it.stop_reason})"
        if not difference and (without.losses, without.metrics) != (with_it.losses, with_it.metrics):
            difference = f"different losses or metrics on rank {rank}: {with_it.metrics} instead of {without.metrics}"
        if not report.expect(not difference, f"neutrality: {where}", expected, difference, remedy):
            return


def judge_resumed(report: Report, where: str, ranks: Ranks, directory: Path, case: Case) -> None:
    """Check that the last two fits of each rank (an uninterrupted run, and one resumed at `SAVE_STEP`) and their last checkpoints are
    bitwise the same."""
    paths = [directory / name / "checkpoints" / f"step-{case.steps:08d}" for name in ("whole", "resumed")]
    if not all(path.exists() for path in paths):  # the run stopped early, which is a matter of neutrality
        paths = [sorted(path.parent.glob("step-*"))[-1] for path in paths]
    other = _different_tensors(*paths)
    states = [json.loads((path / "state.json").read_text(encoding="utf-8"))["plugins"] for path in paths]
    lost = [n for n in sorted(states[0].keys() | states[1].keys()) if states[0].get(n) != states[1].get(n)]
    lost += sorted({name.split("/")[1] for name in other if name.startswith("plugin/")} - set(lost))
    report.expect(
        not lost,
        f"state round trip: {where}",
        "at the end of a resumed run a plugin's state is bitwise that of a run that never stopped",
        f"a different state of {_some(lost)}: {_shown(states[1], lost)} instead of {_shown(states[0], lost)}",
        "put everything that later steps need into `state` in on_save, and take it back in on_load",
    )
    steps, metrics = _ranks_apart(ranks)
    report.expect(
        not (other or steps or metrics),
        f"exact resume: {where}",
        f"a run resumed at step {SAVE_STEP} ends bitwise as one that never stopped",
        f"different tensors in the last checkpoint: {_some(other) or 'none'}; different steps on ranks {steps}, different metrics "
        f"on ranks {metrics}",
        "save what the update depends on in on_save, restore it in on_load, and keep nothing else across updates",
    )


def judge_logged(report: Report, where: str, again: Sequence[Trace], ranks: Ranks) -> None:
    """Check that a resumed run logs what an uninterrupted one does, apart from metrics that differ between two uninterrupted runs, such as
    times. `again`: for each rank, one more uninterrupted run than the last two fits of `ranks`."""
    lost = []
    for alone, (*_, whole, resumed) in zip(again, ranks, strict=True):
        one, two, late = map(_by_name, (alone, whole, resumed))
        same = {name for name in one if one[name] == two.get(name)}
        lost += [name for name in sorted(same) if [at for at in two[name] if at[0] > SAVE_STEP] != late.get(name, [])]
    report.expect(
        not lost,
        f"logged metrics: {where}",
        f"a run resumed at step {SAVE_STEP} logs the metrics of one that never stopped",
        f"other values of {_some(list(dict.fromkeys(lost)))}",
        "save what the metric depends on in on_save, and restore it in on_load",
    )


def _by_name(trace: Trace) -> dict[str, list[tuple[int, float]]]:
    """What a fit logged: the values of each metric, with their steps."""
    values: dict[str, list[tuple[int, float]]] = {}
    for step, metrics in trace.logged:
        for name, value in metrics.items():
            values.setdefault(name, []).append((step, value))
    return values


def _different_tensors(one: Path, other: Path) -> list[str]:
    """The names of the tensors that differ between two checkpoints, bitwise."""
    first, second = read_checkpoint(one), read_checkpoint(other)
    shared = first.keys() & second.keys()
    return sorted(n for n in first.keys() | second.keys() if n not in shared or not torch.equal(first[n], second[n]))


def _ranks_apart(ranks: Ranks) -> tuple[list[int], list[int]]:
    """The ranks whose last two fits differ after `SAVE_STEP`: in steps, and in metrics."""
    steps, metrics = [], []
    for rank, (*_, whole, resumed) in enumerate(ranks):
        if (resumed.steps, resumed.losses) != (whole.steps[SAVE_STEP:], whole.losses[SAVE_STEP:]):
            steps.append(rank)
        if resumed.metrics != [m for m in whole.metrics if m[0] > SAVE_STEP]:
            metrics.append(rank)
    return steps, metrics


def _shown(states: dict[str, Any], names: list[str]) -> str:
    return json.dumps({name: states.get(name) for name in names})[:300]
