"""`fabricate check-invariance` finds a loss that is averaged over the wrong items, and finds nothing in a right one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from fabricate import ConfigurationError, FabricateError, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.cli.main import main
from fabricate.selfcheck import checked_trainer, runner
from fabricate.selfcheck.checked_trainer import resplit
from fabricate.selfcheck.invariance import _factorisations
from fabricate.selfcheck.requests import Trial
from fabricate.testing import KitFailure, check_invariance

SCRIPT = Path(__file__).parents[1] / "scripts" / "weighted.py"


def test_every_split_of_a_weighted_loss_learns_the_same_on_sharded_ranks_too(tmp_path: Path) -> None:
    options = ["--global-batch", "4", "--worlds", "1,2", "--strategy", "fsdp", "--steps", "3"]
    command = [sys.executable, "-m", "fabricate", "check-invariance", *options, str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    splits = re.findall(r"^  (\d) x (\d) x (\d) +(\S+) +(\S+)", process.stdout, re.MULTILINE)
    assert [tuple(map(int, split[:3])) for split in splits] == [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)]
    assert splits[0][3:] == ("0.0e+00", "0.0e+00")
    assert all(float(number) < 1e-6 for split in splits for number in split[3:])
    assert any(float(split[4]) > 0 for split in splits)  # other sums, so other roundings: they were not all one run
    assert "note: dropout is off during the check (1 layers)\n" in process.stdout
    assert re.search(r"largest relative difference over 3 updates: \S+, at most 1e-05\n$", process.stdout)
    assert os.listdir(tmp_path) == []


def test_a_mean_over_the_wrong_number_is_found_and_the_remedy_is_told() -> None:
    with pytest.raises(KitFailure) as raised:
        check_invariance(SCRIPT, ["--mean"], global_batch_size=4, world_sizes=[1], steps=2)
    message = str(raised.value)
    assert re.search(
        r"split as 1 x [12] x [24] \(ranks x micro-batch x accumulation\), losses differ by \S+e-0[12]", message
    )
    assert "return its weight too: {'loss': loss, 'weight': number}" in message


def test_the_command_ends_with_1_where_a_split_differs_and_prints_numbers_for_programs() -> None:
    options = ["--global-batch", "2", "--worlds", "1", "--steps", "2", "--json"]
    shown = CliRunner().invoke(main, ["check-invariance", *options, str(SCRIPT), "--", "--mean"])
    assert shown.exit_code == 1, shown.output
    report = json.loads(shown.output)
    assert (report["steps"], len(report["splits"])) == (2, 2)
    assert report["largest"] > 1e-3


WARMING_UP = """
import torch
from torch.utils.data import TensorDataset
from fabricate import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        x, y = batch
        lines = self.layer(x).squeeze(1)
        wrong = lines.mean() * y.mean()  # a product of means: its gradient depends on the micro-batch
        return {"loss": lines.mean() + (wrong - wrong.detach()), "weight": len(x)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=RATE)

x = torch.arange(24.0).reshape(8, 3) / 24
Trainer(max_steps=2, seed=1).fit(Net(), TensorDataset(x, torch.tensor([5.0, -5, 4, -4, 3, 3, -3, -3])), batch_size=4)
"""


def test_updates_that_hardly_change_the_weights_are_named_because_they_hide_a_wrong_gradient(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WARMING_UP.replace("RATE", "1e-8"))
    command = ["check-invariance", "--global-batch", "4", "--worlds", "1", "--steps", "2", str(script)]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    note = (
        r"the updates changed the weights by \d\.\de-0[678] of their size at most, so a wrong gradient may stay below"
    )
    assert re.search(f"note: {note}", shown.output)
    with pytest.warns(UserWarning, match=note):
        report = check_invariance(script, global_batch_size=4, world_sizes=[1], steps=2)
    assert report["unseen"] in shown.output
    script.write_text(WARMING_UP.replace("RATE", "0.01"))
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 1, shown.output
    assert "the updates changed" not in shown.output


NORMED = """
import torch
from fabricate import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv1d(3, 3, 1), torch.nn.BatchNorm1d(3))

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

