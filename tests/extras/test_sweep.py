"""The example of a search: worse trials end early, and the same command continues from its study."""

from __future__ import annotations

import re
from pathlib import Path

import optuna

from tests.support.scripts import run_script

SWEEP = Path(__file__).parents[2] / "examples" / "sweep.py"


def test_a_search_prunes_finds_better_values_and_goes_on(tmp_path: Path) -> None:
    searches = []
    for _ in range(2):
        printed = run_script(SWEEP, "--trials", "8", "--max-epochs", "4", directory=tmp_path)
        match = re.search(r"(\d+) trials, (\d+) pruned; best accuracy (\S+) with", printed)
        assert match is not None
        searches.append((int(match[1]), int(match[2]), float(match[3])))
    (trials, pruned, first), (more, _, second) = searches
    assert (trials, more) == (8, 16)
    assert pruned > 0
    assert second >= first > 0.9
    trials_made = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path / 'sweep.db'}").trials
    assert len({trial.params["learning_rate"] for trial in trials_made}) == 16, "other values when the study goes on"
