"""The cost of a step, without a clock: Python calls, memory kept, waits for the device, module walks, imports, frames. Counts per
micro-batch are the difference between two fits of different length, which excludes start and end.
"""

from __future__ import annotations

import collections
import gc
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import fabricate
from fabricate import Callback, Trainer, TrainModule

PACKAGE = str(Path(fabricate.__file__).parent)
LONG, SHORT = 120, 80
NEVER = 10**9  # steps
EAGER = {"backend": "eager"}


class Small(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)


class Logs(Small):
    def training_step(self, batch: Any) -> torch.Tensor:
        loss = super().training_step(batch)
        self.log("one", loss)
        return loss


class Steps(Callback):
    def on_step(self, step: int, loss: torch.Tensor) -> None: ...


class MicroBatches(Callback):
    def on_accumulate(self, batch: Any, is_last: bool) -> None: ...


def fit(micro_batches: int, module: TrainModule | None = None, **options: Any) -> None:
    rows = torch.randn(4 * micro_batches, 3)
    trainer = Trainer(**{"max_epochs": 1, "progress": False, "log_every": NEVER, "precision": "fp32", **options})
    trainer.fit(module or Small(), TensorDataset(rows, rows[:, :1]), batch_size=4, shuffle=True)


def by_hand(micro_batches: int) -> None:
    """What `fit` does without options."""
    rows = torch.randn(4 * micro_batches, 3)
    module: Any = Small()
    optimizer, schedule = module.configure_optimizers()
    for batch in DataLoader(TensorDataset(rows, rows[:, :1]), batch_size=4, shuffle=True):
        module.training_step(batch).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def calls(micro_batches: int, fit: Callable[..., None] = fit, **options: Any) -> collections.Counter[str]:
    """Every Python call of a fit, by function; those in fabricate are marked with a leading "fabricate"."""
    codes: collections.Counter[CodeType] = collections.Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            codes[frame.f_code] += 1

    gc.collect()
    sys.setprofile(count)
    try:
        fit(micro_batches, **options)
    finally:
        sys.setprofile(None)
    counts: collections.Counter[str] = collections.Counter()
    for code, number in codes.items():
        ours = code.co_filename.startswith((PACKAGE, "<fabricate"))
        counts[f"{'fabricate ' if ours else ''}{code.co_qualname}"] += number
    return counts


def per_micro_batch(**options: Any) -> dict[str, float]:
    """Python calls per micro-batch, by function; what happens once per fit or epoch drops out."""
    calls(SHORT, **options)
    long, short = calls(LONG, **options), calls(SHORT, **options)
    each = {name: (long[name] - short[name]) / (LONG - SHORT) for name in long}
    return {name: number for name, number in each.items() if number}


def ours(each: dict[str, float]) -> float:
    return sum(number for name, number in each.items() if name.startswith("fabricate "))


@pytest.fixture(scope="module")
def by_hands() -> float:
    """Python calls per micro-batch of the loop by hand."""
    return sum(per_micro_batch(fit=by_hand).values())


LISTENERS = {"plugins": [Steps(), MicroBatches()]}
SHARE_OF_OURS, MARGIN = 0.5, 1.25
"""What the loop may add to one by hand, in Python calls: a third of it is in use. A call costs a tenth of a microsecond."""


@pytest.mark.parametrize(
    "options",
    [{}, LISTENERS, {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0}, {"module": Logs()}],
    ids=["quiet", "two listeners", "accumulation and clipping", "one logged value"],
)
def test_a_micro_batch_takes_few_calls_beside_those_of_a_loop_by_hand(by_hands: float, options: dict[str, Any]) -> None:
    each = per_micro_batch(**options)
    assert ours(each) < SHARE_OF_OURS * by_hands, {n: c for n, c in each.items() if n.startswith("fabricate ")}
    assert sum(each.values()) < MARGIN * by_hands


def test_a_micro_batch_walks_no_module_and_inspects_nothing() -> None:
    walks = "named_modules modules named_parameters parameters named_members train eval state_dict children find_spec signature"
    assert not {name for name in per_micro_batch(**LISTENERS) if name.rpartition(".")[2] in walks.split()}


def test_a_log_boundary_takes_few_calls_however_many_steps_it_covers(by_hands: float) -> None:
    often, rarely = (ours(per_micro_batch(log_every=n)) for n in (10, 20))
    quiet = ours(per_micro_batch())
    assert 0 < (often - quiet) * 10 <= SHARE_OF_OURS * by_hands
    assert 0 < (rarely - quiet) * 20 <= SHARE_OF_OURS * by_hands


