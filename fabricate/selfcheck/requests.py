"""What a tool asks of every fit of a script that it starts: where files go, when to be killed, how to split a batch.

One environment variable each carries it to the ranks. Data only; `fabricate.selfcheck.plugins` acts on it. Must not know torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar, Self

from fabricate.errors import ConfigurationError

__all__ = ["TRAIN_DATA", "Rehearsal", "Trial"]

TRAIN_DATA = "train data"
"""What notes call the random generators that the training data keeps."""


@dataclass(frozen=True, kw_only=True)
class _Wishes:
    VARIABLE: ClassVar[str]

    def to_environment(self) -> dict[str, str]:
        """The variable that carries this to the ranks."""
        return {self.VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """What `to_environment` put there; None where nothing is asked for."""
        if not (text := environ.get(cls.VARIABLE)):
            return None
        try:
            values = json.loads(text)
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigurationError(
                f"{cls.VARIABLE}={text!r} is not understood; unset it: only commands of fabricate set it, for the ranks they start"
            ) from exc


@dataclass(frozen=True, kw_only=True)
class Rehearsal(_Wishes):
    """For `fabricate verify-resume`: one start of a script.

    runs: every run_dir is put below this folder, under its own absolute path, so that the script's own files stay as they
    are. notes: where each fit leaves checkpoints and what it saw, in fit-0, fit-1, ... save_at: save after this update. kill:
    end every rank with SIGKILL in the middle of the update after that.
    """

    VARIABLE: ClassVar[str] = "FABRICATE_REHEARSAL"
    runs: str
    notes: str
    save_at: int
    kill: bool = False

    def run_dir(self, asked: Path) -> Path:
        """Where a run directory is put."""
        absolute = Path(asked).absolute()
        return Path(self.runs, *absolute.parts[1:])


@dataclass(frozen=True, kw_only=True)
class Trial(_Wishes):
    """For `fabricate check-invariance`: one way to split the same global batches.

    notes: where the fit leaves its losses and final weights. begin: the checkpoint with the weights to begin with; one that
    does not exist yet is made of the fit's own. steps: updates; micro_batch: rows per rank; accumulation: micro-batches.
    """

    VARIABLE: ClassVar[str] = "FABRICATE_TRIAL"
    notes: str
    begin: str
    steps: int
    micro_batch: int
    accumulation: int
