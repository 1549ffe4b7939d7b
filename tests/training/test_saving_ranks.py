"""Saving, resuming and exporting on two ranks, and from one strategy to another: bit for bit."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fabricate import Trainer
from fabricate.cli.recorded.files import read_run
from fabricate.cli.recorded.rows import fits, rows_of_step
from fabricate.testing import run_ranks
from tests.support.runs import (
    ROWS,
    SAVED,
    STEPS,
    Average,
    Net,
    assert_same_run,
    content,
    fit,
    fit_until_the_crash,
    step,
)
from tests.support.stories import Storyteller, stories


def tell(root: Path, strategy: str, batch_size: int) -> list[torch.Tensor] | None:
    """Initial weights to `initial-STRATEGY`, those after two updates to `stories-STRATEGY`; returns their logits."""
    for name, number in (("initial", 0), ("stories", 2)):
        module = Storyteller()
        trainer = Trainer(
            strategy=strategy, max_steps=number, seed=3, run_dir=root / f"{name}-{strategy}", progress=False
        )
        trainer.fit(module, stories(), batch_size=batch_size, shuffle=False)
    return trainer.predict(module, stories(), batch_size=batch_size)


class MixedWidths(Net):
    """Weights of several element sizes, in another order than a file holds them."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 3).double()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.to(block.weight.dtype))
        return self.head(x.float())


class Remembers(Net):
    """Every rank's running statistics are its own, and what it computes depends on them."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("same", torch.arange(3.0))

    def training_step(self, batch: Any) -> torch.Tensor:
        self.average.lerp_(batch[1].mean(0), 0.5)
        return super().training_step((batch[0], batch[1] - self.average))


def remember(root: Path, strategy: str) -> Any:
    """Straight and crashed; this rank's statistics at the end of both."""
    buffers = []
    for name in ("straight", "crashed"):
        run_dir, options = root / f"remembers-{name}-{strategy}", {"strategy": strategy, "batch_size": 2}
        if name == "crashed":
            fit_until_the_crash(run_dir, module=Remembers(), **options)
        module = fit(run_dir, module=Remembers(), **options)
        buffers.append([module.average.tolist(), module.norm.running_mean.tolist()])
    return buffers


