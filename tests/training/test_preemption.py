"""A run that receives a signal to end saves its state, ends with its own exit code, and resumes exactly later."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fabricate import Callback, ConfigurationError, FitResult, RankError, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.distributed.connections import break_connections
from fabricate.distributed.group import Group
from fabricate.testing import close_pools, run_ranks
from fabricate.training.interruptions import overdue, preemption
from fabricate.training.interruptions.requests import Requests, SignalWhileWaiting
from tests.support.workers import own_children

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STEPS = 8


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.3)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.layer(self.drop(batch[0])).square().mean()

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(batch[0]).square().mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class SendsSignals(Callback):
    """Hears a signal in the middle of something, and what `on_preempt` is told."""

    def __init__(self, where: str = "", *numbers: int, rank: int = 0, step: int = 3) -> None:
        self.where, self.numbers, self.rank, self.at = where, numbers, rank, step
        self.preempted: list[str] = []

    def _raise(self, where: str, step: int) -> None:
        if where == self.where and step == self.at and int(os.environ.get("RANK", "0")) == self.rank:
            for number in self.numbers:
                os.kill(os.getpid(), number)

    def on_accumulate(self, trainer: Trainer) -> None:
        self._raise("window", trainer.step + 1)

    def on_step(self, step: int) -> None:
        self._raise("step", step)

    def on_before_step(self, trainer: Trainer) -> None:
        if self.where == "agreement":
            engine: Any = trainer._live().engine
            agree, step = engine.agree, trainer.step + 1

            def agree_and_hear(values: list[int]) -> list[int]:
                engine.agree = agree
                answer: list[int] = agree(values)
                self._raise("agreement", step)
                return answer

            engine.agree = agree_and_hear

    def on_eval_start(self, trainer: Trainer) -> None:
        self._raise("validation", trainer.step)

    def on_save(self, trainer: Trainer) -> None:
        self._raise("save", trainer.step)

    def on_fit_start(self) -> None:
        self._raise("start", self.at)

    def on_preempt(self, signal: str) -> None:
        self.preempted.append(signal)


def rows(number: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(number, 4, generator=torch.Generator().manual_seed(0)))


def fit(run_dir: Path | None, *plugins: object, data: Any = None, **options: Any) -> FitResult:
    settings = {"max_steps": STEPS, "seed": 1, "progress": False, "log_every": 2, "validate_every": 3, "save_every": 3}
    trainer = Trainer(run_dir=run_dir, plugins=plugins, keep="all", **{**settings, **options})
    torch.manual_seed(11)  # for the layers, which are built before the fit
    if data is not None:
        return trainer.fit(Net(), data)
    return trainer.fit(Net(), rows(), rows(4), batch_size=2)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


def content(run_dir: Path, step: int = STEPS) -> dict[str, Any]:
    """All of a checkpoint that a clock has no part in."""
    with Reader(run_dir / "checkpoints" / f"step-{step:08d}") as reader:
        contents: dict[str, Any] = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        state: Any = reader.json("state.json")
    state["progress"].pop("seconds")
    state.pop("metrics_bytes")
    return contents | state


def metrics(run_dir: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in lines]


def assert_same_run(first: Path, second: Path, step: int = STEPS) -> None:
    assert content(second, step) == content(first, step)
    assert metrics(second) == metrics(first)


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.fixture(autouse=True)
def _nobody_told_this_process() -> Iterator[None]:
    yield
    preemption._told.clear()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("straight")
    fit(root, SendsSignals())
    return root


# ------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("where", "step", "stopped"),
    [("start", 3, 1), ("window", 3, 3), ("step", 2, 2), ("step", 3, 3), ("validation", 3, 3), ("save", 3, 4)],
)
@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,), (signal.SIGUSR1,), (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)],
    ids=["SIGTERM", "SIGUSR1", "three"],
)
def test_a_signal_anywhere_saves_and_ends_the_fit_which_goes_on_bit_by_bit(
    tmp_path: Path, straight: Path, where: str, step: int, stopped: int, numbers: tuple[int, ...]
) -> None:
    before, plugin = handlers(), SendsSignals(where, *numbers, step=step)
    result = fit(tmp_path, plugin)
    assert handlers() == before
    assert (result.stop_reason, result.exit_code, result.steps) == ("preempted", 75, stopped)
    assert plugin.preempted == [signal.Signals(numbers[0]).name]
    assert result.checkpoint == tmp_path / "checkpoints" / f"step-{stopped:08d}"
    assert not (tmp_path / "model").exists()
    preemption._told.clear()  # as in the process that is started next
    assert fit(tmp_path, SendsSignals()).exit_code == 0
    assert_same_run(straight, tmp_path)


def test_a_process_that_was_told_to_end_begins_no_further_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(None, SendsSignals("step", signal.SIGTERM)).stop_reason == "preempted"
    again = fit(None)
    assert (again.stop_reason, again.exit_code, again.steps) == ("preempted", 75, 0)
    assert "SIGTERM asked this process to end, so no further fit is started" in capsys.readouterr().err


def test_a_fit_that_gets_a_signal_in_its_last_update_is_complete(tmp_path: Path) -> None:
    plugin = SendsSignals("step", signal.SIGTERM, step=STEPS)
    result = fit(tmp_path, plugin)
    assert (result.stop_reason, result.exit_code, plugin.preempted) == ("max_steps", 0, [])
    assert (tmp_path / "model").exists()

    class Enough(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 3:
                trainer.stop("good enough")

    preemption._told.clear()
    assert fit(None, SendsSignals("step", signal.SIGTERM), Enough()).stop_reason == "good enough"


def test_ctrl_c_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    fit(None, SendsSignals("step", signal.SIGINT))
    assert (
        capfd.readouterr().err.count("Ctrl-C: the fit ends after the update or the evaluation in progress; once more")
        == 1
    )


def test_ctrl_c_is_an_interruption_and_no_reason_to_start_again() -> None:
    plugin = SendsSignals("step", signal.SIGINT)
    result = fit(None, plugin)
    assert (result.stop_reason, result.exit_code, plugin.preempted) == ("interrupted", 0, ["SIGINT"])
    assert fit(None).stop_reason == "max_steps"


def test_the_time_budget_ends_the_fit_and_the_next_call_has_a_new_one(tmp_path: Path, straight: Path) -> None:
    class Slow(Callback):
        def on_step(self, step: int) -> None:
            time.sleep(0.4 if step == 4 else 0)

    plugin = SendsSignals()
    fit(tmp_path / "imports")  # what is imported by the first fit does not count here
    result = fit(tmp_path / "run", plugin, Slow(), max_time="0.0066 minutes")
    assert (result.stop_reason, result.exit_code, plugin.preempted) == ("preempted", 75, ["max_time"])
    assert result.steps < STEPS
    assert fit(tmp_path / "run", SendsSignals(), Slow(), max_time="1 hour").stop_reason == "max_steps"
    assert_same_run(straight, tmp_path / "run")


@pytest.mark.parametrize("value", ["10 steps", "1 epoch", 3, "soon"])
def test_a_time_budget_is_a_time(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_time="):
        Trainer(max_steps=1, max_time=value)


def test_a_touched_file_ends_the_fit_and_is_taken_away(tmp_path: Path, straight: Path) -> None:
    class Touches(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 3:
                assert trainer.run_dir is not None
                (trainer.run_dir / "stop").touch()
                time.sleep(1.1)  # it is looked for once a second

    plugin = SendsSignals()
    quiet = {"log_every": 100, "validate_every": None, "save_every": None}
    assert fit(tmp_path / "quiet", Touches(), **quiet).steps == 3
    assert fit(tmp_path, plugin, Touches()).steps == 3
    assert plugin.preempted == ["stop file"]
    assert not (tmp_path / "stop").exists()
    assert fit(tmp_path, SendsSignals()).stop_reason == "max_steps"
    assert_same_run(straight, tmp_path)


def test_the_plan_names_signals_that_do_not_save(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None:
        signals.append(number)

    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert fit(tmp_path / "own", SendsSignals("step", signal.SIGTERM)).stop_reason == "max_steps"
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signals == [signal.SIGTERM]
    thread = threading.Thread(target=fit, args=(tmp_path / "thread",))
    thread.start()
    thread.join()
    notes = {name: json.loads((tmp_path / name / "plan.json").read_text())["notes"] for name in ("own", "thread")}
    assert any("SIGTERM is handled by the script" in note for note in notes["own"])
    assert any("outside the main thread" in note for note in notes["thread"])


def test_a_child_that_the_script_forks_ends_as_it_would_without_a_fit() -> None:
    codes = []

    class Forks(Callback):
        def on_step(self, step: int) -> None:
            if step == 2:
                for number in (signal.SIGTERM, signal.SIGUSR1):
                    ready, here = os.pipe()
                    child = os.fork()
                    if not child:
                        os.write(here, b"x")
                        time.sleep(20)
                        os._exit(1)
                    os.read(ready, 1)
                    os.close(ready)
                    os.close(here)
                    os.kill(child, number)
                    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert fit(None, Forks()).stop_reason == "max_steps"
    assert codes == [-signal.SIGTERM, -signal.SIGUSR1]


class Stuck(Dataset[Any]):
    """A row of it never comes."""

    def __init__(self, sleep: Callable[[int], Any]) -> None:
        self.sleep = sleep

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Any:
        if row == 2:
            self.sleep(100_000)
        return (torch.zeros(4),)


class Late:
    """Of two workers the second is still at its start when the first has made batches."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.seconds = next(Late.numbers) % 2

    def run(self) -> None:
        time.sleep(self.seconds)
        super().run()  # type: ignore[misc]


