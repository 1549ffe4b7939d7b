"""Strategies for ranks on one process, as `python script.py` starts it: the numbers of a loop by hand, one fit after another."""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.distributed import checkpoint

from fabricate import Callback, ConfigurationError, RankError, Trainer, TrainModule
from fabricate.testing.ranks import run_alone
from tests.support.by_hand import (
    BATCH,
    ROWS,
    STEPS,
    TOLERANCE,
    Counting,
    Late,
    Net,
    Recorder,
    Sometimes,
    by_hand,
    difference,
    seeded,
)

STRATEGIES = (
    "ddp",
    "ddp:find_unused_parameters=true",
    "ddp:static_graph=true",
    "fsdp",
    "fsdp:offload=cpu",
    "fsdp:shard=node",
    "fsdp:accumulate=whole",
    "fsdp:wrap=Linear,activation_checkpointing=true",
    "powersgd",
    "diloco:every=2,outer_lr=1,outer_momentum=0",  # one replica, whose mean it is
    "zero1",
    "zero2",
    "zero3",
    "zero1:offload_optimizer=cpu",
    "zero2:offload_optimizer=cpu",
    "zero3:offload_param=cpu",
    "zero3:offload_optimizer=cpu,offload_param=cpu",
)
RESUMED = ("fsdp", "zero3", "zero2:offload_optimizer=cpu")
IDLE = ("zero1", "zero2", "zero3")
EVALUATED = ("single", "ddp", "fsdp", "zero3")


