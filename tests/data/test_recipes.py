"""The recipes of docs/data-recipes.md, stopped within an epoch and resumed, end with the same weights, on 1 rank and on 2."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabricate import Trainer, TrainModule
from fabricate.testing import run_ranks
from tests.test_docs import ROOT, script_of

ROWS = 35  # the last update of an epoch has three, which ranks cannot divide equally
RECIPES = ["two sets of different length", "rows that are hard to learn"]


def write_page(directory: Path) -> Path:
    """The imports and classes of the page, without its fits, as a file."""
    nodes = ast.parse(script_of(ROOT / "docs" / "data-recipes.md")).body
    kept: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    file = directory / "recipes.py"
    file.write_text(ast.unparse(ast.Module(kept, [])), encoding="utf-8")
    return file


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


def module_and_loader(page: Any, recipe: str, batch_size: int) -> tuple[TrainModule, DataLoader[Any]]:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 4, generator=draw)
    if recipe == RECIPES[0]:
        labelled = TensorDataset(inputs, torch.randint(3, (ROWS,), generator=draw))
        data = page.Joint(labelled, TensorDataset(torch.randn(50, 4, generator=draw)))
        return page.SemiSupervised(), DataLoader(data, batch_size, shuffle=True)
    module = page.Regression(ROWS)
    rows = page.Rows(inputs, inputs.sum(1, keepdim=True) + torch.randn(ROWS, 1, generator=draw))
    return module, DataLoader(rows, batch_size, sampler=page.HardRows(module))


def job(file: Path, ranks: int, directory: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """For each recipe the state of the module after 3 epochs of 5 updates: without a stop, and with one after update 6."""
    page, results = load(file), {}
    for recipe in RECIPES:

        def fit(run: str, recipe: str = recipe, **limit: int) -> dict[str, Any]:
            module, loader = module_and_loader(page, recipe, 8 // ranks)
            Trainer(run_dir=directory / recipe / run, seed=0, progress=False, **limit).fit(module, loader)
            return module.state_dict()

        whole = fit("whole", max_epochs=3)
        fit("stopped", max_steps=6)
        results[recipe] = (whole, fit("stopped", max_epochs=3))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("recipes")
    file = write_page(directory)
    return {1: [job(file, 1, directory / "one")], 2: run_ranks(job, 2, file, 2, directory / "two")}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recipe_that_is_stopped_within_an_epoch_ends_with_the_same_weights(
    results: dict[int, list[dict[str, Any]]], ranks: int, recipe: str
) -> None:
    for whole, resumed in (each[recipe] for each in results[ranks]):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_rows_that_are_hard_to_learn_are_the_same_rows_on_one_rank_and_on_two(
    results: dict[int, list[dict[str, Any]]],
) -> None:
    (one,), (two, other) = results[1], results[2]
    weights = one[RECIPES[1]][0]["weights"]
    assert weights.std() > 0.1
    for rank in (two, other):
        torch.testing.assert_close(rank[RECIPES[1]][0]["weights"], weights)
        torch.testing.assert_close(rank[RECIPES[1]][0]["linear.weight"], one[RECIPES[1]][0]["linear.weight"])
