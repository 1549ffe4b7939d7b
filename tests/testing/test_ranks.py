"""`fabricate.testing.run_ranks`, with real gloo ranks in separate processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabricate import ConfigurationError, RankError
from fabricate.testing import close_pools, ranks, run_ranks
from fabricate.testing.ranks import _pools, _servers, worker_process_ids


@dataclass
class Point:
    x: int


def _environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def _move(point: Point, *, by: int) -> Point:
    return Point(point.x + by * int(os.environ["RANK"]))


def _group() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    tensor += _group()
    dist.all_reduce(tensor)
    return tensor


def _raise_on_rank_0_while_rank_1_waits() -> None:
    rank = _group()
    dist.barrier()  # rank 1 has opened the group too, and is in this barrier or the next
    if rank == 0:
        print("about to fail")
        raise ValueError("boom on purpose")
    dist.barrier()


def _raise_on_rank_0_while_rank_1_sleeps() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("boom on purpose")
    time.sleep(60)


def _raise_everywhere(message: str) -> None:
    raise ValueError(message)


def _draw() -> float:
    return random.random()


def _sleep_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


def _die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)


def _process_id() -> int:
    return os.getpid()


def _unpicklable() -> Any:
    return lambda: None


def _change_everything() -> None:
    os.environ["LEFT_BY_A_JOB"] = "1"
    os.chdir("/")


def _where() -> tuple[str | None, str]:
    return os.environ.get("LEFT_BY_A_JOB"), os.getcwd()


def _wait_for_the_end_of_the_pool(world_size: int) -> None:
    """What killed one of its processes may be known here a moment later."""
    while _pools[world_size].alive():
        time.sleep(0.01)


class Namespace:
    @staticmethod
    def answer() -> int:
        return 42


def test_each_rank_returns_its_own_result() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert run_ranks(_environment, 2, *names) == [
        ["0", "2", "0", "2", "127.0.0.1", "1"],
        ["1", "2", "1", "2", "127.0.0.1", "1"],
    ]


def test_arguments_and_results_may_be_classes_of_the_test_file() -> None:
    assert run_ranks(_move, 2, Point(1), by=5) == [Point(1), Point(6)]


def test_a_static_method_is_found_by_its_qualified_name() -> None:
    assert run_ranks(Namespace.answer, 1) == [42]


def test_ranks_reduce_over_gloo_and_keep_their_group() -> None:
    for _ in range(2):
        results = run_ranks(_sum, 2, torch.tensor([10.0, 20.0]))
        assert [result.tolist() for result in results] == [[21.0, 41.0], [21.0, 41.0]]


def test_a_second_call_starts_no_process() -> None:
    first = run_ranks(_process_id, 2)
    assert run_ranks(_process_id, 2) == first


def test_a_job_sees_the_callers_environment_and_directory_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_ranks(_change_everything, 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert run_ranks(_where, 2) == [(None, str(tmp_path))] * 2
    assert run_ranks(_environment, 2, "ACCELERATE_USE_CPU") == [[None]] * 2
    monkeypatch.setenv("LEFT_BY_A_JOB", "set by the caller")
    assert run_ranks(_where, 2) == [("set by the caller", str(tmp_path))] * 2


def test_a_rank_that_raises_is_named_and_the_one_that_waits_for_it_ends_too() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_raise_on_rank_0_while_rank_1_waits, 2)
    message = str(caught.value)
    # It raised, because its connection ended with the other rank: it was neither waited for nor killed.
    assert message.startswith("rank 0 raised ValueError: boom on purpose\nrank 1 raised RuntimeError: ")
    assert 'raise ValueError("boom on purpose")' in message, "the traceback shows the line"
    assert "about to fail" in message, "what the rank printed"
    assert "barrier" in message.partition("--- rank 1: traceback ---")[2], "where rank 1 waited"
    assert run_ranks(_sum, 2, torch.zeros(1)) == [torch.ones(1)] * 2, "the next call gets working ranks"


def test_a_rank_that_does_not_notice_is_ended_after_a_short_grace() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_raise_on_rank_0_while_rank_1_sleeps, 2)
    message = str(caught.value)
    assert message.startswith("rank 0 raised ValueError: boom on purpose\nranks [1] were still running 3 s later")
    assert "_sleeps" in message.partition("--- rank 1: output and stacks ---")[2], "where rank 1 was"


def test_ranks_that_all_raise_alike_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_ALIKE_SECONDS", 60.0)  # of what the machine does meanwhile nothing is said here
    before = run_ranks(_process_id, 2)
    with pytest.raises(RankError, match=r"(?s)rank \d raised ValueError: alike.*rank \d raised ValueError: alike"):
        run_ranks(_raise_everywhere, 2, "alike")
    assert run_ranks(_process_id, 2) == before


def test_a_rank_that_hangs_is_named_with_its_stacks() -> None:
    hanging = run_ranks(_process_id, 2)
    with pytest.raises(RankError) as caught:
        run_ranks(_sleep_on_rank_1, 2, timeout=5)
    message = str(caught.value)
    assert message.startswith("ranks [1] did not finish in 5 s: does a hook run a collective on some ranks only?\n")
    assert "_sleep_on_rank_1" in message
    assert worker_process_ids().isdisjoint(hanging), "the pool with the hanging rank is gone"


def test_a_rank_that_dies_is_named_with_its_last_words() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 died: signal SIGKILL.*last words"):
        run_ranks(_die_on_rank_1, 2)


def test_a_result_that_cannot_be_pickled_is_an_error_of_that_rank() -> None:
    with pytest.raises(RankError, match=r"rank 0 raised .*pickle"):
        run_ranks(_unpicklable, 1)


def test_closed_pools_leave_no_process_and_start_again() -> None:
    first = run_ranks(_process_id, 1)
    assert set(first) <= worker_process_ids()
    close_pools()
    assert not worker_process_ids()
    with pytest.raises(ProcessLookupError):
        os.kill(first[0], 0)
    assert run_ranks(_process_id, 1) != first


def test_a_worker_killed_between_jobs_is_replaced() -> None:
    (first,) = run_ranks(_process_id, 1)
    os.kill(first, signal.SIGKILL)
    _wait_for_the_end_of_the_pool(1)
    assert run_ranks(_process_id, 1) != [first]


def test_ranks_draw_random_numbers_of_their_own() -> None:
    first, second = run_ranks(_draw, 2)
    assert first != second


def test_ranks_start_again_after_the_process_they_are_forked_from_died() -> None:
    (first,) = run_ranks(_process_id, 1)
    (server,) = (process.pid for process in _servers())
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    _wait_for_the_end_of_the_pool(1)
    assert run_ranks(_process_id, 1) != [first]
    assert server not in {process.pid for process in _servers()}


def test_a_function_of_a_script_runs_without_its_main_block(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from fabricate.testing import run_ranks\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__': print(run_ranks(double, 1, 21))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (0, "[42]\n", "")


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="top level of a module"):
        run_ranks(lambda: None, 2)
    with pytest.raises(ConfigurationError, match="top level of a module"):
        run_ranks(print, 2)


@pytest.mark.parametrize(("argument", "value"), [("world_size", 0), ("timeout", 0.0)])
def test_a_count_or_time_that_is_not_positive_is_refused(argument: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}={value}"):
        run_ranks(_process_id, **{"world_size": 1, argument: value})
