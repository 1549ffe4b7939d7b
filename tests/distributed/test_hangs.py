"""A rank that hangs: the error of the other ranks after the time-out names its place, and `fabricate doctor --run` shows it before."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.utils.data import DataLoader, Dataset

from fabricate import Callback, RankError, Trainer, TrainModule
from fabricate.cli.main import main
from fabricate.distributed import failures
from fabricate.distributed.hang_report import awaited, numbers, report
from fabricate.distributed.stacks import Address, Frame, Reached, Seen, _status, ask, here
from fabricate.testing import run_ranks

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="another process is asked through Linux's /proc"),
]


def on_rank_1() -> bool:
    return os.environ["RANK"] == "1"


def hang(folder: Path, case: str, wait: Callable[[float], object] = time.sleep) -> None:
    """Rank 1 stays here until the test, or its end, lets it continue."""
    if on_rank_1():
        (folder / case).touch()
        while not (folder / f"{case}.go").exists() and not (folder / "over").exists():
            wait(0.2)


class Rows(Dataset[torch.Tensor]):
    """The worker process of rank 1 hangs in the last update of the epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> torch.Tensor:
        if row >= 12:
            hang(self.folder, "data")
        return torch.ones(4)


class Net(TrainModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.folder = folder

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.trainer.step:  # not when validation is tried before training
            hang(self.folder, "evaluation")
        return {"loss": self.layer(batch).mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hangs(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, step: int) -> None:
        if step == 1:
            hang(self.folder, "loop", wait=lambda seconds: None)
        elif step == 2:
            hang(self.folder, "lock", wait=threading.Event().wait)
        elif step == 3:
            hang(self.folder, "sum")
            dist.all_reduce(torch.ones(1))

    def on_save(self, state: dict[str, Any]) -> None:
        hang(self.folder, "save")


def hangs_everywhere(folder: Path) -> None:
    """Rank 1 hangs in one place after the other, at last between two fits."""
    for number in (1, 2):
        trainer = Trainer(
            max_epochs=1,
            run_dir=folder / f"run-{number}",
            plugins=[Hangs(folder)],
            strategy="ddp",
            seed=1,
            progress=False,
        )
        train = DataLoader(Rows(folder), batch_size=2, num_workers=1, multiprocessing_context="fork")
        trainer.fit(Net(folder), train, DataLoader(torch.ones(4, 4), batch_size=2))
        hang(folder, "between")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, Future[Any]]]:
    """A run of two ranks that hangs again and again."""
    run_ranks(on_rank_1, 2)  # starts the processes
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_ranks, hangs_everywhere, 2, tmp_path)
        try:
            yield tmp_path, running
        finally:
            (tmp_path / "over").touch()