class LateForks(multiprocessing.context.ForkContext):
    class Process(Late, multiprocessing.context.ForkProcess):
        pass


class LateSpawns(multiprocessing.context.SpawnContext):
    class Process(Late, multiprocessing.context.SpawnProcess):
        pass


@pytest.mark.parametrize("context", [LateForks(), LateSpawns()])
def test_what_a_whole_process_group_hears_does_not_end_the_workers(
    context: multiprocessing.context.BaseContext,
) -> None:
    class Signals(Callback):
        def on_step(self, step: int) -> None:
            workers = own_children()
            assert len(workers) == 2
            # From another process, as a launcher does it; what this process sends is torch's own way to end a worker.
            for worker in workers:
                for name in ("INT", "USR1", "TERM"):
                    subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)

    loader = DataLoader(rows(), batch_size=2, num_workers=2, multiprocessing_context=context)
    assert fit(None, Signals(), data=loader, max_steps=3).steps == 3


@pytest.mark.parametrize(
    "sleep", [time.sleep, ctypes.PyDLL(None).sleep], ids=["in Python", "holding the interpreter's lock"]
)
def test_a_worker_that_hangs_still_ends_with_the_fit(sleep: Callable[[int], Any]) -> None:
    class Leaves(Callback):
        def on_step(self, step: int) -> None:
            raise KeyError("enough")

    loader = DataLoader(Stuck(sleep), batch_size=1, num_workers=1)
    with pytest.raises(KeyError, match="enough"):
        fit(None, Leaves(), data=loader, max_steps=12)
    assert not own_children()


