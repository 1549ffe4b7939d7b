"""`fabricate rows` prints the rows of a step, and the steps of a row, from the files of a run alone."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from fabricate.cli.main import main
from fabricate.cli.recorded.files import RunFiles
from fabricate.cli.recorded.rows import Fit, fits, rows_of_step, uses_of_row
from fabricate.data.source import Loading, Source
from fabricate.data.user_data import open_source
from tests.support.recorded import SAVED, SCRIPT, SKIPPED, STEPS, record, rows_of


@pytest.fixture(scope="module")
def run_and_batches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A run that skipped an update, failed and went on; the rows of every window that counts, the skipped one included."""
    run_dir = tmp_path_factory.mktemp("rows") / "run"
    batches = record(run_dir)
    # The first fit's batches up to step 4 are five, because one was skipped; the second fit's follow.
    return run_dir, [*batches[: SAVED + 1], *batches[-(STEPS - SAVED) :]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def rows(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["rows", *map(str, arguments)])


def answer(*arguments: object) -> Any:
    shown = rows(*arguments, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def test_the_rows_of_a_step_are_those_that_the_training_saw(run_and_batches: tuple[Path, list[list[int]]]) -> None:
    run_dir, batches = run_and_batches
    applied = batches[:SKIPPED] + batches[SKIPPED + 1 :]
    for step in range(1, STEPS + 1):
        (part,) = answer(run_dir, "--step", step)["parts"]
        assert part["rows"] == applied[step - 1], step


def test_the_steps_of_a_row_are_those_that_saw_it(run_and_batches: tuple[Path, list[list[int]]]) -> None:
    run_dir, batches = run_and_batches
    for row in range(18):
        uses = [(use["step"], use["applied"]) for use in answer(run_dir, "--row", row)["uses"]]
        expected = []
        for window, batch in enumerate(batches):
            step = window + 1 if window < SKIPPED else window
            expected += [(step, window != SKIPPED)] if row in batch else []
        assert uses == expected, row


def test_what_is_printed_can_be_read(run_and_batches: tuple[Path, list[list[int]]]) -> None:
    run_dir, batches = run_and_batches
    shown = rows(run_dir, "--step", 1).stdout
    assert shown.startswith("step 1, epoch 0, 4 rows\n")
    assert " ".join(map(str, batches[0])) in shown
    assert f"skipped after {SKIPPED}" in rows(run_dir, "--row", batches[SKIPPED][0]).stdout


def test_a_script_shows_the_rows_themselves_and_trains_nothing(
    run_and_batches: tuple[Path, list[list[int]]], script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir, batches = run_and_batches
    shown = answer(run_dir, "--step", 1, script)
    first = batches[0][0]
    assert (
        shown["data"][str(first)]
        == f"([{4.0 * first}, {4.0 * first + 1}, {4.0 * first + 2}, {4.0 * first + 3}], {first})"
    )
    assert not (tmp_path / "never").exists()


BY_EPOCH = """
import sys
import torch
from fabricate import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []
    def training_step(self, batch):
        self.batches.append(batch.flatten().tolist())
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class ByEpoch(torch.utils.data.Dataset):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return torch.tensor([row + 100.0 * self.epoch])

module = Net()
Trainer(max_epochs=3, run_dir=RUN_DIR, progress=False).fit(module, ByEpoch(), batch_size=4)
"""


def test_rows_of_a_data_set_with_set_epoch_are_those_of_the_epoch_of_the_step(tmp_path: Path) -> None:
    script = tmp_path / "by_epoch.py"
    script.write_text(BY_EPOCH.replace("RUN_DIR", repr(str(tmp_path / "run"))))
    seen = runpy.run_path(str(script))["module"].batches
    for step in (1, 3, 6):
        shown = answer(tmp_path / "run", "--step", step, script)["data"]
        assert list(shown.values()) == [f"[{value}]" for value in seen[step - 1]], step
    assert answer(tmp_path / "run", "--row", 5, script)["data"] == {"5": "[5.0]"}


def test_data_that_is_not_the_runs_is_refused(run_and_batches: tuple[Path, list[list[int]]], script: Path) -> None:
    refused = rows(run_and_batches[0], "--step", 1, script, "--weighted")
    assert (refused.exit_code, "passes other data to fit" in refused.stderr) == (2, True)


def split_script(path: Path, shift: float, generator: str) -> Path:
    """A script that trains on 12 of 18 rows, which are the numbers from `shift` on."""
    path.write_text(
        SCRIPT.replace("torch.arange(72.0)", f"torch.arange({shift}, {shift} + 72)").replace(
            "train, options = data,",
            f"train, options = torch.utils.data.random_split(data, [12, 6], generator={generator})[0],",
        )
    )
    return path


def test_rows_of_another_split_are_refused_and_rows_of_other_data_are_named(tmp_path: Path) -> None:
    """A script without a seed for its split chose other rows, and a script whose data had changed gave other contents, without a word."""
    seeded = "torch.Generator().manual_seed(0)"
    data = TensorDataset(torch.arange(72.0).view(18, 4), torch.arange(18))
    source = opened(random_split(data, [12, 6], generator=torch.Generator().manual_seed(0))[0], batch_size=4)
    event = started(source)
    event["data"] |= source.identity
    (tmp_path / "run").mkdir()
    written = [event, {"event": "ended", "step": 3, "time": 2.0}]
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in written))

    def shown(name: str, shift: float, generator: str) -> Result:
        return rows(tmp_path / "run", "--step", 1, split_script(tmp_path / name, shift, generator))

    other = shown("other_split.py", 0.0, "torch.Generator().manual_seed(7)")
    assert (other.exit_code, "chooses other rows of its data set" in other.stderr) == (2, True)
    changed = shown("changed.py", 100.0, seeded)
    assert (changed.exit_code, "the rows differ, or the same rows were computed again" in changed.stderr) == (0, True)
    same = shown("same.py", 0.0, seeded)
    assert (same.exit_code, same.stderr) == (0, "")


def test_a_script_without_a_fit_is_refused(run_and_batches: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("print('hello')")
    refused = rows(run_and_batches[0], "--step", 1, tmp_path / "nothing.py")
    assert (refused.exit_code, "without calling Trainer.fit" in refused.stderr) == (2, True)


def started(source: Source, *, step: int = 0, epoch: int = 0, position: int = 0, ranks: int = 1) -> dict[str, Any]:
    """The event with which a fit on `source` begins."""
    data = {**source.order(), "ranks": ranks, "ranks_per_row": 1}
    return {"event": "started", "time": 1.0, "step": step, "epoch": epoch, "position": position, "data": data}


def files(*events: dict[str, Any], last: int) -> RunFiles:
    """A run that made `last` steps."""
    return RunFiles(Path("run"), {}, [], [], [], [*events, {"event": "ended", "step": last, "time": 2.0}])


def test_a_samplers_rows_come_from_the_script(script: Path, tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(72.0).view(18, 4), torch.arange(18))
    sampler = WeightedRandomSampler(torch.arange(1.0, 19.0).tolist(), 18, replacement=True)
    source = opened(DataLoader(data, batch_size=4, sampler=sampler))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    events = files(started(source), last=7).events
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    refused = rows(run_dir, "--step", 2)
    assert (refused.exit_code, "Add the script to the command" in refused.stderr) == (2, True)
    windows = [batch for epoch in range(2) for batch in windows_of([source], epoch)]
    for step in (1, 5, 7):  # of five updates an epoch
        (part,) = answer(run_dir, "--step", step, script, "--weighted")["parts"]
        assert part["rows"] == windows[step - 1][0][0]
    assert "as it is before training" in rows(run_dir, "--step", 1, script, "--weighted").stderr
    uses = answer(run_dir, "--row", 17, script, "--weighted")["uses"]
    assert [use["step"] for use in uses] == [n for n, window in enumerate(windows[:7], 1) if 17 in window[0][0]]


def test_data_that_gives_rows_in_its_own_order_is_refused_by_name() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(8))

    source = opened(Stream(), batch_size=4)
    with pytest.raises(Exception, match="trained on a stream, which decides the order of its rows itself"):
        fits(files(started(source), last=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --step N for the rows of a step, or --row K"),
        (("--step", 1, "--row", 2), "give --step N for the rows of a step, or --row K"),
        (("--step", STEPS + 1), "the run has no such step. Give one of its steps: 1 to 4, 5 to 10"),
        (("--step", 1, "--rank", 1), "step 1 ran on 1 ranks"),
        (("--row", 18), "the data has 18 rows"),
        (("--row", 1, "--rank", 0), "--rank needs --step"),
    ],
)
def test_what_cannot_be_answered_is_an_error(
    run_and_batches: tuple[Path, list[list[int]]], arguments: Sequence[object], message: str
) -> None:
    refused = rows(run_and_batches[0], *arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_run_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "saved", "step": 1, "time": 1.0}) + "\n")
    assert "does not record in what order" in rows(tmp_path, "--step", 1).stderr


