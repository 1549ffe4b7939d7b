"""Several optimizers that step in the same update."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from fabricate import Callback, ConfigurationError, Trainer, TrainModule
from fabricate.cli.main import main
from fabricate.testing import run_ranks

ROWS = [(each, each.sum()) for each in torch.randn(10, 4, generator=torch.Generator().manual_seed(1))]
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2}
STEPS, NORM = 6, 0.5
Weights = dict[str, np.ndarray[Any, Any]]


class Net(TrainModule):
    def __init__(self, form: str = "list", names: Any = None) -> None:
        super().__init__()
        self.form, self.names = form, names
        torch.manual_seed(2)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in "ab"])
        self.head = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = torch.nn.functional.mse_loss(self.head(x)[:, 0], y)
        return loss if self.names is None else {"loss": loss, "optimizer": self.names}

    def configure_optimizers(self) -> Any:
        muon, adam = optimizers(self)
        if self.form == "list":
            return {"optimizer": [(muon, "linear"), (adam, "cosine:warmup=2")]}
        total = self.trainer.total_steps
        return {"matrices": (muon, f"linear:total={total}"), "rest": (adam, f"cosine:warmup=2,total={total}")}


def optimizers(module: torch.nn.Module) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    matrices = [p for n, p in module.named_parameters() if n.startswith("blocks") and n.endswith("weight")]
    rest = [p for n, p in module.named_parameters() if not (n.startswith("blocks") and n.endswith("weight"))]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)


class Ends(Callback):
    """Whole weights at the end, gathered by all ranks, and what hooks got."""

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.calls: list[tuple[int, float]] = []

    def on_before_step(self, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.calls.append((len(parameters), round(float(grad_norm), 5)))

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        whole = {name: trainer.strategy.gather(parameter) for name, parameter in module.named_parameters()}
        self.weights = {name: tensor.detach().clone().numpy() for name, tensor in whole.items()}


def fit(strategy: str, run_dir: Path | None, module: TrainModule, **options: Any) -> Ends:
    ends = Ends()
    trainer = Trainer(
        strategy=strategy,
        **({"max_steps": STEPS, "precision": "fp32", "max_grad_norm": NORM} | options),
        global_batch_size=4,
        run_dir=run_dir,
        save_every=3,
        log_every=1,
        progress=False,
        plugins=[ends],
    )
    trainer.fit(module, ROWS, batch_size=1, shuffle=False)
    return ends


def job(world_size: int, directory: Path) -> dict[str, Any]:
    """Each strategy: whole, and again from the middle."""
    results: dict[str, Any] = {}
    for strategy in (name for name, needed in STRATEGIES.items() if needed == world_size):
        try:
            whole = fit(strategy, directory / strategy, Net())
            ends = Ends()
            again = Trainer(
                strategy=strategy, max_steps=STEPS, global_batch_size=4, max_grad_norm=NORM, precision="fp32",
                progress=False, plugins=[ends],
            )  # fmt: skip
            at = directory / strategy / "checkpoints" / "step-00000003"
            again.fit(Net(), ROWS, batch_size=1, shuffle=False, resume=at)
            results[strategy] = (whole.weights, ends.weights, whole.calls)
        except Exception as exception:
            results[strategy] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    directory = tmp_path_factory.mktemp("together")
    one, two = [job(1, directory)], run_ranks(job, 2, 2, directory)
    return directory, {
        name: [rank[name] for rank in (one if needed == 1 else two)] for name, needed in STRATEGIES.items()
    }


def by_hand() -> tuple[Weights, list[float]]:
    """The usual loop over whole batches: one backward, one clip over all parameters, a step of each."""
    from transformers import get_scheduler

    module, norms = Net(), []
    muon, adam = optimizers(module)
    schedules = [get_scheduler("linear", muon, 0, STEPS), get_scheduler("cosine", adam, 2, STEPS)]
    for start in ([0, 4, 8] * 2)[:STEPS]:
        module.training_step(torch.utils.data.default_collate(ROWS[start : start + 4])).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), NORM)))
        for each in (muon, adam, *schedules):
            each.step()
        module.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}, norms


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_list_of_optimizers_trains_as_a_loop_by_hand_and_resumes_to_the_last_bit(
    runs: tuple[Path, dict[str, list[Any]]], strategy: str
) -> None:
    wanted, norms = by_hand()
    # Muon multiplies in bfloat16, in another order where rows are divided; its update of a weight is about 0.02.
    close = {"rtol": 1e-4, "atol": 2e-5} if strategy != "fsdp" else {"atol": 5e-3}
    for answer in runs[1][strategy]:
        assert not isinstance(answer, str), answer
        whole, resumed, calls = answer
        assert [count for count, _ in calls] == [len(wanted)] * STEPS, "hooks get one optimizer over all parameters"
        np.testing.assert_allclose([norm for _, norm in calls], norms, rtol=1e-3)
        for name, value in wanted.items():
            np.testing.assert_allclose(whole[name], value, err_msg=name, **close)
            np.testing.assert_array_equal(resumed[name], whole[name], err_msg=name)


def test_each_optimizer_has_its_name_in_checkpoints_metrics_and_the_plan(
    runs: tuple[Path, dict[str, list[Any]]],
) -> None:
    state = json.loads((runs[0] / "ddp" / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert sorted(state["optimizers"]) == sorted(state["schedulers"]) == ["optimizer.AdamW", "optimizer.Muon"]
    line = json.loads((runs[0] / "single" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"lr_optimizer.Muon", "lr_optimizer.AdamW"} <= line["metrics"].keys()
    settings = json.loads((runs[0] / "fsdp" / "plan.json").read_text())["settings"]
    assert settings["schedule optimizer.Muon"]["value"] == f"linear over {STEPS} updates"


@pytest.mark.parametrize("names", [None, ["matrices", "rest"]])
def test_optimizers_of_a_mapping_step_together_where_none_or_all_are_named(
    runs: tuple[Path, dict[str, list[Any]]], capsys: pytest.CaptureFixture[str], names: Any
) -> None:
    ends = fit("single", None, Net("mapping", names))
    for name, value in runs[1]["single"][0][0].items():
        np.testing.assert_array_equal(ends.weights[name], value)
    assert "the optimizers matrices, rest step together in each update, unless" in capsys.readouterr().out


def test_optimizers_of_a_mapping_step_alone_when_they_are_named() -> None:
    module = Net("mapping", "rest")
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    ends = fit("single", None, module, max_steps=2)
    assert [count for count, _ in ends.calls] == [4, 4]
    for name, value in before.items():
        matrix = name.startswith("blocks") and name.endswith("weight")
        assert np.array_equal(ends.weights[name], value.numpy()) is matrix, name


def test_fp16_leaves_an_update_out_for_all_optimizers_or_for_none() -> None:
    class Overflows(Net):
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            # Only what one of the two trains has a gradient that is not finite.
            return loss + (self.head.bias * float("inf")).sum() if self.trainer.progress.skipped == 0 else loss

    module = Overflows()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    changed: list[bool] = []

    class Watches(Callback):
        def on_step_skipped(self, module: TrainModule) -> None:
            changed.append(any(not torch.equal(p, before[n]) for n, p in module.named_parameters()))

    trainer = Trainer(precision="fp16", max_steps=1, progress=False, plugins=[Watches()], nonfinite="skip")
    trainer.fit(module, ROWS, batch_size=4)
    assert changed
    assert not any(changed)


def test_two_optimizers_of_one_update_that_share_a_parameter_are_refused_by_its_name() -> None:
    class Overlaps(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]

    with pytest.raises(
        ConfigurationError, match=r"main\.SGD and main\.SGD2 step in the same update and both hold head\.weight"
    ):
        fit("single", None, Overlaps())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "a, b.*both hold head.weight, so they cannot step together: return"),
        (["a", "b"], "the optimizers a and b step in the same update and both hold head.weight"),
        (["a", "c"], r"returned optimizer=\['a', 'c'\].*; there are a, b"),
        (3, "returned optimizer=3; give a name or a list of names"),
    ],
)
def test_optimizers_that_share_a_parameter_take_turns_by_name(names: Any, message: str) -> None:
    class Shared(Net):
        def configure_optimizers(self) -> Any:
            whole, head = torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)
            return {"a": whole, "b": head}

    with pytest.raises(ConfigurationError, match=message):
        fit("single", None, Shared(names=names))


def test_deepspeed_refuses_a_list_by_name() -> None:
    with pytest.raises(
        ConfigurationError, match=r"trains with one optimizer, but there are 2 \(optimizer.Muon, optimizer.AdamW\)"
    ):
        Trainer(strategy="zero1", precision="fp32", max_steps=1, progress=False).fit(Net(), ROWS, batch_size=4)


def test_a_checkpoint_is_exported_and_reported_with_all_optimizers(
    runs: tuple[Path, dict[str, list[Any]]], tmp_path: Path
) -> None:
    folder = runs[0] / "fsdp"
    result = CliRunner().invoke(
        main, ["ckpt", "export", str(folder), str(tmp_path / "out"), "--format", "accelerate"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert "optimizer.bin is optimizer.AdamW, optimizer_1.bin is optimizer.Muon: give them" in result.output
    for optimizer, file in zip(optimizers(Net()), ("optimizer_1.bin", "optimizer.bin"), strict=True):
        optimizer.load_state_dict(torch.load(tmp_path / "out" / file))
        assert all(optimizer.state[p] for group in optimizer.param_groups for p in group["params"]), file
    reported = CliRunner().invoke(main, ["report", str(folder)], catch_exceptions=False)
    assert reported.exit_code == 0, reported.output
