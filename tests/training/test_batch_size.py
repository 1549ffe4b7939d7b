"""The batch size is found in forked processes: a size that does not fit does no harm, under a limit of host memory, on every rank."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import BatchSizeFinder, ConfigurationError, FabricateError, Trainer, TrainModule
from fabricate.testing import close_pools, run_ranks
from fabricate.testing.ranks import run_alone

ROOM, PER_ROW = 2**33, 2**28
"""Bytes of addresses that a process may take beside what it has, and that a row takes. No memory: nothing is written there."""
ROWS = torch.arange(400.0)[:, None] / 400


class Hungry(TrainModule):
    """What a row takes in `training_step`."""

    def __init__(self, ends: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.ends = ends
        self.steps = 0

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if len(batch) > 4 and self.ends:
            if self.ends == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault of the module")
        torch.empty(len(batch), PER_ROW // 4)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def limit(room: int) -> None:
    """Let this process, and those that it forks, take no more than `room` bytes of addresses beside what it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def fit(module: Hungry, finder: Any, run_dir: Path | None = None, **options: Any) -> tuple[Trainer, int]:
    """The Trainer, and the rows of the first update of this rank."""
    trainer = Trainer(max_steps=2, run_dir=run_dir, progress=False, print_plan="none", **options)
    trainer.fit(module, ROWS, batch_size=finder)
    return trainer, trainer.progress.samples


def searched(run_dir: Path) -> dict[str, Any]:
    """One process: a search under a limit, the same fit again, and what is refused."""
    import json

    before = torch.get_rng_state()
    limit(ROOM)
    module, finder = Hungry(), BatchSizeFinder()
    fit(module, finder, run_dir)
    again = BatchSizeFinder()
    fit(Hungry(), again, run_dir)
    killed = BatchSizeFinder()
    fit(Hungry("killed"), killed)
    with pytest.raises(FabricateError) as fault:
        fit(Hungry("fault"), BatchSizeFinder(init_val=8))
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as of_loader:
        Trainer(max_steps=1, progress=False).fit(Hungry(), loader, batch_size=BatchSizeFinder())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigurationError) as late:
        fit(Hungry(), BatchSizeFinder())
    torch.distributed.destroy_process_group()
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["settings"]
    return {
        "tried": finder.results,
        "steps": module.steps,
        "plan": plan["micro_batch_size"],
        "again": again.results,
        "killed": killed.results,
        "errors": [str(each.value) for each in (fault, of_loader, late)],
        "same generators": torch.equal(before, torch.get_rng_state()),
    }


def test_a_search_finds_what_fits_and_leaves_no_trace(tmp_path: Path) -> None:
    report = run_alone(searched, tmp_path / "run")
    assert report["tried"] == {2: True, 4: True, 8: True, 16: True, 32: False}
    assert report["steps"] == 2, "trials run in other processes"
    how = "per rank; found by BatchSizeFinder(mode='power'): 32 ran out of memory"
    assert report["plan"] == {"value": 16, "source": how}
    assert report["again"] == {}, "a run that resumes takes the size from the plan"
    assert report["killed"] == {2: True, 4: True, 8: False}
    fault, of_loader, late = report["errors"]
    assert fault.startswith("rank 0 failed for another reason than lack of memory, so the search ends:")
    assert "RuntimeError: a fault of the module" in fault
    assert (
        "train is a DataLoader, which has this setting itself. Set it there, or pass the data set of the loader instead"
        in of_loader
    )
    assert "this process has a process group already" in late


def searched_on_ranks(strategy: str = "fsdp") -> tuple[dict[int, bool], int, int]:
    """The second rank has less room than the first."""
    limit(ROOM // (1 + int(os.environ["RANK"])))
    finder = BatchSizeFinder(mode="binsearch", init_val=8, margin=0, steps_per_trial=1)
    module = Hungry()
    _, samples = fit(module, finder, strategy=strategy, global_batch_size=96)
    return finder.results, module.steps, samples


def test_ranks_find_what_fits_on_all_of_them_and_the_global_batch_stays(tmp_path: Path) -> None:
    close_pools()  # a process that had a process group cannot search
    ranks = run_ranks(searched_on_ranks, 2)
    close_pools()  # their memory is limited
    assert ranks == [({8: True, 16: False, 12: True}, 8, 192)] * 2
