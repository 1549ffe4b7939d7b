"""The progress bar: the content of its line, in a terminal, elsewhere and while a debugger waits."""

from __future__ import annotations

import bdb
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, ConfigurationError, ModelSummary, Trainer
from fabricate.callbacks.progress_bar import ProgressBar, debugging
from tests.support.regression import ROWS, Regression


class Accuracy(Regression):
    def training_step(self, batch: Any) -> Any:
        self.log("accuracy", 0.25)
        self.log("perplexity", 12.5)
        return super().training_step(batch)


class Looks(Callback):
    """The line of the bar at the end of the fit, for several widths; the oldest log line has gone by then."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self.lines: dict[int | None, str] = {}

    def on_fit_end(self) -> None:
        self.lines = {room: self.bar.line(room=room) for room in (None, 60, 200)}


def lines(*shown: str) -> dict[int | None, str]:
    bar = ProgressBar(shown)
    looks = Looks(bar)
    trainer = Trainer(max_steps=4, progress=False, log_every=1, plugins=[bar, looks])
    trainer.fit(Accuracy(), ROWS, batch_size=2)
    return looks.lines


def test_a_line_has_what_fits_and_begins_with_what_matters() -> None:
    by_width = lines()
    assert all(line.startswith("step 4/4  loss ") for line in by_width.values())
    assert len(by_width[60]) <= 60
    assert "left" in by_width[60]
    assert "accuracy 0.25  perplexity 12.5" in by_width[200]
    assert "accuracy" not in by_width[None]


def test_the_metrics_to_show_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    by_width = lines("perplexity", "accuracy")
    assert all(line.startswith("step 4/4  perplexity 12.5  accuracy 0.25  ") for line in by_width.values())
    assert "loss" not in "".join(by_width.values())
    capsys.readouterr()
    Trainer(max_steps=1, log_every=1, progress=["accuracy"]).fit(Accuracy(), ROWS, batch_size=2)
    assert "step 1/1  accuracy 0.25" in capsys.readouterr().out


def test_a_metric_of_the_validation_can_be_chosen_and_one_that_never_comes_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(max_epochs=3, log_every=1, progress=["val_loss", "perplexity", "acuracy"])
    trainer.fit(Accuracy(), ROWS, ROWS[:2], batch_size=2)
    output = capsys.readouterr()
    assert "  val_loss " in output.out.splitlines()[-1]
    (note,) = [line for line in output.err.splitlines() if line.startswith("note: progress=")]
    assert (
        "progress=['acuracy']: no such metrics were recorded so far. Recorded metrics: accuracy, loss, lr, perplexity, val_"
        in note
    )


@pytest.mark.parametrize("choice", ["loss", 3, [1]])
def test_a_choice_that_is_not_a_list_of_names_is_refused(choice: Any) -> None:
    with pytest.raises(ConfigurationError, match="give True, False, or the metrics to show"):
        Trainer(progress=choice)


def test_the_bar_rests_while_a_debugger_waits() -> None:
    states: list[bool] = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            states.append(debugging())
            self.set_continue()

    Debugger().runcall(lambda: None)
    assert states == [True]
    assert not debugging()


def test_a_live_bar_is_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    widths: list[int] = []

    class Measures(Callback):
        def on_log(self, trainer: Trainer) -> None:
            for _, plugin in trainer._live().calls.manager.list_name_plugin():
                if isinstance(plugin, ProgressBar):
                    console = plugin._console
                    widths.extend(len(line) for line in console.render_lines(plugin._text(), pad=False))
                    widths.append(console.measure(plugin._text()).maximum)

    Trainer(max_steps=2, log_every=1, plugins=[Measures()]).fit(Accuracy(), ROWS, batch_size=2)
    assert widths
    assert max(widths) <= 80


@pytest.mark.parametrize("shown", ["a live bar", "a summary"])
def test_what_is_shown_does_not_draw_from_the_generators_of_the_data(
    shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich draws from Python's generator when it is imported, so a fit in a terminal, or with a ModelSummary, trained on other random
    numbers than the same fit without."""

    class Draws(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            drawn.append(random.random())
            return super().training_step(batch)

    fits = []
    for is_shown in (False, True):
        for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(
            "sys.stdout.isatty", lambda is_tty=is_shown and shown == "a live bar": is_tty, raising=False
        )
        monkeypatch.setenv("TERM", "xterm")
        plugins: list[Callback] = [ModelSummary()] if is_shown and shown == "a summary" else []
        drawn: list[float] = []
        Trainer(max_steps=3, seed=3, progress=shown == "a live bar", plugins=plugins).fit(Draws(), ROWS, batch_size=2)
        assert ("rich.style" in sys.modules) == is_shown
        fits.append(drawn)
    assert fits[0] == fits[1]


def test_a_live_bar_is_gone_while_a_debugger_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    bar, hidden = ProgressBar(), list[bool]()

    class Waits(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            time.sleep(0.7)  # the bar is drawn four times a second
            hidden.append(bar._text() == "")
            self.set_continue()

    class Debugs(Callback):
        def on_step(self) -> None:
            Waits().runcall(lambda: None)
            time.sleep(0.7)
            hidden.append(bar._text() == "")

    Trainer(max_steps=1, progress=False, plugins=[bar, Debugs()]).fit(Accuracy(), ROWS, batch_size=2)
    assert hidden == [True, False]


def test_validation_results_are_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Trainer(max_steps=1, validate_every=1).fit(Regression(), ROWS, ROWS, batch_size=2)
    assert "val_loss" in capsys.readouterr().out
