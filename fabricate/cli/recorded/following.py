"""The reader of a run directory while the run is running: it reads only what was added since the last call.

Must not know: what is shown. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fabricate.cli.recorded.files import RunFiles, read_lines, read_plan

__all__ = ["Following"]


class Following:
    """The contents of a run directory, updated by `look`. Checkpoints are not read; events report them."""

    def __init__(self, run_dir: Path) -> None:
        self._logs = {name: _Log(run_dir / name) for name in ("metrics.jsonl", "events.jsonl")}
        self._run = RunFiles(run_dir, {}, [], [], [], [])

    def look(self) -> RunFiles:
        """The current contents."""
        plan = read_plan(self._run.run_dir / "plan.json")
        lines, events = (log.look() for log in self._logs.values())
        self._run = replace(self._run, plan=plan["settings"], lines=lines, events=events)
        return self._run


class _Log:
    """The lines of a file that grows, and that a resume may shorten."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines: list[dict[str, Any]] = []
        self._read = 0
        self._last = b""

    def look(self) -> list[dict[str, Any]]:
        """All lines that are complete now."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as handle:
            handle.seek(max(0, self._read - len(self._last)))
            # If a resume shortened the file, the lines that were read before are no longer valid.
            if handle.read(len(self._last)) != self._last:
                self._lines, self._read = [], 0
                handle.seek(0)
            added, end, _ = handle.read().rpartition(b"\n")
        if end:
            self._lines = self._lines + read_lines(self._file, (added + end).decode())
            self._read += len(added) + 1
            self._last = (added + end)[-200:]
        return self._lines