def opened(data: Any, *, batch_size: int | None = None, rank: int = 0, ranks: int = 1, **settings: Any) -> Source:
    loading = Loading(batch_size, shuffle=settings.pop("shuffle", None), drop_last=settings.pop("drop_last", False))
    return open_source(
        data, argument="train", loading=loading, training=True, rank=rank, world_size=ranks, seed=3, **settings
    )


def windows_of(ranks: list[Source], epoch: int, start: int = 0) -> list[list[list[list[int]]]]:
    """By window, rank and micro-step: the rows that sources give, of which each row's last column is its number."""
    by_rank = [
        [
            [batch[-1].tolist() if rows else [] for batch, rows in window.micro_batches]
            for window in source.windows(epoch, start)
        ]
        for source in ranks
    ]
    return [list(window) for window in zip(*by_rank, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(1, 40),
    batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    ranks=st.integers(1, 3),
    shuffle=st.booleans(),
    limit=st.none() | st.integers(1, 5),
    kind=st.sampled_from(["rows", "batches"]),
    begin=st.integers(0, 5),
)
def test_the_computed_rows_are_what_the_sources_of_all_ranks_read(
    number: int, batch_size: int, accumulation: int, ranks: int, shuffle: bool, limit: int | None, kind: str, begin: int
) -> None:
    data = rows_of(number)
    settings: dict[str, Any] = {"accumulation": accumulation, "limit": limit}
    if kind == "batches":
        sampler = type("Own", (BatchSampler,), {})(RandomSampler(data), batch_size, False)
        loader = DataLoader(data, batch_sampler=sampler)
        sources = [opened(loader, rank=rank, ranks=ranks, **settings) for rank in range(ranks)]
    else:
        sources = [
            opened(data, batch_size=batch_size, rank=rank, ranks=ranks, shuffle=shuffle, **settings)
            for rank in range(ranks)
        ]
    windows = [window for epoch in range(3) for window in windows_of(sources, epoch)]
    begin = min(begin, len(windows) - 1)
    epoch, within = divmod(begin, len(windows) // 3)
    position = sum(len(micro) for window in windows_of(sources, epoch)[:within] for rank in window for micro in rank)
    event = started(sources[0], step=begin, epoch=epoch, position=position, ranks=ranks)
    (fit,) = fits(files(event, last=len(windows)), sampler=True)

    def order(data: Any, epoch: int) -> Any:
        return sources[0].order_of(epoch)  # type: ignore[attr-defined]

    for step in range(begin + 1, len(windows) + 1):
        by_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
        for part in rows_of_step([fit], step, order)[1]:
            by_rank[part.rank].append(part.rows)
        assert by_rank == [[micro for micro in rank if micro] for rank in windows[step - 1]]
    row = int(np.random.default_rng(number).integers(number))
    steps = [use.step for use in uses_of_row([fit], row, order)]
    assert steps == [
        step
        for step in range(begin + 1, len(windows) + 1)
        for rank in windows[step - 1]
        for micro in rank
        if row in micro
    ]


def test_skipped_updates_take_rows_and_make_no_step() -> None:
    fit = Fit(10, 0, 0, {}, end=14, skipped=[10, 12, 12])
    assert [fit.window(step) for step in (11, 12, 13, 14)] == [1, 2, 5, 6]
    assert [fit.step(window) for window in range(7)] == [
        (10, False),
        (11, True),
        (12, True),
        (12, False),
        (12, False),
        (13, True),
        (14, True),
    ]


def test_a_run_that_went_back_is_what_the_last_fit_made_of_it() -> None:
    source = opened(rows_of(8), batch_size=4)
    ended = {"event": "ended", "step": 9, "time": 1.0}
    history = fits(files(started(source), started(source, step=6), ended, started(source, step=2), last=4))
    assert [(fit.begin, fit.end) for fit in history] == [(0, 2), (2, 4)]
    assert files(started(source), ended, started(source, step=2), last=4).last_step == 4
