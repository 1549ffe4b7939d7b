"""Groups of parameters by pattern: the options of each parameter, and the same training under every strategy."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabricate import Callback, ConfigurationError, Trainer, TrainModule
from fabricate.testing import run_ranks

ROWS = [(each, each.sum()) for each in torch.randn(10, 4, generator=torch.Generator().manual_seed(1))]
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "zero1": 2, "zero3": 2}
STEPS = 6
Weights = dict[str, np.ndarray[Any, Any]]


class Grouped(TrainModule):
    """`blocks` are sharded units of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(3, 4)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Tanh()) for _ in range(2)]
        )
        self.head = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = x + self.embedding((x[:, 0] > 0).long())
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.mse_loss(self.head(x)[:, 0], y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        still, head = {"weight_decay": 0.0}, {"lr": 0.03}
        return torch.optim.AdamW(
            self.parameter_groups({r"bias|LayerNorm|embedding": still, "^head": head}), lr=0.01, weight_decay=0.5
        )


def names(module: torch.nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    name_by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[name_by_id[id(parameter)] for parameter in group["params"]] for group in groups]


def test_the_first_pattern_in_the_name_or_the_kind_of_layer_counts_and_the_rest_come_first() -> None:
    module = Grouped()
    groups = module.parameter_groups({r"^LayerNorm\.|bias$": {"weight_decay": 0.0}, "^head": {"lr": 1.0}})
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == [
        {},
        {"weight_decay": 0.0},
        {"lr": 1.0},
    ]
    rest, still, head = names(module, groups)
    assert rest == ["embedding.weight", "blocks.0.0.weight", "blocks.1.0.weight"]
    assert still == [
        *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("0.bias", "1.weight", "1.bias")),
        "head.bias",
    ]
    assert head == ["head.weight"]


def test_a_tied_parameter_is_in_one_group_and_patterns_may_take_everything() -> None:
    module = Grouped()
    module.blocks[1][0].weight = module.blocks[0][0].weight
    groups = module.parameter_groups({"": {"lr": 1.0}})
    assert len(groups) == 1
    assert len(groups[0]["params"]) == len(list(module.parameters())) == 10


def test_a_pattern_that_finds_nothing_is_refused_with_names_as_they_are() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'LayerNrm' matches no parameter, .* 'embedding.weight' \(Embedding.weight\)"
    ):
        Grouped().parameter_groups({"LayerNrm": {"weight_decay": 0.0}})
    with pytest.raises(
        ConfigurationError, match="'head' matches no parameter, or only parameters that an earlier pattern"
    ):
        Grouped().parameter_groups({"weight|bias": {"lr": 1.0}, "head": {"lr": 2.0}})


# ------------------------------------------------------------------------------------------------------------ on ranks


class Ends(Callback):
    """Whole weights at the end, gathered by all ranks."""

    def __init__(self) -> None:
        self.weights: Weights = {}

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        whole = {name: trainer.strategy.gather(parameter) for name, parameter in module.named_parameters()}
        self.weights = {name: tensor.detach().clone().numpy() for name, tensor in whole.items()}


def fit(strategy: str, run_dir: Path, steps: int) -> Weights:
    ends = Ends()
    trainer = Trainer(
        strategy=strategy,
        precision="fp32",
        max_steps=steps,
        global_batch_size=4,
        run_dir=run_dir,
        save_every=None,
        progress=False,
        plugins=[ends],
    )
    trainer.fit(Grouped(), ROWS, batch_size=2 // STRATEGIES[strategy], shuffle=False)
    return ends.weights


def job(world_size: int, directory: Path) -> dict[str, Weights | str]:
    """Each strategy, in two halves: the second one resumes."""
    results: dict[str, Weights | str] = {}
    for strategy in (name for name, needed in STRATEGIES.items() if needed == world_size):
        try:
            fit(strategy, directory / strategy, STEPS // 2)
            results[strategy] = fit(strategy, directory / strategy, STEPS)
        except Exception as exception:
            results[strategy] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Weights | str]]:
    directory = tmp_path_factory.mktemp("groups")
    one, two = [job(1, directory)], run_ranks(job, 2, 2, directory)
    return {name: [rank[name] for rank in (one if needed == 1 else two)] for name, needed in STRATEGIES.items()}


def by_hand() -> Weights:
    """Whole batches, and each group written out."""
    module = Grouped()
    rate = {name: 0.03 if name == "head.weight" else 0.01 for name, _ in module.named_parameters()}
    decays = {"blocks.0.0.weight", "blocks.1.0.weight", "head.weight"}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "lr": rate[name], "weight_decay": 0.5 if name in decays else 0.0}
            for name, p in module.named_parameters()
        ]
    )
    starts = [0, 4, 8] * 2
    for start in starts[:STEPS]:
        module.training_step(torch.utils.data.default_collate(ROWS[start : start + 4])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_each_group_with_its_own_options(
    answers: dict[str, list[Weights | str]], strategy: str
) -> None:
    wanted = by_hand()
    for weights in answers[strategy]:
        assert not isinstance(weights, str), weights
        assert weights.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