class RowsOfItsOwn(Net):
    """Stores how many rows it saw, which is alike on all ranks, and which, which is not."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_seen, self.last = 0, torch.zeros(4)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.rows_seen, self.last = self.rows_seen + len(batch[1]), batch[1][0].clone()
        return super().training_step(batch)

    def on_save(self, state: dict[str, Any]) -> None:
        state["inner"] = {"rows": self.rows_seen, "last": self.last}
        state["rows"] = self.rows_seen
        state["equal"] = set([0, 8] if self.trainer.is_main else [8, 0])  # iterated in another order
        if self.trainer.is_main:
            state["only here"] = 1


def on_two_ranks(root: Path) -> dict[str, Any]:
    """Everything that two ranks write into `root`; what a run returned or raised, by name."""

    def resumed(strategy: str) -> Any:
        """Straight and crashed, with the state of a sharded plugin; the order of the samples."""
        rows = {}
        options = {"strategy": strategy, "batch_size": 2}
        rows["straight"] = fit(root / f"straight-{strategy}", plugins=[Average()], **options).rows
        fit_until_the_crash(root / f"crashed-{strategy}", plugins=[Average()], **options)
        rows["resumed"] = fit(root / f"crashed-{strategy}", plugins=[Average()], **options).rows
        return rows

    def crossed(name: str, strategy: str, saved: str) -> Any:
        """The checkpoint of another strategy: once only loaded and saved again, once trained on."""
        source, plugins = root / saved, {"plugins": [Average()]} if "alone" not in saved else {}
        options = {"strategy": strategy, "batch_size": 2, "resume": step(source, SAVED), **plugins}
        fit(root / f"loaded-{name}", SAVED, **options)
        return fit(root / f"{name}", **options).rows

    jobs: dict[str, Callable[[], Any]] = {
        "ddp": lambda: resumed("ddp"),
        "fsdp": lambda: resumed("fsdp"),
        "fsdp to ddp": lambda: crossed("fsdp-to-ddp", "ddp", "straight-fsdp"),
        "single to fsdp": lambda: crossed("single-to-fsdp", "fsdp", "straight-alone"),
        "stories": lambda: tell(root, "fsdp", 2),
        "ddp remembers": lambda: remember(root, "ddp"),
        "fsdp remembers": lambda: remember(root, "fsdp"),
        "mixed": lambda: fit(root / "mixed", 2, strategy="fsdp:wrap=Linear", module=MixedWidths(), batch_size=2).rows,
        "rows of its own": lambda: fit(root / "own-rows", strategy="ddp", module=RowsOfItsOwn(), batch_size=2).rows,
    }
    results = {}
    for name, run in jobs.items():
        try:
            results[name] = run()
        except Exception as exception:
            results[name] = "".join(traceback.format_exception(exception))
    return results


class Pair:
    """What two ranks did, and the directory they did it in."""

    def __init__(self, root: Path, alone: list[list[int]], ranks: list[dict[str, Any]]) -> None:
        self.root, self.alone, self._ranks = root, alone, ranks

    def __getitem__(self, name: str) -> list[Any]:
        for rank in self._ranks:
            if isinstance(rank[name], str):
                pytest.fail(rank[name], pytrace=False)
        return [rank[name] for rank in self._ranks]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    alone = fit(root / "straight-alone").rows
    return Pair(root, alone, run_ranks(on_two_ranks, 2, root))


def updates(*ranks: list[list[int]]) -> list[list[int]]:
    """Per update, the rows that went into it, whichever rank had them; an update is two micro-batches."""
    return [
        sorted(row for rank in ranks for micro_batch in rank[at : at + 2] for row in micro_batch)
        for at in range(0, len(ranks[0]), 2)
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_that_crashed_end_as_two_that_never_stopped(pair: Pair, strategy: str) -> None:
    pair[strategy]
    assert_same_run(pair.root / f"straight-{strategy}", pair.root / f"crashed-{strategy}")


def test_state_that_on_save_stores_with_another_value_on_some_rank_is_named(pair: Pair) -> None:
    assert pair["rows of its own"]

    def notes(run: str) -> list[str]:
        lines = (pair.root / run / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [event["text"] for event in map(json.loads, lines) if event["event"] == "note"]

    (own,) = (text for text in notes("own-rows") if text.startswith("on_save"))
    assert "on_save of the module stores another value of inner on rank 1 than on rank 0" in own
    assert not any(text.startswith("on_save") for text in notes("straight-fsdp"))  # equal values, one of them sharded


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_running_statistics_of_each_rank_come_back_to_it(pair: Pair, strategy: str) -> None:
    ranks = pair[f"{strategy} remembers"]
    for straight, crashed in ranks:
        assert crashed == straight
    straight, crashed = (pair.root / f"remembers-{name}-{strategy}" for name in ("straight", "crashed"))
    assert_same_run(straight, crashed)
    own = sorted(name for name in content(step(straight)) if "/buffers/" in name)
    if strategy == "fsdp":  # ddp gives every rank those of rank 0 before each forward
        assert ranks[0][0] != ranks[1][0]
        assert own == [f"rank/00001/buffers/{name}" for name in ("average", "norm.running_mean", "norm.running_var")]


def test_the_order_of_samples_is_the_same_on_every_number_of_ranks_and_goes_on_after_a_resume(pair: Pair) -> None:
    alone = updates(pair.alone)
    assert sorted(row for update in alone[:3] for row in update) == list(range(ROWS)), "an epoch, each row once"
    for strategy in ("ddp", "fsdp"):
        ranks = pair[strategy]
        assert updates(*(rank["straight"] for rank in ranks)) == alone
        assert updates(*(rank["resumed"] for rank in ranks)) == alone[SAVED:]
    assert updates(*pair["fsdp to ddp"]) == alone[SAVED:]
    assert updates(*pair["single to fsdp"]) == alone[SAVED:]
    begun = fit(pair.root / "fsdp-to-single", resume=step(pair.root / "straight-fsdp", SAVED), plugins=[Average()])
    assert updates(begun.rows) == alone[SAVED:]


def rows_by_step(run_dir: Path, steps: range, ranks: int) -> list[list[list[int]]]:
    """By rank, what `fabricate rows` says that it saw, micro-batch by micro-batch; one without rows is an empty list."""
    history, parts = fits(read_run(run_dir)), {}
    for number in steps:
        for part in rows_of_step(history, number)[1]:
            parts[part.rank, number, part.micro_step] = part.rows
    return [[parts.get((rank, number, at), []) for number in steps for at in range(2)] for rank in range(ranks)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_rows_of_every_rank_are_computed_from_the_files(pair: Pair, strategy: str) -> None:
    ranks = pair[strategy]
    straight, crashed = (pair.root / f"{name}-{strategy}" for name in ("straight", "crashed"))
    assert rows_by_step(straight, range(1, STEPS + 1), 2) == [rank["straight"] for rank in ranks]
    assert rows_by_step(crashed, range(SAVED + 1, STEPS + 1), 2) == [rank["resumed"] for rank in ranks]


def test_the_rows_are_those_of_the_ranks_that_there_were_at_that_step(pair: Pair, tmp_path: Path) -> None:
    two = [rank["straight"] for rank in pair["ddp"]]
    run_dir = shutil.copytree(pair.root / "straight-ddp", tmp_path / "run")
    alone = fit(run_dir, STEPS + 3, plugins=[Average()], batch_size=4).rows
    assert rows_by_step(run_dir, range(1, STEPS + 1), 2) == two
    assert rows_by_step(run_dir, range(STEPS + 1, STEPS + 4), 1) == [alone]


@pytest.mark.parametrize("name", ["fsdp-to-ddp", "fsdp-to-single", "single-to-fsdp"])
def test_a_checkpoint_loads_under_another_strategy_bit_by_bit(pair: Pair, name: str) -> None:
    saved = step(pair.root / ("straight-alone" if name.startswith("single") else "straight-fsdp"), SAVED)
    if name == "fsdp-to-single":
        fit(pair.root / f"loaded-{name}", SAVED, resume=saved, plugins=[Average()])
    else:
        pair[name.replace("-", " ")]
    before, after = content(saved), content(step(pair.root / f"loaded-{name}", SAVED))
    keys = [key for key in before if key.startswith(("model/", "optimizer/", "plugin/"))]
    assert len(keys) > 20
    assert [key for key in keys if after.get(key) != before[key]] == []
    for key in ("optimizers", "schedulers", "progress", "data", "seed", "latest"):
        assert after["state.json"][key] == before["state.json"][key]
    collected = {
        when: [
            entry for file in sorted(files) if file.startswith("rank-") for entry in files[file]["metrics"]["pending"]
        ]
        for when, files in (("before", before), ("after", after))
    }
    assert collected["after"] == collected["before"], "since the last log boundary, on all ranks together"


@pytest.mark.parametrize("kind", ["alone", "ddp", "fsdp"])
def test_the_exported_model_is_plain_safetensors_named_as_in_the_state_dict(pair: Pair, kind: str) -> None:
    if kind != "alone":
        pair[kind]
    run_dir = pair.root / f"straight-{kind}"
    assert [path.name for path in (run_dir / "model").iterdir()] == ["model.safetensors"]
    exported = load_file(run_dir / "model" / "model.safetensors")
    module = Net.load_from_checkpoint(run_dir)
    assert exported.keys() == module.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in module.state_dict().items())
    Net().load_state_dict(exported)


def test_weights_of_several_element_sizes_are_exported_from_shards(pair: Pair) -> None:
    pair["mixed"]
    exported = load_file(pair.root / "mixed" / "model" / "model.safetensors")
    saved = MixedWidths.load_from_checkpoint(pair.root / "mixed").state_dict()
    assert {value.dtype for value in exported.values()} >= {torch.bfloat16, torch.float64, torch.float32}
    assert all(torch.equal(exported[name], value) for name, value in saved.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_reads_the_exported_folder_and_computes_the_same(pair: Pair) -> None:
    from transformers import AutoModelForCausalLM

    first, second = pair["stories"]
    assert second is None
    by_strategy = {"fsdp": first, "single": tell(pair.root, "single", 4)}
    initial = [load_file(pair.root / f"initial-{strategy}" / "model" / "model.safetensors") for strategy in by_strategy]
    assert initial[0].keys() == initial[1].keys()
    assert all(torch.equal(value, initial[1][name]) for name, value in initial[0].items())
    for strategy, logits in by_strategy.items():
        folder = pair.root / f"stories-{strategy}" / "model"
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(model).__name__ == "GPT2LMHeadModel"
        assert model.lm_head.weight is model.transformer.wte.weight
        with torch.no_grad():
            output = model(input_ids=stories().tensors[0]).logits
        torch.testing.assert_close(output, torch.stack(logits), rtol=1e-5, atol=1e-6)
    assert Storyteller.load_from_checkpoint(pair.root / "stories-fsdp").model.lm_head.weight.shape == (31, 8)
