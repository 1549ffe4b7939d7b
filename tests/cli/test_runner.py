"""The exit code of `fabricate run`, which starts the ranks by torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fabricate.cli import runner


@pytest.mark.parametrize(("recorded", "code"), [(True, 1), (False, 143)])
def test_a_rank_that_was_ended_while_it_reported_its_exception_has_failed(
    recorded: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = tmp_path / "reason.json"
    if recorded:
        message = {
            "message": "RuntimeError",
            "extraInfo": {"py_callstack": "out of memory on rank 1", "timestamp": "1"},
        }
        reason.write_text(json.dumps({"message": message}))

    def main(arguments: Any) -> None:
        raise ChildFailedError("script.py", {1: ProcessFailure(1, 2, -15, str(reason))})

    monkeypatch.setattr("torch.distributed.run.main", main)
    monkeypatch.setattr(runner, "_wait_for_ranks", lambda seconds: None)
    assert runner._torchrun(["--", "script.py"]) == code
    assert ("out of memory on rank 1" if recorded else "rank 1 was ended by SIGTERM") in capsys.readouterr().err