def doctor_of(folder: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", "--run", str(folder / "run-1"), *options], catch_exceptions=False)
    return result.exit_code, result.output


EXPECTED = {
    "loop": ("runs code", "in hook on_step of plugin 'Hangs', update 1, micro-batch 0", "", "in hang"),
    "lock": ("waits", "in hook on_step of plugin 'Hangs', update 2, micro-batch 1", "", "in wait"),
    "sum": ("waits", "in hook on_step of plugin 'Hangs', update 3, micro-batch 2", "all_reduce", "in hang"),
    "data": ("waits", "reading data", "", "in _try_get_data"),
    "evaluation": ("waits", "in an evaluation, after update 4, batch 0", "", "in validation_step"),
    "save": ("waits", "in a save, in hook on_save of plugin 'Hangs', update 4", "", "in on_save"),
    "between": ("waits", "outside of a fit, after update 4", "", "in hangs_everywhere"),
}
"""By the place where rank 1 hangs: its state, what is said of it, what rank 0 awaits, and a line of its stack."""


def matches(text: str, state: str, facts: str, collective: str, line: str) -> str:
    """The paragraph of rank 1 where all of the text is as expected, else nothing."""
    zero, _, one = text.partition("\nrank 1 ")
    good = (
        re.match(rf"rank 0 on \S+ \(process \d+\): waits in {collective}", zero)
        and re.match(rf"on \S+ \(process \d+\): {state}, .*{re.escape(facts)}", one)
        and line in one
        and text.endswith("\nbegin with rank 1, in no collective, while rank 0 waits in one\n")
    )
    return one if good else ""


def test_doctor_says_where_each_rank_of_a_live_run_is(run: tuple[Path, Future[Any]]) -> None:
    folder, running = run
    for case, expected in EXPECTED.items():
        deadline, text, one = time.monotonic() + 100, "", ""
        while not one:
            assert not running.done(), running.result()
            assert time.monotonic() < deadline, (case, text)
            time.sleep(0.1)
            if (folder / case).exists():  # and rank 0 comes to where it waits
                code, text = doctor_of(folder)
                assert code == 0, text
                one = matches(text, *expected)
        if case == "loop":
            assert_stopped(folder, int(re.findall(r"process (\d+)", one)[0]))
        if case == "data":
            worker = one.partition("its data worker (process ")[2]
            assert "): waits" in worker
            assert "in __getitem__" in worker
        (folder / f"{case}.go").touch()
    assert running.result(100) == [None, None]


def assert_stopped(folder: Path, process: int) -> None:
    """Of a rank that is stopped no stack can be had, but how far it came."""
    os.kill(process, signal.SIGSTOP)
    try:
        code, text = doctor_of(folder, "--json")
    finally:
        os.kill(process, signal.SIGCONT)
    zero, one = json.loads(text)
    assert code == 1
    assert (zero["rank"], zero["state"], one["rank"], one["state"]) == (0, "waits", 1, "stopped")
    assert one["frames"] == []
    assert one["reached"] == {"running": True, "update": 1, "micro_step": 0, "batch": -1}


class Stuck(Callback):
    """At update 2 rank 1 is late, by more than rank 0 waits, or rank 0 is somewhere else."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step(self, step: int) -> None:
        if step == 2 and self.how == "different" and not on_rank_1():
            dist.all_reduce(torch.ones(1))
        elif step == 2 and self.how == "loop" and on_rank_1():
            end = time.monotonic() + 60
            while time.monotonic() < end:
                pass


def stuck(how: str) -> None:
    """Raises on rank 0 alone, so that these processes end."""
    failures._ANSWER_SECONDS = 3.0
    options: dict[str, Any] = {"max_steps": 3, "strategy": "ddp", "seed": 1, "progress": False}
    Trainer(**options).fit(Net(Path()), torch.ones(12, 4), batch_size=2)  # what is imported and opened once
    if how == "between" and on_rank_1():
        time.sleep(60)
    try:
        Trainer(plugins=[Stuck(how)], timeout="0.07 minutes", **options).fit(
            Net(Path()), torch.ones(12, 4), batch_size=2
        )
    except RankError:
        if not on_rank_1():
            raise


@pytest.mark.parametrize(
    ("how", "headline", "zero", "one", "last"),
    [
        (
            "loop",
            r"rank 1 on \S+ did not answer rank 0 on ",
            r"waited in vain for agree \(fabricate\), update 2, micro-batch 1",
            "runs code, in hook on_step of plugin 'Stuck', update 2, micro-batch 1",
            "begin with rank 1, in no collective, while rank 0 waits in one",
        ),
        (
            "between",
            r"rank 1 on \S+ did not answer rank 0 on ",
            r"waited in vain for join \(fabricate\), outside of a fit, after update 3",
            "waits, outside of a fit, after update 3",
            "begin with rank 1, in no collective, while rank 0 waits in one",
        ),
        (
            "different",
            "all ranks still answer and none reported an error",
            "waited in vain for all_reduce, in hook on_step of plugin 'Stuck', update 2, micro-batch 1",
            r"waited in vain for agree \(fabricate\), update 2, micro-batch 1",
            r"the ranks wait in different collectives \(all_reduce: rank 0; agree \(fabricate\): rank 1\)",
        ),
    ],
    ids=["loop", "between", "different"],
)
def test_the_error_after_the_time_out_says_where_each_rank_was(
    how: str, headline: str, zero: str, one: str, last: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(stuck, 2, how)
    text = str(caught.value)
    parts = [
        rf"^rank 0 raised \S*RankError: {headline}",
        rf"^rank 0 on \S+ \(process \d+\): {zero}$",
        rf"^rank 1 on \S+ \(process \d+\): {one}$",
        "in stuck$",
        f"^{last}$",
    ]
    for part in parts:
        assert re.search(part, text, re.MULTILINE), (part, text)


def test_processes_that_are_not_there_are_not_asked() -> None:
    own = here().address
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        began = (_status(sleeper.pid) or ("", 0))[1]
        others = [
            Address(own.host, own.process, own.began + 1, own.memory),  # the number is of another process now
            Address(own.host, sleeper.pid, began, own.memory),  # shows nothing of itself
            Address("far-away", 1, 1, 3),
        ]
        assert [process.state for process in ask(others)] == ["gone", "gone", "elsewhere"]
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


COMPUTES = """
import os, signal, threading, time
from fabricate.distributed.stacks import here
here()
over = time.monotonic() + 2
def compute():
    while time.monotonic() < over:
        sorted(str(number) for number in range(50))
threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(500):
    os.kill(os.getpid(), signal.SIGURG)
    [str(number) for number in range(50)]
for thread in threads:
    thread.join()
print("done")
"""


def test_a_process_that_computes_can_be_asked_again_and_again() -> None:
    """The handler of the signal runs between any two instructions."""
    process = subprocess.run([sys.executable, "-c", COMPUTES], capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr


def test_a_directory_without_a_fit_and_one_whose_fit_is_over_say_so(tmp_path: Path) -> None:
    def doctor() -> tuple[int, str]:
        result = CliRunner().invoke(main, ["doctor", "--run", str(tmp_path)])
        return result.exit_code, result.output.strip()

    assert doctor() == (
        2,
        f"error: '{tmp_path}' holds no ranks.json, so no fit has begun there; give the run_dir of a fit",
    )
    gone = {"host": here().address.host, "process": os.getpid(), "began": 1, "memory": 3}
    (tmp_path / "ranks.json").write_text(json.dumps({"ranks": [gone, gone], "listeners": []}))
    assert doctor() == (1, f"no fit is running in {tmp_path}: the processes of its last one are gone")
    (tmp_path / "ranks.json").write_text("[]")
    assert "ranks.json is damaged or was not written by fabricate" in doctor()[1]


def test_ranks_that_do_the_same_are_one_paragraph() -> None:
    stack = (Frame("train.py", 3, "main"), Frame("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce"))
    alike = {rank: Seen("a", rank, "waits", stack, Reached(True, 7, 6, -1)) for rank in (0, 2, 3, 4)}
    text = report(alike | {1: Seen("b", 1, "unknown")})
    assert text.splitlines() == [
        "ranks 0, 2-4: waits in all_reduce, update 7, micro-batch 6",
        '  File "train.py", line 3, in main',
        '  File "/x/torch/distributed/distributed_c10d.py", line 9, in all_reduce',
        "rank 1 on b (process 1): unknown: no rank of its host answers",
        "begin with rank 1, in no collective, while ranks 0, 2-4 wait in one",
    ]
    assert numbers([5, 1, 2]) == "1-2, 5"


def test_code_that_runs_awaits_nothing() -> None:
    backward = [Frame("train.py", 3, "main"), Frame("/x/torch/autograd/graph.py", 9, "_engine_run_backward")]
    assert awaited(backward) == "backward (the gradients of other ranks)"
    assert awaited(backward, runs=True) == awaited([]) == awaited(backward[:1]) == ""
