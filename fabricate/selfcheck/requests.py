"""Requests of a check to the fits of a script: where to write files, when to kill the ranks, how to split a batch.

The check passes them to `fabricate.selfcheck.runner` on the command line. Data only. Must not know: torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["TRAIN_DATA", "Rehearsal", "Trial", "read_requests", "start_script", "write_requests"]

TRAIN_DATA = "train data"
"""The name in the notes for the random generators of the training data."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """For `fabricate verify-resume`: one start of a script.

    runs: each run directory is replaced by its absolute path below this folder, so that the script's own files do not change. notes: the
    folder for each fit's checkpoints and notes, in fit-0, fit-1, ... save_at: save after this update. kill: end every rank with SIGKILL in
    the middle of the next update.
    """

    runs: str
    notes: str
    save_at: int
    kill: bool = False

    def run_dir(self, given: Path) -> Path:
        """The directory that replaces the run directory `given`."""
        absolute = Path(given).absolute()
        return Path(self.runs, *absolute.parts[1:])


@dataclass(frozen=True, kw_only=True)
class Trial:
    """For `fabricate check-invariance`: one way to split the same global batches.

    notes: the folder for the fit's losses and final weights. begin: the checkpoint with the initial weights; if it does not exist yet, the
    fit writes its own weights there. steps: updates; micro_batch: rows per rank; accumulation: micro-batches.
    """

    notes: str
    begin: str
    steps: int
    micro_batch: int
    accumulation: int


Request = Rehearsal | Trial
_KINDS = {"rehearsal": Rehearsal, "trial": Trial}


def write_requests(requests: Sequence[Request]) -> str:
    """The text of `requests`, for one command-line argument."""
    names = {kind: name for name, kind in _KINDS.items()}
    return json.dumps([{names[type(request)]: asdict(request)} for request in requests])


def read_requests(text: str) -> list[Request]:
    """The requests in a text from `write_requests`."""
    return [_KINDS[name](**values) for request in json.loads(text) for name, values in request.items()]


def start_script(folder: Path) -> Path:
    """Write a script into `folder` that runs `fabricate.selfcheck.runner` with the script's arguments; return its path, for a launcher."""
    path = folder / "start.py"
    path.write_text("from fabricate.selfcheck.runner import main\n\nmain()\n")
    return path