def fit(strategy: str, kind: str = "adamw", steps: int = STEPS, net: type[Net] = Net, **arguments: Any) -> Recorder:
    """Windows of `BATCH` rows in two micro-batches, clipped."""
    module, recorder = seeded(net, kind), Recorder()
    options = {"precision": "fp32", "max_grad_norm": 0.3, "gradient_accumulation_steps": 2, "seed": 3, **arguments}
    plugins = [*options.pop("plugins", ()), recorder]
    trainer = Trainer(strategy=strategy, max_steps=steps, progress=False, plugins=plugins, **options)
    trainer.fit(module, ROWS, batch_size=BATCH // 2, shuffle=False)
    return recorder


class Kinds(Callback):
    """Each fit's strategy, and what its Accelerator calls the process."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.pairs.append((trainer.strategy.name, str(trainer.accelerator.distributed_type.value)))


def one_after_another() -> list[tuple[str, str]]:
    kinds = Kinds()
    for strategy in ("fsdp", "single", "ddp", "auto"):
        assert difference(fit(strategy, plugins=[kinds]), by_hand()) < TOLERANCE
    return kinds.pairs


def resumed(strategy: str, folder: Path) -> float:
    """Two updates, two more under `single`, and two more: how far that is from six by hand."""
    losses, norms = list[float](), list[float]()
    for steps, kind in ((2, strategy), (4, "single"), (6, strategy)):
        recorder = fit(kind, steps=steps, run_dir=folder / strategy, save_every="2 steps")
        losses += recorder.losses
        norms += recorder.norms
    recorder.losses, recorder.norms = losses, norms
    return difference(recorder, by_hand(steps=6))


def with_an_idle_layer(strategy: str, net: type[Sometimes]) -> tuple[float, int]:
    """The distance from a loop by hand if some windows leave a layer out, and the number of notes about it."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        recorder = fit(strategy, net=net, plugins=[Counting()])
    notes = printed.getvalue().count("note: extra.weight, extra.bias had no gradient in this update")
    return difference(recorder, by_hand(net=net)), notes


def evaluated(strategy: str) -> float:
    trainer = Trainer(strategy=strategy, precision="fp32", progress=False)
    (loss,) = trainer.validate(seeded(Net), ROWS, batch_size=7).values()
    return float(loss)


class Talks(Callback):
    """Collectives of torch's own: of tensors on the CPU, of objects, and of a checkpoint that is written in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: list[Any] = []

    def on_step(self) -> None:
        numbers = torch.ones(3)
        dist.all_reduce(numbers)
        self.values = [numbers.tolist(), gather_object(["mine"])]
        checkpoint.async_save({"numbers": numbers}, checkpoint_id=self.folder).result()


def talked(folder: Path) -> list[Any]:
    talks = Talks(folder)
    fit("fsdp", steps=1, plugins=[talks])
    return [*talks.values, (folder / ".metadata").exists()]


def of_another_size() -> str:
    """As in a notebook that trained on one process, and then starts two."""
    places = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setenv(name, value)
        with pytest.raises(RankError) as caught:
            fit("ddp", steps=1)
    return str(caught.value)


class Hooks(Callback):
    def on_fit_start(self, module: TrainModule) -> None:
        next(module.parameters()).register_hook(lambda gradient: 2 * gradient)


def hooked() -> list[str]:
    """A hook on a gradient, registered before the fit, in either way, or when it begins."""
    errors = []
    for register in ("register_hook", "register_post_accumulate_grad_hook", ""):
        module, plugins = seeded(Net, "adamw"), [] if register else [Hooks()]
        if register:
            getattr(next(module.parameters()), register)(lambda gradient: None)
        with pytest.raises(ConfigurationError) as caught:
            Trainer(strategy="fsdp", max_steps=1, progress=False, plugins=plugins).fit(module, ROWS, batch_size=BATCH)
        errors.append(str(caught.value))
    return errors


def opened_by_the_script() -> list[Any]:
    """The script's own group: gloo on devices lets several ranks share one."""
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = dist.group.WORLD
    far = [difference(fit(strategy), by_hand()) for strategy in ("ddp", "fsdp", "single")]
    return [max(far) < TOLERANCE, dist.group.WORLD is own, dist.get_backend_config()]


def job(folder: Path) -> dict[str, Any]:
    """All of it, in one process without the variables of a launcher; an exception is one of the answers."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    before = dict(os.environ)
    jobs: dict[str, Callable[[], Any]] = {
        each: lambda each=each: [difference(fit(each, kind), by_hand(kind)) for kind in ("adamw", "sgd")]
        for each in STRATEGIES
    }
    jobs |= {f"resumed {each}": lambda each=each: resumed(each, folder) for each in RESUMED}
    jobs |= {f"idle {each}": lambda each=each: with_an_idle_layer(each, Sometimes) for each in IDLE}
    jobs |= {f"late {each}": lambda each=each: with_an_idle_layer(each, Late) for each in IDLE}
    jobs |= {f"evaluated {each}": lambda each=each: evaluated(each) for each in EVALUATED}
    jobs |= {"one after another": one_after_another, "talked": lambda: talked(folder / "talked")}
    jobs |= {"another size": of_another_size, "hooked": hooked, "opened by the script": opened_by_the_script}
    results: dict[str, Any] = {}
    for name, run in jobs.items():
        try:
            results[name] = run()
        except Exception as exc:
            results[name] = "".join(traceback.format_exception(exc))
    changed = {name for name, value in os.environ.items() if before.get(name) != value}
    results["environment"] = sorted(name for name in changed if not name.startswith(("KMP_", "TORCHINDUCTOR_")))
    return results


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_alone(job, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_norms_and_weights_are_those_of_a_loop_by_hand(answers: dict[str, Any], strategy: str) -> None:
    distances = answers[strategy]
    assert not isinstance(distances, str), distances
    assert max(distances) < TOLERANCE


def test_fits_of_one_process_have_the_strategy_that_each_names(answers: dict[str, Any]) -> None:
    """A process group that an earlier fit opened does not make a group of `single` or `auto`."""
    states = answers["one after another"]
    assert states == [("fsdp", "FSDP"), ("single", "NO"), ("ddp", "MULTI_CPU"), ("single", "NO")], states


@pytest.mark.parametrize("strategy", RESUMED)
def test_a_checkpoint_of_one_process_goes_to_single_and_back(answers: dict[str, Any], strategy: str) -> None:
    distance = answers[f"resumed {strategy}"]
    assert not isinstance(distance, str), distance
    assert distance < TOLERANCE


@pytest.mark.parametrize("strategy", IDLE)
@pytest.mark.parametrize("when", ["idle", "late"])
def test_a_layer_without_a_gradient_in_some_windows_is_noted_once_on_one_process_too(
    answers: dict[str, Any], strategy: str, when: str
) -> None:
    distance, notes = answers[f"{when} {strategy}"]
    assert distance < TOLERANCE
    assert notes == 1


def test_an_evaluation_runs_on_one_process_too(answers: dict[str, Any]) -> None:
    losses = [answers[f"evaluated {strategy}"] for strategy in EVALUATED]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6), losses


def test_the_environment_is_as_before(answers: dict[str, Any]) -> None:
    """DeepSpeed wants LOCAL_RANK while it trains."""
    assert answers["environment"] == []


def test_code_of_the_user_has_the_collectives_of_torch(answers: dict[str, Any]) -> None:
    assert answers["talked"] == [[1.0, 1.0, 1.0], ["mine"], True], answers["talked"]


def test_a_process_group_of_another_size_is_an_error_before_ranks_wait(answers: dict[str, Any]) -> None:
    wanted = "rank 0 of 2 was launched, but this process already has a process group of size 1, from an"
    assert answers["another size"].startswith(wanted), answers["another size"]


def test_hooks_on_gradients_that_would_not_be_called_are_an_error(answers: dict[str, Any]) -> None:
    begin = "strategy='fsdp' would not call the hooks on the gradients of "
    assert [text[: len(begin)] for text in answers["hooked"]] == [begin] * 3, answers["hooked"]


def test_a_process_group_that_the_script_opened_is_kept(answers: dict[str, Any]) -> None:
    assert answers["opened by the script"] == [True, True, "cpu:gloo,cuda:gloo"], answers["opened by the script"]
