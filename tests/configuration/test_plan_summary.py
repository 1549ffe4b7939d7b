"""The output of a fit before its first step: a summary of at most eight lines, the whole plan, or nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.configuration.plan import SUMMARY_LINES, Plan
from tests.support.regression import ROWS, Regression


def printed_before_the_first_step(capsys: pytest.CaptureFixture[str], **arguments: Any) -> str:
    """stdout of a fit of one update on 24 rows."""
    Trainer(max_steps=1, progress=False, **arguments).fit(Regression(), 3 * ROWS, batch_size=4)
    return capsys.readouterr().out


def test_the_summary_says_what_runs_where_how_batches_come_about_and_what_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = printed_before_the_first_step(capsys, seed=0, run_dir=tmp_path, global_batch_size=8).splitlines()[:5]
    parameters = sum(p.numel() for p in Regression().parameters())
    assert lines[0].startswith(f"fabricate: Regression, {parameters} parameters; about ")
    assert lines[1:] == [
        "  runs on  1 rank (cpu), single, fp32",
        "  updates  1 of 8 rows (4 x 2 x 1); 3 per epoch",
        f"  writes   {tmp_path}; saves every epoch, logs every 10 steps",
        f"  plan     all settings: {tmp_path}/plan.json or Trainer(print_plan='full')",
    ]


def test_a_setting_of_the_launcher_is_named_with_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    printed = printed_before_the_first_step(capsys, seed=0)
    assert (
        "  adopted  precision=bf16 (ACCELERATE_MIXED_PRECISION), "
        "gradient_accumulation_steps=2 (ACCELERATE_GRADIENT_ACCUMULATION_STEPS)\n"
    ) in printed
    assert "(cpu), single, bf16\n" in printed


def test_notes_that_find_no_room_are_counted() -> None:
    settings = Trainer(max_steps=1).plan(Regression(), 3 * ROWS, batch_size=4).settings
    text = Plan(settings, notes=tuple(f"note {number}" for number in range(6))).summary()
    assert len(text.splitlines()) == SUMMARY_LINES
    assert re.findall(r"note: note (\d)", text) == ["0", "1", "2"]
    assert "3 more notes and all settings: Trainer(print_plan='full')" in text


def test_all_of_the_plan_or_nothing_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_before_the_first_step(capsys, print_plan="full").startswith("fabricate plan\n")
    assert printed_before_the_first_step(capsys, print_plan="none") == ""
    assert printed_before_the_first_step(capsys, print_plan=False) == ""
    with pytest.raises(
        ConfigurationError, match="print_plan='ful': give 'summary', 'full' or 'none'; did you mean 'full'"
    ):
        Trainer(print_plan="ful")


class Frozen(TrainModule):
    """A backbone that is not trained and a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(3, 3).requires_grad_(False), torch.nn.Linear(3, 1)


def test_the_summary_counts_frozen_parameters_and_needs_no_data() -> None:
    text = Trainer().plan(Frozen()).summary()
    assert text.startswith("fabricate: Frozen, 16 parameters (12 frozen)")
    assert "updates" not in text
    assert "writes   nothing, as no run_dir is set; logs every 10 steps" in text


class Noted(Regression):
    """What a plan has much to say about: two optimizers, which hold a weight that is frozen; both are named in notes."""

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__(rate)
        self.layers[2].bias.requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        print("the first step")
        return super().training_step(batch)

    def configure_optimizers(self) -> Any:
        parts = {"first": self.layers[0], "last": self.layers[2]}
        return {name: torch.optim.SGD(part.parameters(), lr=self.rate) for name, part in parts.items()}


def test_a_resume_and_what_it_changes_are_among_the_eight_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for max_steps, rate in ((1, 0.01), (2, 0.02)):
        settings: dict[str, Any] = {
            "overfit_batches": 2,
            "sanity_batches": 0,
            "accept_changes": ("optimizer", "module"),
        }
        trainer = Trainer(max_steps=max_steps, seed=0, strategy="ddp", run_dir=tmp_path, progress=False, **settings)
        trainer.fit(Noted(rate), ROWS, ROWS, batch_size=2)
        before = capsys.readouterr().out.partition("the first step\n")[0].splitlines()
        assert len(before) == SUMMARY_LINES, before
        assert re.search(r"\d more notes? and all settings", before[-1 if max_steps == 1 else -3])
    assert before[-2].startswith(f"resumed from {tmp_path}/checkpoints/step-00000001 (step 1)")
    assert before[-1].startswith("changed since it was saved: ")