ORPHAN = """
import multiprocessing, os, signal, sys, time
from fabricate.data.workers import live_with

def work(main):
    print(os.getpid(), flush=True)
    while os.getppid() == main:  # as torch would find it: the parent is gone before anybody looks
        time.sleep(0.01)
    live_with(main)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(os.getpid(),)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_whose_main_process_was_killed_at_its_start_ends(tmp_path: Path, method: str) -> None:
    file = tmp_path / "orphan.py"
    file.write_text(ORPHAN)
    with subprocess.Popen([sys.executable, str(file), method], stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        worker = psutil.Process(int(main.stdout.readline()))
        main.kill()
    try:
        worker.wait(240)
    finally:
        if worker.is_running():
            worker.kill()


# ------------------------------------------------------------------------------------------------- two ranks


def on_two_ranks(root: Path) -> dict[str, Any]:
    """Signals that reach one rank only; what each fit ended with on this rank, and what `on_preempt` was told."""
    results: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        fit(root / strategy / "straight", SendsSignals(), strategy=strategy)
        for name, plugin in {
            "step": SendsSignals("step", signal.SIGUSR1, rank=1),
            "window": SendsSignals("window", signal.SIGTERM, signal.SIGTERM, rank=1),
            "validation": SendsSignals("validation", signal.SIGTERM, rank=1),
            "save": SendsSignals("save", signal.SIGUSR1, rank=0),
            "agreement": SendsSignals("agreement", signal.SIGTERM, rank=1, step=1),  # nothing else is due
        }.items():
            result = fit(root / strategy / name, plugin, strategy=strategy)
            results[f"{strategy}/{name}"] = (result.stop_reason, result.exit_code, result.steps, plugin.preempted)
            preemption._told.clear()
            assert fit(root / strategy / name, SendsSignals(), strategy=strategy).stop_reason == "max_steps"
    return results


def test_a_signal_on_one_rank_stops_all_of_them_at_the_same_update(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert first == second
    for strategy in ("ddp", "fsdp"):
        for name, signal_name, stopped in (
            ("step", "SIGUSR1", 3),
            ("window", "SIGTERM", 3),
            ("validation", "SIGTERM", 3),
            ("save", "SIGUSR1", 4),
            ("agreement", "SIGTERM", 2),
        ):
            assert first[f"{strategy}/{name}"] == ("preempted", 75, stopped, [signal_name])
            assert stopped in saved(tmp_path / strategy / name)
            assert_same_run(tmp_path / strategy / "straight", tmp_path / strategy / name)


# ------------------------------------------------------------------------------------------------- real processes


def started(command: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    return process.returncode, output


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + 240
    file = run_dir / "metrics.jsonl"
    while not (file.exists() and len(file.read_text().splitlines()) >= number):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the script did not get so far"
        time.sleep(0.02)


FABRICATE = [sys.executable, "-m", "fabricate", "run", "--nproc"]
MANY = ["--steps", "600", "--dropout", "0.3", "--slow"]


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        # torchrun hands the signal on to every process of every rank, data loader workers too.
        ([*FABRICATE, "2", str(SCRIPT), "--", "--workers", "1"], signal.SIGTERM, 75),
        ([*FABRICATE, "1", str(SCRIPT), "--"], signal.SIGUSR1, 75),
        ([sys.executable, str(SCRIPT), "--exit-code"], signal.SIGTERM, 75),
    ],
    ids=["fabricate run, two ranks", "fabricate run", "python, with the exit code"],
)
def test_a_signal_to_the_command_ends_it_with_the_code_and_the_same_command_goes_on(
    tmp_path: Path, command: list[str], number: int, code: int
) -> None:
    process = started([*command, str(tmp_path), *MANY])
    try:
        wait_for_steps(process, tmp_path, 3)
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)
        # Only now may the fit end. A second signal to a script whose fit is over ends it as it would any script.
        (tmp_path / "told").touch()
    finally:
        returned, output = ended(process)
    assert returned == code, output
    assert f"preempted by {signal.Signals(number).name} at step " in output
    (stopped_at,) = saved(tmp_path)
    assert 2 < stopped_at < 600
    if "--exit-code" in command:
        return
    returned, output = ended(started([*command, str(tmp_path), "--steps", str(stopped_at + 2), "--dropout", "0.3"]))
    assert returned == 0, output
    assert f"(step {stopped_at})" in output
    assert [line["step"] for line in metrics(tmp_path) if line["stage"] == "train"] == list(range(1, stopped_at + 3))


def test_a_script_that_fails_or_names_a_code_keeps_it(tmp_path: Path) -> None:
    for body, code in (("sys.exit(3)", 3), ("sys.exit('why')", 1), ("1 / 0", 1), ("sys.exit()", 0), ("pass", 0)):
        script = tmp_path / "script.py"
        script.write_text(f"import sys\nassert sys.argv[1:] == ['a', '--b'], sys.argv\nimport beside\n{body}\n")
        (tmp_path / "beside.py").touch()
        returned, output = ended(started([*FABRICATE, "1", str(script), "a", "--b"]))
        assert returned == code, output


class Hangs(torch.utils.data.Dataset[torch.Tensor]):
    """A worker never answers for the fourth batch."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> torch.Tensor:
        if row >= 12:
            time.sleep(1000)
        return torch.full((3,), float(row))


