"""Every strategy with every precision takes effect or is refused; `python -m campaigns.matrix` prints the table."""

from __future__ import annotations

from pathlib import Path

from campaigns import launches
from campaigns.matrix import observe, text, wrong


def test_every_strategy_with_every_precision_takes_effect_or_is_refused_as_documented() -> None:
    cells = observe()
    assert [(cell, wrong(cell)) for cell in cells if wrong(cell)] == []
    page = (Path(__file__).parents[2] / "docs" / "matrix.md").read_text(encoding="utf-8")
    lines = [f"| `{c.strategy}` | `{c.precision}` | {c.ranks} | {text(c)} |" for c in cells]
    assert [line for line in lines if line not in page.splitlines()] == [], (
        "run python -m campaigns.matrix --out docs/matrix.md"
    )


def test_what_a_launcher_tells_and_what_the_script_asks_for_takes_effect_or_is_refused_as_documented() -> None:
    starts = launches.plans()
    assert [(start, launches.wrong(start)) for start in starts if launches.wrong(start)] == []
    page = (Path(__file__).parents[2] / "docs" / "matrix.md").read_text(encoding="utf-8")
    assert [line for line in map(launches.text, starts) if line not in page.splitlines()] == [], (
        "run python -m campaigns.matrix --out docs/matrix.md"
    )
