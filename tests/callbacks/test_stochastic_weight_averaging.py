"""Stochastic weight averaging: the averaged updates, the learning rates, the final weights, and an exact resume."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fabricate import (
    Callback,
    CheckpointError,
    ConfigurationError,
    FabricateError,
    StochasticWeightAveraging,
    Trainer,
    TrainModule,
    hookimpl,
)
from fabricate.testing import run_ranks

ROWS = [(each, each.sum()) for each in torch.randn(20, 4, generator=torch.Generator().manual_seed(1))]
VALIDATION = ROWS[:4]
EPOCHS, BATCH = 4, 8
KINDS = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2}
SAVED = (4, 10)
"""Before the part with the own rate, which begins with the seventh update, and in it, when the first weights are averaged."""
Weights = dict[str, torch.Tensor]


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.counted: list[torch.Tensor] = []
        """What the batch norm got when the fit was complete."""

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        inside = self.first(x)
        if not torch.is_grad_enabled():
            self.counted.append(inside.detach().clone())
        self.log("logged", 1.0)
        return torch.nn.functional.mse_loss(self.last(self.norm(inside))[:, 0], y)

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"val_first": self.norm(self.first(batch[0])).square().sum(1).mean()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=12)


class Watches(Callback):
    """The weights at the end of each epoch and of the fit, and the rate of each update."""

    def __init__(self) -> None:
        self.epochs: list[Weights] = []
        self.rates: list[float] = []
        self.final: Weights = {}

    def weights(self, trainer: Trainer, module: TrainModule) -> Weights:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return {n: trainer.strategy.gather(p).clone() for n, p in module.named_parameters()} | buffers

    @hookimpl
    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.epochs.append(self.weights(trainer, module))

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.final = self.weights(trainer, module)


def fit(
    strategy: str = "single", run_dir: Path | None = None, swa: Any = None, module: Any = None, **options: Any
) -> tuple[Watches, Any, Any]:
    watches = Watches()
    arguments = {"resume": options.pop("resume", "auto"), "val": options.pop("val", VALIDATION)}
    trainer = Trainer(
        strategy=strategy,
        **({"max_epochs": EPOCHS, "save_every": 2, "keep": "all", "sanity_batches": 0} | options),
        run_dir=run_dir,
        progress=False,
        print_plan="none",
        plugins=[swa or StochasticWeightAveraging(0.1, 3, annealing_epochs=2), watches],
    )
    module = module or Net()
    ranks = KINDS.get(strategy.partition(":")[0], 1)
    result = trainer.fit(module, ROWS, batch_size=BATCH // ranks, shuffle=False, **arguments)
    return watches, result, module


def job(world_size: int, directory: Path) -> dict[str, Any]:
    """Each strategy: whole, again from checkpoints, and when it is complete."""
    results: dict[str, Any] = {}
    for strategy in (strategy for strategy, ranks in KINDS.items() if ranks == world_size):
        try:
            run_dir = directory / strategy
            watches, result, module = fit(strategy, run_dir)
            checkpoints = run_dir / "checkpoints"
            steps = SAVED if world_size == 1 else SAVED[1:]
            again = [fit(strategy, resume=checkpoints / f"step-{step:08d}")[0].final for step in steps]
            complete, complete_result, _ = fit(strategy, run_dir)
            again.append(complete.final)
            same = complete_result.metrics == result.metrics and not complete.epochs
            results[strategy] = (watches, result, module.counted, again, same)
        except Exception as exception:
            results[strategy] = "".join(traceback.format_exception(exception))
    if world_size > 1:
        with pytest.raises(ConfigurationError) as refused:
            fit("diloco")
        results["diloco"] = str(refused.value)
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    directory = tmp_path_factory.mktemp("averaged")
    one, two = [job(1, directory)], run_ranks(job, 2, 2, directory)
    kinds = KINDS | {"diloco": 2}
    return directory, {kind: [rank[kind] for rank in (one if ranks == 1 else two)] for kind, ranks in kinds.items()}


@pytest.mark.parametrize("strategy", KINDS)
def test_a_fit_ends_with_the_mean_of_the_weights_and_resumes_to_the_last_bit(
    runs: tuple[Path, dict[str, list[Any]]], strategy: str
) -> None:
    directory, ranks = runs[0], runs[1][strategy]
    assert all(not isinstance(rank, str) for rank in ranks), ranks[0]
    inputs = [batch for *_, counted, _, _ in ranks for batch in counted]
    statistics = [sum(each) / len(inputs) for each in zip(*((x.mean(0), x.var(0)) for x in inputs), strict=True)]
    for watches, result, _, again, same_when_complete in ranks:
        mean = {name: (watches.epochs[2][name] + value) / 2 for name, value in watches.epochs[3].items()}
        mean |= {"norm.running_mean": statistics[0], "norm.running_var": statistics[1]}
        mean["norm.num_batches_tracked"] = torch.tensor(len(inputs))
        torch.testing.assert_close(watches.final, mean)
        torch.testing.assert_close(load_file(directory / strategy / "model" / "model.safetensors"), mean)
        net = Net()
        net.load_state_dict(mean)
        (measured,) = net.eval().validation_step(torch.utils.data.default_collate(VALIDATION)).values()
        assert result.metrics["val_first"] == pytest.approx(measured.item(), rel=1e-4)
        assert all(torch.equal(final[name], value) for final in again for name, value in watches.final.items())
        assert same_when_complete
    assert "stores another value" not in (directory / strategy / "events.jsonl").read_text()


def test_learning_rates_go_from_the_schedule_to_the_averaging_rate() -> None:
    watches, _, _ = fit(max_epochs=5, swa=StochasticWeightAveraging(0.1, 3, annealing_epochs=2))
    by_schedule = [0.01 * (1 - 0.5 * update / 12) for update in range(6)]
    before = 0.01 * (1 - 0.5 * 6 / 12)
    own = [share * 0.1 + (1 - share) * before for share in (0, 0.5, 1) for _ in range(3)]
    assert watches.rates == pytest.approx(by_schedule + own)


def test_averaging_may_begin_after_a_number_of_updates_and_take_every_few_of_them() -> None:
    swa = StochasticWeightAveraging([0.1], "4 steps", "4 steps", "linear", average_every="3 steps")
    snapshots: list[Weights] = []

    class Steps(Watches):
        def on_step(self, trainer: Trainer, module: TrainModule) -> None:
            snapshots.append(self.weights(trainer, module))

    steps = Steps()
    module = Net()
    Trainer(max_steps=11, progress=False, print_plan="none", plugins=[swa, steps]).fit(module, ROWS, batch_size=8)
    assert swa.averages == 2
    mean = (snapshots[6]["last.weight"] + snapshots[9]["last.weight"]) / 2  # after the updates 7 and 10
    torch.testing.assert_close(module.last.weight.detach(), mean)
    before = 0.01 * (1 - 0.5 * 4 / 12)
    assert steps.rates[4:] == pytest.approx([before + min(1, n / 4) * (0.1 - before) for n in range(7)])


def test_a_share_of_the_fit_is_one_of_its_epochs_or_else_of_its_updates() -> None:
    for options, first in (({"max_epochs": 5}, "3 epochs"), ({"max_epochs": None, "max_steps": 10}, "8 steps")):
        swa = StochasticWeightAveraging(0.1, average_every="2 steps")
        fit(swa=swa, **options)
        assert str(swa._first) == first


def test_a_schedule_that_a_validation_advances_does_not_change_the_averaging_rate() -> None:
    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return (
                optimizer,
                torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9),
                "val_first",
            )

    watches, _, _ = fit(module=Plateau(), swa=StochasticWeightAveraging(0.1, 1, 0), validate_every=1, max_steps=4)
    assert watches.rates == [0.1] * 4


def test_batch_norm_in_eval_mode_keeps_its_statistics_and_a_model_without_any_reads_nothing_again() -> None:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm.eval()

    _, _, module = fit(module=Frozen())
    assert not module.counted
    assert torch.equal(module.norm.running_var, torch.ones(4))


def test_data_that_is_used_up_or_has_no_length_is_refused_before_training_where_statistics_need_it() -> None:
    batch = torch.utils.data.default_collate(ROWS[:8])

    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield batch

    def run(data: Any, **options: Any) -> Net:
        module = Net()
        swa = StochasticWeightAveraging(0.1, "2 steps", average_every="1 steps", **options)
        Trainer(max_steps=4, progress=False, print_plan="none", plugins=[swa]).fit(module, data)
        return module

    with pytest.raises(ConfigurationError, match=r"train is a one-shot iterator .* trainer\.calibrate"):
        run(iter([batch] * 9))
    with pytest.raises(ConfigurationError, match="train has no length, so one pass over it may never end;"):
        run(Endless())
    assert len(run(Endless(), batch_norm_batches=5).counted) == 5


def test_a_plugin_that_is_listed_before_it_may_save_in_on_fit_start(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            trainer.save(tmp_path / "first")

    trainer = Trainer(max_epochs=1, progress=False, plugins=[Saves(), StochasticWeightAveraging(0.1)])
    trainer.fit(Net(), ROWS, batch_size=BATCH)
    assert (tmp_path / "first" / "manifest.json").exists()


def test_other_settings_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    fit(run_dir=tmp_path, max_steps=8)
    other = StochasticWeightAveraging(0.2, 3, annealing_epochs=2)
    with pytest.raises(CheckpointError, match=r"saved with .*'swa_lrs': \[0\.1\].* this run has .*'swa_lrs': \[0\.2\]"):
        fit(run_dir=tmp_path, swa=other)
    fit(run_dir=tmp_path, swa=other, accept_changes=("plugins",))
    assert other.averages == 2


def test_a_fit_that_was_stopped_too_early_says_that_nothing_was_averaged(capsys: pytest.CaptureFixture[str]) -> None:
    class Stops(Net):
        def on_step(self, trainer: Trainer) -> None:
            trainer.stop("enough")

    watches, _, module = fit(module=Stops())
    assert "the fit ended before averaging began" in capsys.readouterr().out
    assert torch.equal(module.last.weight, watches.final["last.weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_lrs": 0.0}, r"swa_lrs=0\.0\): give a positive learning rate"),
        ({"swa_lrs": "fast"}, "swa_lrs='fast'"),
        ({"swa_epoch_start": 0}, "swa_epoch_start=0\\): give the number of an epoch .1 or more."),
        ({"swa_epoch_start": 1.5}, "swa_epoch_start=1.5"),
        ({"swa_epoch_start": "2 epochs"}, "swa_epoch_start='2 epochs'"),
        ({"annealing_strategy": "cosine"}, "annealing_strategy='cosine'\\): give 'cos' or 'linear'"),
        ({"annealing_epochs": "10 minutes"}, "annealing_epochs='10 minutes'\\): give steps or whole epochs"),
        ({"average_every": 0.5}, "average_every=0.5"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StochasticWeightAveraging(**({"swa_lrs": 0.1} | arguments))


def test_what_cannot_be_averaged_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for swa, options, message in (
        (
            StochasticWeightAveraging(0.1, EPOCHS + 1),
            {},
            r"swa_epoch_start=5\) is never reached: the fit ends after 4 epochs",
        ),
        (StochasticWeightAveraging([0.1, 0.2]), {}, r"swa_lrs=\[0\.1, 0\.2\]\): the optimizer has 1 parameter groups"),
        (
            StochasticWeightAveraging(0.1),
            {"load_best": True, "keep": {"best": 1, "metric": "val_first", "mode": "min"}, "run_dir": tmp_path},
            "load_best=True: a fit can end with the averaged weights or with those of its best checkpoint, not both",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            fit(swa=swa, **options)


def test_ranks_that_drift_apart_are_refused(runs: tuple[Path, dict[str, list[Any]]]) -> None:
    assert all(
        "weights differ between ranks under strategy='diloco', so they cannot be averaged. Use strategy='ddp'" in rank
        for rank in runs[1]["diloco"]
    )


def test_the_training_data_is_read_again_only_when_training_does_not(tmp_path: Path) -> None:
    class Calls(Callback):
        def on_step(self, trainer: Trainer) -> None:
            trainer.calibrate()

    with pytest.raises(
        FabricateError, match="can only run in on_complete, when training no longer reads the training data;"
    ):
        Trainer(max_steps=1, progress=False, print_plan="none", plugins=[Calls()]).fit(Net(), ROWS, batch_size=8)