class Mean(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return 1e-3 * self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_step(self, step: int) -> None:
        if step == 3:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_a_signal_ends_the_wait_for_a_worker_that_hangs_and_the_state_is_saved(tmp_path: Path) -> None:
    began = time.monotonic()
    trainer = Trainer(max_epochs=1, seed=1, progress=False, run_dir=tmp_path)
    result = trainer.fit(Mean(), Hangs(), batch_size=4, num_workers=1, shuffle=False)
    assert (result.stop_reason, result.steps) == ("interrupted", 3)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000003"
    assert time.monotonic() - began < 60


def test_an_overdue_wait_ends_once_however_long_its_workers_take_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "PATIENCE_SECONDS", 0.5)
    requests, ended = Requests(), []

    def items() -> Iterator[int]:
        try:
            time.sleep(30)
            yield 0
        finally:
            time.sleep(2)
            ended.append("workers")

    with preemption.signals_heard(requests), overdue.overdue_waits_end(requests, Group(0, 1), "one wait"):
        requests.ask(signal="SIGTERM")
        with pytest.raises(SignalWhileWaiting):
            list(overdue.waiting(requests, items()))
    assert ended == ["workers"]


class HangsOnOneRank(Hangs):
    """As `Hangs`, on rank 1 alone."""

    def __getitem__(self, row: int) -> torch.Tensor:
        return super().__getitem__(row) if os.environ["RANK"] == "1" else torch.full((3,), float(row))


