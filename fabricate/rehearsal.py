"""What a tool asks of every fit of a script that it starts: where files go, when to save, when to be killed.

One environment variable carries it to the ranks. Data only; `fabricate.rehearsing` acts on it. Must not know torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fabricate.errors import ConfigurationError

__all__ = ["TRAIN_DATA", "VARIABLE", "Rehearsal"]

VARIABLE = "FABRICATE_REHEARSAL"
TRAIN_DATA = "train data"
"""What notes call the random generators that the training data keeps."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The wishes of one start of a script.

    runs: every run_dir is put below this folder, under its own absolute path, so that the script's own files stay as they
    are. notes: where each fit leaves checkpoints and what it saw, in fit-0, fit-1, ... save_at: save after this update. kill:
    end every rank with SIGKILL in the middle of the update after that.
    """

    runs: str
    notes: str
    save_at: int
    kill: bool = False

    def run_dir(self, asked: Path) -> Path:
        """Where a run directory is put."""
        absolute = Path(asked).absolute()
        return Path(self.runs, *absolute.parts[1:])

    def to_environment(self) -> dict[str, str]:
        """The variable that carries this to the ranks."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Rehearsal | None:
        """What `to_environment` put there; None where nothing is asked for."""
        if not (text := environ.get(VARIABLE)):
            return None
        try:
            values = json.loads(text)
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigurationError(
                f"{VARIABLE}={text!r} is not understood; unset it: `fabricate verify-resume` sets it for the ranks that it starts"
            ) from exc
