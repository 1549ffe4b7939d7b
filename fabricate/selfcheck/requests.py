"""What a check requests of the fits of a script: where files go, when to be killed, how to split a batch.

The check passes it to `fabricate.selfcheck.runner` on the command line. Data only. Must not know torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["TRAIN_DATA", "Rehearsal", "Trial", "read_requests", "start_script", "write_requests"]

TRAIN_DATA = "train data"
"""What notes call the random generators that the training data keeps."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """For `fabricate verify-resume`: one start of a script.

    runs: every run_dir is put below this folder, under its own absolute path, so that the script's own files stay as they
    are. notes: where each fit leaves checkpoints and what it saw, in fit-0, fit-1, ... save_at: save after this update. kill:
    end every rank with SIGKILL in the middle of the update after that.
    """

    runs: str
    notes: str
    save_at: int
    kill: bool = False

    def run_dir(self, given: Path) -> Path:
        """Where a run directory is put."""
        absolute = Path(given).absolute()
        return Path(self.runs, *absolute.parts[1:])


@dataclass(frozen=True, kw_only=True)
class Trial:
    """For `fabricate check-invariance`: one way to split the same global batches.

    notes: where the fit leaves its losses and final weights. begin: the checkpoint with the weights to begin with; one that
    does not exist yet is made of the fit's own. steps: updates; micro_batch: rows per rank; accumulation: micro-batches.
    """

    notes: str
    begin: str
    steps: int
    micro_batch: int
    accumulation: int


Request = Rehearsal | Trial
_KINDS = {"rehearsal": Rehearsal, "trial": Trial}


def write_requests(requests: Sequence[Request]) -> str:
    """One argument of the command line that holds all of them."""
    names = {kind: name for name, kind in _KINDS.items()}
    return json.dumps([{names[type(request)]: asdict(request)} for request in requests])


def read_requests(text: str) -> list[Request]:
    """What `write_requests` wrote."""
    return [_KINDS[name](**values) for request in json.loads(text) for name, values in request.items()]


def start_script(folder: Path) -> Path:
    """A script in `folder` for a launcher to start: it runs `fabricate.selfcheck.runner` with its own arguments."""
    path = folder / "start.py"
    path.write_text("from fabricate.selfcheck.runner import main\n\nmain()\n")
    return path
