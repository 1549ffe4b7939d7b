"""Orders by length and by weights: groups, counts, and a resume within an order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from fabricate_text import ByLength, Mixture
from torch.utils.data import DataLoader

from fabricate import Callback, ConfigurationError, Trainer, TrainModule
from fabricate.testing import run_ranks

LENGTHS = torch.randint(1, 100, (203,), generator=torch.Generator().manual_seed(0)).tolist()


class Net(TrainModule):
    """With dropout, and a record of the rows that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.rows: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.rows.append(batch["x"].tolist())
        loss: torch.Tensor = self.layer(batch["x"][:, None] / 100).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Fails(Callback):
    def on_step(self, step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt


def by_length(_: Any = None) -> tuple[Any, list[Any]]:
    rows = datasets.Dataset.from_dict({"x": LENGTHS}).with_format("torch")
    return DataLoader(rows, batch_size=4, sampler=ByLength(LENGTHS, group=8, spread=4)), []  # type: ignore[arg-type]


def mixture(weights: Any = None) -> tuple[Any, list[Any]]:
    mixed = Mixture(sources(), weights or {"few": 0.2, "many": 0.5, "none": 0, "one": 0.3}, rows=60, seed=3)
    return mixed.loader(batch_size=4), [mixed]


def sources() -> dict[str, Any]:
    rows = {"few": range(5), "many": range(100, 200), "none": [], "one": [7]}
    return {name: datasets.Dataset.from_dict({"x": list(each)}).with_format("torch") for name, each in rows.items()}


def fit(run_dir: Path | None, data: Any, steps: int = 12, plugins: tuple[Any, ...] = (), **arguments: Any) -> Any:
    """The weights, the rows that this rank saw, the metrics."""
    torch.manual_seed(0)
    module = Net()
    train, own = data() if callable(data) else data
    trainer = Trainer(
        run_dir=run_dir,
        max_steps=steps,
        seed=1,
        log_every="3 steps",
        save_every="4 steps",
        keep="all",
        progress=False,
        print_plan="none",
        plugins=[*own, *plugins],
        **arguments,
    )
    try:
        metrics = trainer.fit(module, train).metrics
    except KeyboardInterrupt:
        metrics = {}
    return {name: p.detach().clone() for name, p in module.named_parameters()}, module.rows, metrics


def interrupted(root: Path, data: Any) -> Any:
    """A whole run of twelve updates, over more than one epoch; and what one that failed after the fifth does when it goes on."""
    whole = fit(root / "whole", data)
    fit(root / "resumed", data, plugins=(Fails(),))
    return whole, fit(root / "resumed", data)


def lines(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    texts = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["metrics"]) for line in map(json.loads, texts) if line["stage"] == "train"]


def both_interrupted(root: Path) -> Any:
    return [interrupted(root / data.__name__, data) for data in (by_length, mixture)]


def test_a_run_that_failed_in_an_epoch_goes_on_in_its_order_bit_for_bit(tmp_path: Path) -> None:
    for ranks in zip(*run_ranks(both_interrupted, 2, tmp_path), strict=True):
        for (weights, rows, metrics), (resumed_weights, resumed_seen, resumed_metrics) in ranks:
            assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
            assert resumed_seen == rows[-len(resumed_seen) :]
            assert len(resumed_seen) == 8
            assert metrics == resumed_metrics
    for name in ("by_length", "mixture"):
        assert len(lines(tmp_path / name / "whole")) == 4
        assert lines(tmp_path / name / "whole") == lines(tmp_path / name / "resumed")


def test_rows_of_about_one_length_come_together_and_every_row_once_an_epoch() -> None:
    torch.manual_seed(0)
    sampler = ByLength(LENGTHS, group=8, spread=10)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(203))
    assert len(sampler) == 203
    assert first != second
    groups = [[LENGTHS[row] for row in first[at : at + 8]] for at in range(0, 203, 8)]
    assert [len(group) for group in groups] == [8] * 25 + [3]
    assert max(groups[0]) == max(LENGTHS)
    padding = sum(max(group) * len(group) - sum(group) for group in groups)
    torch.manual_seed(0)
    shuffled = torch.randperm(203).tolist()
    plain = [[LENGTHS[row] for row in shuffled[at : at + 8]] for at in range(0, 203, 8)]
    assert padding < 0.3 * sum(max(group) * len(group) - sum(group) for group in plain)
    assert [max(group) for group in groups[1:25]] != sorted((max(group) for group in groups[1:25]), reverse=True)


def test_what_is_drawn_is_counted_logged_and_stored(tmp_path: Path) -> None:
    data = mixture()
    _, batches, _ = fit(tmp_path, data, steps=32)
    (sampler,) = data[1]
    rows = [row for batch in batches for row in batch]  # 15 updates an epoch, of 4 rows
    counted = {
        "few": sum(row < 5 for row in rows),
        "many": sum(row >= 100 for row in rows),
        "none": 0,
        "one": rows.count(7),
    }
    assert sampler.drawn == counted
    assert sum(counted.values()) == 32 * 4
    logged = lines(tmp_path)
    assert {name: sum(metrics[f"drawn_{name}"] for _, metrics in logged) for name in counted} == counted
    state = json.loads((tmp_path / "checkpoints" / "step-00000032" / "state.json").read_text())
    assert list(state["plugins"].values()) == [{"drawn": counted}]