class Watched(Logs):
    """Runs `begin` in the step 20 and `end` in the step 59, both right after an update."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        super().__init__()
        object.__setattr__(self, "moments", {20: begin, 59: end})

    def on_step(self, step: int) -> None:
        if step in self.moments:
            self.moments[step]()


class Reads(TorchDispatchMode):
    """Notes every operator that brings a value of a tensor to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []
        self.operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if function is torch.ops.aten._local_scalar_dense.default:
            self.functions.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}, {"precision": "bf16", "compile": EAGER}]
)
def test_nothing_but_logged_values_is_read_between_log_boundaries(options: dict[str, Any]) -> None:
    """And those on a CPU only, where there is no device to wait for, so that no tensor stays between steps. (The loss is read there
    without an operator.)"""
    reads = Reads()
    watched = Watched(reads.__enter__, lambda: reads.__exit__(None, None, None))
    fit(160, watched, log_every=60, plugins=[Steps(), MicroBatches()], **options)
    assert reads.operators > 100
    assert len(reads.functions) == (59 - 20) * options.get("gradient_accumulation_steps", 1)


def test_no_memory_is_kept_from_step_to_step() -> None:
    blocks: list[int] = []

    class Counts(Logs):
        def on_log(self, step: int) -> None:
            gc.collect()
            blocks.append(sys.getallocatedblocks())

    fit(1000, Counts(), log_every=100)
    assert len(blocks) == 10
    growth = sorted(after - before for before, after in itertools.pairwise(blocks[2:]))
    # Of 100 steps and a boundary each; one block per step would be 100. Boundaries and other threads keep a few now and then.
    assert growth[len(growth) // 2] < 50, growth


class Language(TrainModule):
    """Logits of 8 MiB in every step."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.gpt = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, n_positions=64, vocab_size=4096))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def training_step(self, batch: Any) -> torch.Tensor:
        logits = self.gpt(input_ids=batch[0], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("twice", 2 * loss.detach())
        return loss


def test_the_heap_does_not_grow_between_log_boundaries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small tensors kept from step to step take a place in the room of the large ones, which then need new room each time."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # transformers' import sets it
    memory: dict[int, int] = {}

    class Looks(Callback):
        def on_step(self, step: int) -> None:
            memory[step] = psutil.Process().memory_info().rss

    data = TensorDataset(*torch.randint(4096, (2, 8 * 60, 64)))
    Trainer(max_epochs=1, log_every=1000, progress=False, plugins=[Looks()]).fit(Language(), data, batch_size=8)
    assert memory[60] - memory[10] < 100 * 2**20, memory


def test_a_long_way_to_the_next_log_boundary_keeps_little() -> None:
    pending: list[int] = []

    class Counts(Logs):
        def on_step(self) -> None:
            pending.append(len(self.trainer._live().metrics.pending))

    fit(1500, Counts())
    assert max(pending) < 1100


IMPORTS = """
import json, sys
{statement}
print(json.dumps(sorted(sys.modules)))
"""


def imported(statement: str) -> set[str]:
    process = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(statement=statement)], capture_output=True, text=True, check=True
    )
    return set(json.loads(process.stdout.splitlines()[-1]))


def test_importing_fabricate_imports_next_to_nothing() -> None:
    assert imported("import fabricate") - imported("import gc, importlib, typing") == {"__future__", "fabricate"}


def test_importing_leaves_the_garbage_collector_as_it_was() -> None:
    statement = "import gc; {before}; from fabricate import Trainer; print(gc.isenabled())"
    for before, after in (("gc.enable()", "True"), ("gc.disable()", "False")):
        command = [sys.executable, "-c", statement.format(before=before)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [after]


def test_importing_the_trainer_imports_what_accelerate_does_and_ourselves() -> None:
    modules = imported("from fabricate import Trainer, TrainModule") - imported("import accelerate")
    top = {name.partition(".")[0] for name in modules}
    assert top <= {"fabricate", "pluggy", "xxhash", "numpy", "psutil", *sys.stdlib_module_names}
    ours = {name for name in modules if name.partition(".")[0] == "fabricate"}
    assert len(ours) < 170
    assert len(modules - ours) < 40


def test_no_command_imports_torch_to_say_what_it_does() -> None:
    statement = """
import click, contextlib, io
from fabricate.cli.main import main
def every(command, path):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main([*path, "--help"], standalone_mode=False)
    assert "Usage" in text.getvalue()
    context = click.Context(command)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        every(command.get_command(context, name), [*path, name])
every(main, [])
"""
    modules = imported(statement)
    assert not {"torch", "accelerate", "transformers", "datasets", "numpy"} & modules


def test_commands_that_look_at_a_run_do_not_import_torch(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fit(4, run_dir=run_dir, save_every=2, keep=2, log_every=1)
    first, last = sorted(str(path) for path in (run_dir / "checkpoints").iterdir())
    commands = [
        ["plugins"],
        ["report", str(run_dir)],
        ["ckpt", "ls", str(run_dir)],
        ["ckpt", "verify", str(run_dir)],
        ["ckpt", "inspect", last],
        ["ckpt", "diff", first, last],
        ["ckpt", "export", last, str(tmp_path / "weights")],
        ["ckpt", "prune", str(run_dir), "--keep", "last=1", "--yes"],
    ]
    statement = f"""
import contextlib, io
from fabricate.cli.main import main
for command in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(command, standalone_mode=False)
    assert text.getvalue(), command
    assert "torch" not in sys.modules, command
"""
    assert not {"torch", "accelerate", "transformers", "datasets"} & imported(statement)
    assert [str(path) for path in (run_dir / "checkpoints").iterdir()] == [last]