Trainer(max_steps=2, seed=1).fit(Net(), torch.arange(48.0).reshape(8, 3, 2), batch_size=4)
"""


def test_batch_norm_is_named_on_several_ranks_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NORMED)
    options = ["--global-batch", "4", "--worlds", "1,2", "--steps", "2"]
    shown = CliRunner().invoke(main, ["check-invariance", *options, str(tmp_path / "train.py")])
    assert shown.exit_code == 1, shown.output
    assert "layers.1 is a BatchNorm. It takes its statistics from each micro-batch" in shown.output
    assert "2 x 2 x 1" in shown.output
    frozen = NORMED.replace("        return self.layers", "        self.layers[1].eval()\n        return self.layers")
    (tmp_path / "train.py").write_text(frozen)
    shown = CliRunner().invoke(main, ["check-invariance", *options, str(tmp_path / "train.py")])
    assert shown.exit_code == 0, shown.output
    assert "BatchNorm" not in shown.output


def test_a_script_that_fails_or_trains_nothing_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello'); raise SystemExit(3)")
    with pytest.raises(FabricateError, match=r"exit code 3 on 1 ranks(.|\n)*hello"):
        check_invariance(script, world_sizes=[1])
    script.write_text("")
    for arguments, complaint in (
        ([script, "--worlds", "1"], "ended without a fit"),
        ([tmp_path / "nothing.py"], "is not a file"),
        ([script, "--worlds", "0"], "give positive whole numbers"),
        ([script, "--worlds", "all"], "joined by commas"),
    ):
        shown = CliRunner().invoke(main, ["check-invariance", *map(str, arguments)])
        assert shown.exit_code == 2
        assert complaint in shown.stderr


def test_the_first_of_several_fits_is_checked_without_callbacks_that_write(tmp_path: Path) -> None:
    text = SCRIPT.read_text(encoding="utf-8").replace("import EarlyStopping,", "import EarlyStopping, SaveOnException,")
    text = text.replace("plugins=[EarlyStopping()]", "plugins=[EarlyStopping(), SaveOnException()]")
    text = text.replace("    print(result", "    trainer.fit(torch.nn.Module(), loader)\n    print(result")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    command = ["check-invariance", "--global-batch", "2", "--worlds", "1,2", "--steps", "2", str(tmp_path / "train.py")]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("note: the script has further fits, and only the first was checked\n") == 1


def test_a_global_batch_is_split_in_every_way_and_the_whole_comes_first() -> None:
    splits = [(s.world_size, s.micro_batch, s.accumulation) for s in _factorisations(12, (3, 2, 5))]
    assert splits[0] == (1, 12, 1)
    assert splits[1:] == [(2, 6, 1), (2, 3, 2), (2, 2, 3), (2, 1, 6), (3, 4, 1), (3, 2, 2), (3, 1, 4)]
    together = [(s.world_size, s.micro_batch, s.accumulation) for s in _factorisations(4, (2, 4), lambda ranks: 2)]
    assert together[1:] == [(2, 4, 1), (2, 2, 2), (2, 1, 4), (4, 2, 1), (4, 1, 2)]


# -- a fit with the split of a trial


def trial(tmp_path: Path, **changes: Any) -> Trial:
    values = {"steps": 2, "micro_batch": 2, "accumulation": 3, "begin": str(tmp_path / "begin"), "notes": str(tmp_path)}
    return Trial(**(values | changes))


class Normalised(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
        self.sizes: list[int] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_takes_the_split_begins_where_all_begin_and_says_what_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TensorDataset(torch.randn(12, 3))
    for number in (0, 1):
        monkeypatch.setattr(runner, "request", trial(tmp_path, notes=str(tmp_path / str(number))))
        module = Normalised()
        trainer = checked_trainer.Trainer(max_epochs=1, global_batch_size=12, run_dir=tmp_path / "run", progress=False)
        trainer.fit(module, DataLoader(data, batch_size=12), resume=tmp_path / "anything")
        assert module.sizes == [2] * 6
    assert not (tmp_path / "run").exists()
    notes = [json.loads((tmp_path / str(number) / "notes.json").read_text()) for number in (0, 1)]
    assert notes[0] == notes[1]  # the second module had other weights, until the fit began
    assert len(notes[0]["losses"]) == 2
    assert [note.partition(" is ")[0] for note in notes[0]["notes"]] == ["dropout", "layers.1"]
    with Reader(tmp_path / "begin") as begin, Reader(tmp_path / "0/end") as end:
        assert (begin.manifest.step, end.manifest.step) == (0, 2)
        assert begin.read("model/layers.0.weight") != end.read("model/layers.0.weight")


def test_a_loader_is_split_anew_and_keeps_its_sampler_and_batches_of_its_own_are_refused(tmp_path: Path) -> None:
    split = trial(tmp_path)
    data = TensorDataset(torch.randn(7, 3))
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    again, batch_size = resplit(loader, split)
    assert (again.batch_size, again.sampler, again.drop_last, batch_size) == (2, loader.sampler, True, None)
    assert resplit(data, split) == (data, 2)

    class Own(BatchSampler):
        pass

    for own in (
        DataLoader(data, batch_sampler=Own(SequentialSampler(data), 2, False)),
        DataLoader(data, batch_size=None),
    ):
        with pytest.raises(ConfigurationError, match="cannot split these batches"):
            resplit(own, split)