class Signalled(Mean):
    """After three updates some ranks are sent a signal, while rank 1 waits for a worker that hangs."""

    def __init__(self, number: int, ranks: list[int]) -> None:
        super().__init__()
        self.number, self.ranks = number, ranks

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def on_step(self, step: int) -> None:
        if step == 3 and int(os.environ["RANK"]) in self.ranks:
            threading.Timer(1, os.kill, (os.getpid(), self.number)).start()


def hang_on_two_ranks(root: str, number: int, ranks: list[int], where: str) -> list[Any]:
    """What a fit of two ranks ended with, on this one."""
    overdue.PATIENCE_SECONDS = 1.0
    hangs, rows = HangsOnOneRank(), [torch.full((3,), float(row)) for row in range(16)]
    trainer = Trainer(max_epochs=2, strategy="ddp", progress=False, run_dir=root, save_every=1, sanity_batches=0)
    data: list[Any] = [hangs] if where == "training" else [rows[:12], hangs]
    began, message = time.monotonic(), ""
    try:
        trainer.fit(Signalled(number, ranks), *data, batch_size=2, num_workers=1, shuffle=False)
    except RankError as exc:
        message = str(exc)
    break_connections(dist.distributed_c10d._get_default_group())  # as the end of the process does
    seconds = time.monotonic() - began
    for _ in range(10):  # a thread that is just ending may hold the frames of the fit for a moment
        gc.collect()
        for worker in own_children():  # torch has ended it and does not wait for its end
            worker.join(5)
    assert [(child.pid, child.exitcode) for child in own_children()] == []
    preemption._told.clear()
    return [message, seconds]


@pytest.fixture
def own_processes() -> Iterator[None]:
    """For a test after which the processes cannot work together any more."""
    close_pools()
    yield
    close_pools()


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize(
    ("number", "ranks", "where"),
    [(signal.SIGTERM, [0], "training"), (signal.SIGUSR1, [0, 1], "validation")],
    ids=["one rank, in training", "all ranks, in a validation"],
)
def test_a_signal_ends_ranks_of_which_one_waits_for_a_worker_that_hangs(
    tmp_path: Path, number: int, ranks: list[int], where: str
) -> None:
    first, second = run_ranks(hang_on_two_ranks, 2, str(tmp_path), int(number), ranks, where, timeout=100)
    assert first[0].startswith("rank 1 failed first") or where == "validation"  # whose worker may be slow to start
    assert "asked the fit to end, but this rank still waits for data after 1" in second[0]
    assert "still waits for data after 1 seconds" in first[0]
    assert max(first[1], second[1]) < 60
    assert saved(tmp_path)[-1] == (3 if where == "training" else 2)
