"""What ranks are doing, as text: the collective in which a rank waits, the hook, the number of updates, and the stack.

Must not know: how stacks are read (`fabricate.distributed.stacks`), how ranks wait for each other; imports no torch.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Mapping, Sequence

from fabricate.distributed.stacks import Frame, Reached, Seen

Listener = tuple[str, int, int, str]
"""A piece of code that reports can name: its file, its first and last line, and its name."""

_GROUP = ("/fabricate/distributed/group.py", "/fabricate/distributed/connections.py")
_OF_TORCH = ("/torch/distributed/", "/torch/nn/parallel/")
_BACKWARD, _ENGINE = "/torch/autograd/graph.py", "/fabricate/distributed/engine.py"
_ACTIVITIES = (
    ("/training/saves/saving.py", "in a save"),
    ("/training/saves/resuming.py", "resuming"),
    ("/training/saves/choosing.py", "resuming"),
    ("/training/saves/compared.py", "resuming"),
    ("/training/evaluations/", "in an evaluation"),
    ("/torch/utils/data/", "reading data"),
)
"""Parts of the paths of files, each with what a rank does while it runs code of that file."""
_STATES = {
    "answers": "waited in vain",
    "runs": "runs code",
    "waits": "waits",
    "stopped": "is stopped by a signal (kill -CONT lets it continue), or held by a debugger",
    "gone": "is gone: it ended or was killed",
    "mute": "writes no stack: it waits for a disk or a device, or the script handles SIGURG",
    "foreign": "belongs to another user: run the same command as that user",
    "elsewhere": "is on another host: run the same command there",
    "unknown": "unknown: no rank of its host answers",
}


def report(seen: Mapping[int, Seen], listeners: Sequence[Listener] = ()) -> str:
    """The report: one paragraph for the ranks in the same state, and a line that names where to look first. listeners: the code of the
    hooks."""
    alike: dict[str, list[int]] = {}
    for rank, each in sorted(seen.items()):
        alike.setdefault(_paragraph(each, listeners), []).append(rank)
    paragraphs = [f"{_names(ranks, seen)}: {text}" for text, ranks in alike.items()]
    return "\n".join([*paragraphs, *filter(None, [_where_to_begin(seen)])])


def awaited(frames: Sequence[Frame], runs: bool = False) -> str:
    """The collective in which a stack ends, or an empty string if it does not end in one. runs: whether the thread was seen to compute."""
    inner = list(reversed(frames))
    if not inner or runs:
        return ""
    own = list(itertools.takewhile(lambda frame: frame.file.endswith(_GROUP), inner))
    if own:
        return f"{own[-1].function} (fabricate)"
    if any(part in inner[0].file for part in _OF_TORCH):
        return next((f.function for f in inner if f.function != "wrapper"), inner[0].function)
    if inner[0].file.endswith(_BACKWARD):
        return "backward (the gradients of other ranks)"
    is_sum = inner[0].file.endswith(_ENGINE) and inner[0].function == "finish"
    return "the sum of the weights of a loss over ranks (fabricate)" if is_sum else ""


def _paragraph(seen: Seen, listeners: Sequence[Listener]) -> str:
    """What a rank is doing, and its stack; without the number of the rank."""
    facts = [_STATES[seen.state]]
    if name := awaited(seen.frames, seen.state == "runs"):
        facts[0] += f" for {name}" if seen.state == "answers" else f" in {name}"
    facts += filter(None, [_activity(seen.frames), _listener(seen.frames, listeners), _reached(seen.reached)])
    lines = [", ".join(facts), *_stack(seen.frames)]
    if seen.save:
        lines += ["  its thread that saves in the background:", *_stack(seen.save)]
    for worker in seen.workers:
        lines += [f"  its data worker (process {worker.process}): {_STATES[worker.state]}", *_stack(worker.frames)]
    return "\n".join(lines)


def _names(ranks: Sequence[int], seen: Mapping[int, Seen]) -> str:
    """`rank 1 on alpha (process 412)`, or `ranks 0, 2-7`."""
    if len(ranks) == 1:
        each = seen[ranks[0]]
        return f"rank {ranks[0]} on {each.host} (process {each.process})"
    return f"ranks {numbers(ranks)}"


def numbers(ranks: Iterable[int]) -> str:
    """`0, 2-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def _activity(frames: Sequence[Frame]) -> str:
    """The activity of the innermost frame whose file is in `_ACTIVITIES`, else an empty string."""
    return next((text for f in reversed(frames) for part, text in _ACTIVITIES if part in f.file), "")


def _listener(frames: Sequence[Frame], listeners: Sequence[Listener]) -> str:
    """The innermost hook and plugin of a stack."""
    for frame in reversed(frames):
        for file, first, last, name in listeners:
            if frame.file == file and first <= frame.line <= last:
                return f"in {name}"
    return ""


def _reached(reached: Reached | None) -> str:
    if reached is None:
        return ""
    if not reached.running:
        return f"outside of a fit, after update {reached.update}" if reached.update else "outside of a fit"
    if reached.batch >= 0:
        return f"after update {reached.update}, batch {reached.batch}"
    return f"update {reached.update}, micro-batch {reached.micro_step}"


def _stack(frames: Sequence[Frame]) -> list[str]:
    """The lines of a stack, with the source lines if the files are on this host."""
    summary = [traceback.FrameSummary(file, line, function) for file, line, function in frames]
    return [line for entry in traceback.format_list(summary) for line in entry.splitlines()]


def _where_to_begin(seen: Mapping[int, Seen]) -> str:
    """A line with the ranks for which the others wait, or with the different collectives in which all wait; else an empty string."""
    waiting = {rank: name for rank, each in seen.items() if (name := awaited(each.frames, each.state == "runs"))}
    others = [rank for rank in seen if rank not in waiting]
    if waiting and others:
        wait = "waits" if len(waiting) == 1 else "wait"
        return f"begin with {_of_ranks(others)}, in no collective, while {_of_ranks(list(waiting))} {wait} in one"
    if len(set(waiting.values())) > 1:
        by_name: dict[str, list[int]] = {}
        for rank, name in waiting.items():
            by_name.setdefault(name, []).append(rank)
        apart = "; ".join(f"{name}: {_of_ranks(ranks)}" for name, ranks in by_name.items())
        return f"the ranks wait in different collectives ({apart})"
    return ""


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers(ranks)}"
