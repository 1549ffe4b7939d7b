"""Every strategy with every precision takes effect or is refused; `python -m campaigns.matrix` prints the table."""

from __future__ import annotations

from pathlib import Path

from campaigns.matrix import observe, text, wrong


def test_every_strategy_with_every_precision_takes_effect_or_is_refused_as_documented() -> None:
    cells = observe()
    assert [(cell, wrong(cell)) for cell in cells if wrong(cell)] == []
    page = (Path(__file__).parent.parent / "docs" / "matrix.md").read_text(encoding="utf-8")
    lines = [f"| `{c.strategy}` | `{c.precision}` | {c.ranks} | {text(c)} |" for c in cells]
    assert [line for line in lines if line not in page.splitlines()] == [], (
        "run python -m campaigns.matrix --out docs/matrix.md"
    )