def test_a_mixture_counts_anew_in_each_fit() -> None:
    class Logs(Net):
        def on_log(self, metrics: Any) -> None:
            logged.append({name: metrics[f"drawn_{name}"] for name in "ab"})

    mixture = Mixture({"a": [{"x": 1}] * 9, "b": [{"x": 2}] * 9}, {"a": 1, "b": 3}, rows=24)
    for steps in (1, 5, 5, 3):
        module, logged = Logs(), list[dict[str, float]]()
        trainer = Trainer(max_steps=steps, log_every=2, seed=1, progress=False, plugins=[mixture])
        trainer.fit(module, mixture.loader(batch_size=4))
        rows = [row for batch in module.rows for row in batch]
        assert mixture.drawn == {"a": rows.count(1), "b": rows.count(2)}
        assert {name: sum(line[name] for line in logged) for name in "ab"} == mixture.drawn


@pytest.mark.parametrize("options", [{"drop_last": True}, {}], ids=["drop_last", "limit_train_batches"])
def test_rows_that_an_epoch_leaves_out_are_not_counted(options: dict[str, Any]) -> None:
    mixture = Mixture({"a": [{"x": 1}] * 9, "b": [{"x": 2}] * 9}, {"a": 1, "b": 3}, rows=26)
    module, limit = Net(), None if options else 3
    trainer = Trainer(max_epochs=3, seed=1, progress=False, limit_train_batches=limit, plugins=[mixture])
    trainer.fit(module, mixture.loader(batch_size=4, **options))
    rows = [row for batch in module.rows for row in batch]
    assert mixture.drawn == {"a": rows.count(1), "b": rows.count(2)}


def test_a_source_gives_each_row_once_before_any_comes_again() -> None:
    rows = Mixture(sources(), {"few": 0.2, "many": 0.5, "none": 0, "one": 0.3}, rows=60, seed=3)._rows
    drawn = []
    for epoch in range(6):
        rows.set_epoch(epoch)
        drawn += [int(rows[place]["x"]) for place in range(60)]
    many, few = ([row for row in drawn if start <= row < stop] for start, stop in ((100, 200), (0, 5)))
    assert (len(few), len(many), drawn.count(7)) == (6 * 12, 6 * 30, 6 * 18)
    assert sorted(many[:100]) == list(range(100, 200))
    assert many[:100] != sorted(many[:100])
    passes = [few[at : at + 5] for at in range(0, len(few) // 5 * 5, 5)]
    assert all(sorted(each) == list(range(5)) for each in passes)
    assert len({tuple(each) for each in passes}) > 1


def test_shares_that_are_not_whole_rows_are_kept_over_epochs() -> None:
    mixture = Mixture({"a": [{"x": 1}] * 9, "b": [{"x": 2}] * 9, "c": [{"x": 3}]}, {"a": 5, "b": 5, "c": 1}, rows=7)
    counts = mixture._rows.draw.before(200)
    assert counts.sum() == 1400
    assert all(abs(count / 1400 - share / 11) < 0.02 for count, share in zip(counts, (5, 5, 1), strict=True))


def test_the_record_counts_on_with_other_weights_and_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, first, _ = fit(tmp_path, mixture(), steps=4)
    changed = {"few": 0.0, "many": 1.0, "none": 0, "one": 0.0}
    data = mixture(changed)
    _, then, _ = fit(tmp_path, data, steps=8)
    assert "was saved with train data of fingerprint" in capsys.readouterr().err
    rows = [row for batch in first + then for row in batch]
    assert data[1][0].drawn["many"] == sum(row >= 100 for row in rows)
    assert sum(data[1][0].drawn.values()) == 32
    assert all(row >= 100 for batch in then for row in batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": {"few": 1}}, "give one weight for each"),
        (
            {"weights": {"few": -1, "many": 1, "none": 0, "one": 0}},
            "; give a weight of at least 0, and 0 for a source without rows",
        ),
        ({"weights": {"few": 1, "many": 1, "none": 1, "one": 0}}, "'none' has 0 rows and the weight 1"),
        ({"weights": {"few": 0, "many": 0, "none": 0, "one": 0}}, "all weights are 0"),
        ({"rows": 0}, "rows=0: give at least 1"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Mixture(sources(), **arguments)


def test_streams_samplers_and_wrong_lengths_are_refused() -> None:
    stream = sources()["few"].to_iterable_dataset()
    with pytest.raises(ConfigurationError, match=r"a IterableDataset without a length: .*interleave_datasets"):
        Mixture({"few": stream}, {"few": 1})
    with pytest.raises(ConfigurationError, match="leave out shuffle and samplers"):
        Mixture({"few": sources()["few"]}).loader(4, shuffle=True)
    with pytest.raises(ConfigurationError, match=": give at least 1 for both"):
        ByLength([1, 2], group=0)
    with pytest.raises(ConfigurationError, match="give one number for each row"):
        ByLength([], group=2)
