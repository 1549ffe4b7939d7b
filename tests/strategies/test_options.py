"""The effect of each option of DDP and FSDP on a real run, observed from inside, with the numbers of one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from fabricate import DDP, FSDP, Callback, ConfigurationError, Trainer, TrainModule
from fabricate.testing import run_ranks
from tests.support.stories import Storyteller, stories

STEPS, GLOBAL_BATCH, TOLERANCE = 5, 8, 1e-5


class Block(torch.nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)
        self.dropout = torch.nn.Dropout(dropout)
        self.runs = 0
        self.dtypes: set[str] = set()
        self.copies = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.dtypes.add(str(self.up.weight.dtype))
        return x + self.down(self.dropout(torch.relu(self.up(x))))


class CountingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
            return super().forward(x)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts the weights that backward keeps and that are not the memory which FSDP gathered and frees."""
        gathered = {layer.weight.untyped_storage().data_ptr() for layer in (self.up, self.down)}
        if tensor.numel() == self.up.weight.numel() and tensor.untyped_storage().data_ptr() not in gathered:
            self.copies += 1
        return tensor


class Tower(TrainModule):
    """Two blocks between two layers. Notes whether the first block's weight is whole once its forward is over."""

    def __init__(self, width: int = 8, dropout: float = 0.0, block: type[Block] = Block) -> None:
        super().__init__()
        self.block = block
        self.width, self.dropout = width, dropout
        self.whole_after_forward: set[bool] = set()

    def configure_model(self) -> None:
        self.first = torch.nn.Linear(4, self.width)
        self.blocks = torch.nn.ModuleList(self.block(self.width, self.dropout) for _ in range(2))
        self.last = torch.nn.Linear(self.width, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        self.whole_after_forward.add(not hasattr(self.blocks[0].up.weight, "placements"))
        return mse_loss(self.last(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Normalised(Tower):
    """With a normalisation of the input, which is float32, and one that keeps running statistics."""

    def configure_model(self) -> None:
        super().configure_model()
        self.scale, self.centre = torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4)

    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step((self.centre(self.scale(batch[0])), batch[1]))


class Turns(Tower):
    """The blocks take turns: one runs in the first micro-batch of a window only, the other in the second one only."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return mse_loss(self.last(self.blocks[batch_idx % 2](self.first(batch[0]))), batch[1])


class Watch(Callback):
    """Losses, and what lies in the gradients and optimizer state before an update."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.bytes: dict[str, int] = {}
        self.logging: dict[str, Any] = {}
        self.shared_storage = False
        self.shared_after: list[bool] = []
        """After each micro-batch, whether gradients share their memory."""
        self.gradient_copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """A gradient that a hook keeps, and its values then."""
        self.reached: list[bool] = []

    def on_fit_start(self, module: TrainModule) -> None:
        self.start = {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_accumulate(self, module: TrainModule) -> None:
        self.reached.append(module.first.weight.grad is not None)
        self.shared_after.append(_share([p.grad for p in module.parameters() if p.grad is not None]))

    def on_before_step(self, trainer: Trainer, module: TrainModule) -> None:
        grads = {name: p.grad for name, p in module.named_parameters()}
        local = {name: getattr(g, "_local_tensor", g) for name, g in grads.items()}
        self.bytes["gradients"] = sum(g.numel() * g.element_size() for g in local.values())
        self.shared_storage = _share(list(local.values()))
        shard = local["first.weight"]
        self.gradient_copies.append((shard, shard.clone()))
        self.gradients.append(
            {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}
        )

    def on_step(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))
        parts = {name: getattr(p, "_local_tensor", p) for name, p in module.named_parameters()}
        self.bytes["parameters"] = sum(p.numel() * p.element_size() for p in parts.values())
        states = [v for o in trainer.optimizers.values() for s in o.state.values() for v in s.values()]
        states = [getattr(v, "_local_tensor", v) for v in states if isinstance(v, torch.Tensor)]
        self.bytes["optimizer state"] = sum(v.numel() * v.element_size() for v in states)
        model: Any = trainer._live().engine.model
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            self.logging = dict(model._get_ddp_logging_data())


def _share(gradients: list[torch.Tensor]) -> bool:
    local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
    return len({gradient.untyped_storage().data_ptr() for gradient in local}) < len(local)


def rows() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def whole(module: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    tensors = {name: p.detach() for name, p in module.named_parameters()}
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone().numpy() for n, t in tensors.items()}


def train(strategy: Any, world_size: int, *, module: Tower | None = None, **arguments: Any) -> dict[str, Any]:
    """One fit of two micro-batches per update; everything that the tests look at."""
    module, watch = module or Tower(), Watch()
    options = {"max_steps": STEPS, "seed": 3, "progress": False, "gradient_accumulation_steps": 2, **arguments}
    trainer = Trainer(strategy=strategy, plugins=[watch], **options)
    plan = trainer.plan(module, rows(), batch_size=1)
    result = trainer.fit(module, rows(), batch_size=GLOBAL_BATCH // 2 // world_size, shuffle=False)
    parts = {n: getattr(p, "_local_tensor", p) for n, p in module.named_parameters()}
    return {
        "start": watch.start if world_size == 1 else None,
        "losses": watch.losses,
        "weights": whole(module),
        "gradients": watch.gradients,
        "bytes": watch.bytes,
        "logging": watch.logging,
        "shared storage": watch.shared_storage,
        "shared after": watch.shared_after,
        "kept": all(torch.equal(gradient, values) for gradient, values in watch.gradient_copies),
        "reached": watch.reached,
        "sizes": {n: p.numel() for n, p in parts.items()},
        "placements": {n: str(getattr(p, "placements", "")) for n, p in module.named_parameters()},
        "units": sorted(n for n, m in module.named_modules() if type(m).__name__.startswith("FSDP")),
        "runs": module.blocks[0].runs,
        "dtypes": module.blocks[0].dtypes,
        "copies": module.blocks[0].copies,
        "whole after forward": module.whole_after_forward,
        "forward": [n for n, m in module.named_modules() if "forward" in vars(m)],
        "plan": plan.to_json()["settings"],
        "checkpoint": result.checkpoint,
    }


def rounded_by_hand(start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a fit of two bf16 ranks does, in one process: each piece of a window goes through weights that are rounded to bfloat16, and
    their gradients are added up in float32."""
    masters, rounded, losses = Tower(), Tower(), []
    for tower in (masters, rounded):
        tower.configure_model()
    masters.load_state_dict(start)
    rounded.bfloat16()
    optimizer = masters.configure_optimizers()
    for step in range(STEPS):
        window = [t[GLOBAL_BATCH * (step % 2) :][:GLOBAL_BATCH] for t in rows().tensors]
        pieces = list(zip(*(t.split(GLOBAL_BATCH // 4) for t in window), strict=True))
        rounded.load_state_dict(masters.state_dict())
        losses.append(0.0)
        for piece in pieces:
            with torch.autocast("cpu", torch.bfloat16):
                loss = rounded.training_step(piece)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[-1] += loss.item() / len(pieces)
            for ours, theirs in zip(masters.parameters(), rounded.parameters(), strict=True):
                assert theirs.grad is not None
                piece_of_mean = theirs.grad.float() / len(pieces)
                ours.grad = piece_of_mean if ours.grad is None else ours.grad + piece_of_mean
            rounded.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": whole(masters)}


def refused(strategy: Any, **arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=strategy, progress=False, max_steps=1, **arguments).plan(Tower(), rows(), batch_size=1)
    return str(caught.value)


def resumed(root: Path, strategy: str) -> dict[str, Any]:
    """Straight through, and in two halves."""
    options = {"save_every": "2 steps", "keep": "all"}
    straight = train(strategy, 2, run_dir=root / "straight", **options)
    train(strategy, 2, run_dir=root / "halves", max_steps=2, **options)
    halves = train(strategy, 2, run_dir=root / "halves", **options)
    return {"straight": straight["weights"], "halves": halves["weights"]}


def again(first: str, second: str, **options: Any) -> Any:
    """A second fit of one module, under other options."""
    module = Tower()
    train(first, 2, module=module)
    before = module.blocks[0].runs
    try:
        return train(second, 2, module=module, **options)["runs"] - before
    except ConfigurationError as error:
        return str(error)


TWO = {
    "ddp": "ddp",
    "static graph": "ddp:static_graph=true",
    "looked for": "ddp:find_unused_parameters=true",
    "small buckets": "ddp:bucket_cap_mb=1",
    "bucket view": "ddp:gradient_as_bucket_view=true",
    "bf16 hook": "ddp:communication_hook=bf16",
    "fp16 hook": "ddp:communication_hook=fp16",
    "fsdp": "fsdp",
    "none": "fsdp:wrap=none",
    "named": "fsdp:wrap=Linear+Block",
    "size": "fsdp:wrap=size:300",
    "keep": "fsdp:reshard_after_forward=false",
    "whole": "fsdp:accumulate=whole",
    "offload": "fsdp:offload=cpu",
    "recompute": "fsdp:activation_checkpointing=true",
    "bf16 reduce": "fsdp:reduce_dtype=bf16,accumulate=whole",
}
EXACT = [name for name in TWO if name not in ("bf16 hook", "fp16 hook", "bf16 reduce")]


def on_two_ranks(root: Path) -> dict[str, Any]:
    wide = {"module": lambda: Tower(width=300)}
    jobs: dict[str, Callable[[], Any]] = {name: (lambda s=s: train(s, 2)) for name, s in TWO.items()}
    jobs |= {
        "wide": lambda: train("ddp", 2, module=wide["module"](), max_steps=3),
        "wide, small buckets": lambda: train("ddp:bucket_cap_mb=1", 2, module=wide["module"](), max_steps=3),
        "dropout": lambda: train("fsdp", 2, module=Tower(dropout=0.5)),
        "dropout, recompute": lambda: train("fsdp:activation_checkpointing=true", 2, module=Tower(dropout=0.5)),
        "bf16": lambda: train("fsdp", 2, module=Tower(block=CountingBlock), precision="bf16"),
        "bf16, named": lambda: train("fsdp:param_dtype=bf16", 2, precision="bf16"),
        "bf16, as they are": lambda: train(
            "fsdp:param_dtype=fp32", 2, module=Tower(block=CountingBlock), precision="bf16"
        ),
        "normalised": lambda: train("fsdp", 2, module=Normalised(), precision="bf16"),
        "again": lambda: again("fsdp", "fsdp:activation_checkpointing=true"),
        "again, otherwise": lambda: again("fsdp", "fsdp:wrap=none"),
        "again, in bf16": lambda: again("fsdp", "fsdp", precision="bf16"),
        "gpt2": lambda: storyteller(),
        "refused": lambda: {
            text: refused(text, **arguments)
            for text, arguments in (
                ("fsdp:param_dtype=bf16", {"precision": "fp32"}),
                ("fsdp:wrap=Missing", {}),
                ("fsdp:wrap=size:big", {}),
                ("fsdp:shard=3", {}),
                ("fsdp:shard=1", {}),
                ("fsdp:shard=rack", {}),
                ("fsdp:accumulate=none", {}),
                ("fsdp:wrap=none,activation_checkpointing=true", {}),
                ("fsdp:reduce_dtype=int8", {}),
                ("ddp:static_graph=true,find_unused_parameters=true", {}),
                ("ddp:communication_hook=zip", {}),
                ("ddp:communication_hook=powersgd", {}),
                ("ddp:find_unused_parameters=auto", {}),
            )
        },
    }
    return answers_of(jobs)


def storyteller() -> dict[str, Any]:
    by_strategy: dict[str, Any] = {}
    for strategy in ("fsdp", "fsdp:activation_checkpointing=true"):
        module, calls = Storyteller(), [0]
        trainer = Trainer(strategy=strategy, max_steps=2, seed=3, progress=False, plugins=[Count(calls)])
        trainer.fit(module, stories(), batch_size=2, shuffle=False)
        by_strategy[strategy] = (whole(module), calls[0], module.model.is_gradient_checkpointing)
    return by_strategy


class Count(Callback):
    """How often the first block's attention runs."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def on_fit_start(self, module: Any) -> None:
        def ran(layer: torch.nn.Module, inputs: object) -> None:
            self.calls[0] += 1

        module.model.transformer.h[0].mlp.register_forward_pre_hook(ran)


def on_four_ranks(root: Path) -> dict[str, Any]:
    return answers_of(
        {
            "hybrid": lambda: train("fsdp:shard=2", 4, run_dir=root / "hybrid"),
            "turns": lambda: train("fsdp:shard=2", 4, module=Turns()),
            "turns, whole": lambda: train("fsdp:shard=2,accumulate=whole", 4, module=Turns()),
        }
    )


def answers_of(jobs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, run in jobs.items():
        try:
            results[name] = run()
        except Exception:
            results[name] = "".join(traceback.format_exc())
    return results


class Answers:
    def __init__(self, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        self.alone, self._ranks = alone, ranks

    def __getitem__(self, name: str) -> list[Any]:
        for rank in self._ranks:
            if isinstance(rank[name], str) and "Traceback" in rank[name]:
                pytest.fail(rank[name], pytrace=False)
        return [rank[name] for rank in self._ranks]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train("single", 1)


@pytest.fixture(scope="module")
def two(alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(alone, run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("two"), timeout=400))


@pytest.fixture(scope="module")
def four(alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(alone, run_ranks(on_four_ranks, 4, tmp_path_factory.mktemp("four"), timeout=400))


def assert_near(run: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    np.testing.assert_allclose(run["losses"], wanted["losses"], rtol=tolerance)
    assert run["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        difference = np.linalg.norm(run["weights"][name] - value) / np.linalg.norm(value)
        assert difference < tolerance, name


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


# ------------------------------------------------------------------------------------------------- every option


@pytest.mark.parametrize("name", EXACT)
def test_an_option_that_changes_no_number_changes_none(two: Answers, name: str) -> None:
    for run in two[name]:
        assert_near(run, two.alone, TOLERANCE)


@pytest.mark.parametrize("name", ["ddp", "bucket view", "fsdp", "none", "size", "offload", "keep"])
def test_the_plan_says_ahead_what_a_rank_then_holds(two: Answers, name: str) -> None:
    # The first rank's shards are the largest: those are what the plan tells.
    run = two[name][0]
    memory = {k.removeprefix("host "): v for k, v in run["plan"]["memory_per_rank"]["value"].items()}
    scalars = 4 * len(run["sizes"])  # each parameter's step, which is not divided
    assert run["bytes"]["parameters"] == memory["parameters"]
    assert run["bytes"]["gradients"] == memory["gradients"]
    assert abs(run["bytes"]["optimizer state"] - memory["optimizer state"]) <= scalars
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")


# ------------------------------------------------------------------------------------------------- FSDP


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("none", []),
        ("fsdp", ["blocks.0", "blocks.1"]),
        (
            "named",
            ["blocks.0", "blocks.0.down", "blocks.0.up", "blocks.1", "blocks.1.down", "blocks.1.up", "first", "last"],
        ),
        # A block has 424 parameters, no layer of it 300.
        ("size", ["blocks.0", "blocks.1"]),
    ],
)
def test_units_are_those_asked_for_and_each_rank_holds_half(two: Answers, name: str, units: list[str]) -> None:
    ranks = two[name]
    for run in ranks:
        assert run["units"] == units
        shown = run["plan"]["shards"]["value"]
        assert shown.endswith("over 2 ranks")
    for parameter, value in two.alone["weights"].items():
        sizes = [run["sizes"][parameter] for run in ranks]
        assert sum(sizes) == value.size
        assert sizes[0] == -(-len(value) // 2) * (value.size // len(value))


def test_units_are_freed_after_their_forward_unless_they_shall_stay(two: Answers) -> None:
    assert {run["whole after forward"].pop() for run in two["fsdp"]} == {False}
    assert {run["whole after forward"].pop() for run in two["keep"]} == {True}
    gathered = [run["plan"]["memory_per_rank"]["value"]["gathered"] for run in (two["fsdp"][0], two["keep"][0])]
    assert gathered[1] == 4 * sum(value.size for value in two.alone["weights"].values()) > gathered[0]


def test_gradients_accumulate_in_shards_or_whole(two: Answers) -> None:
    for name, reached in (("fsdp", [True, True]), ("whole", [False, True])):
        for run in two[name]:
            assert run["reached"] == reached * STEPS
    memory = two["whole"][0]["plan"]["memory_per_rank"]["value"]
    assert memory["whole gradients"] == 4 * sum(value.size for value in two.alone["weights"].values())
    assert "whole gradients" not in two["fsdp"][0]["plan"]["memory_per_rank"]["value"]


def test_recomputation_runs_each_unit_twice_and_leaves_nothing_behind(two: Answers) -> None:
    for plain, again in zip(two["fsdp"], two["recompute"], strict=True):
        assert (plain["runs"], again["runs"]) == (2 * STEPS, 4 * STEPS)
        assert again["forward"] == []
        assert again["plan"]["activations"]["value"] == "recomputed in backward, unit by unit"


def test_recomputation_drops_out_the_same_units_as_the_forward_did(two: Answers) -> None:
    for plain, again in zip(two["dropout"], two["dropout, recompute"], strict=True):
        assert again["losses"] == plain["losses"]
        assert same(again["weights"], plain["weights"])
        assert plain["losses"] != two["fsdp"][0]["losses"]


def test_a_transformers_model_recomputes_its_own_blocks(two: Answers) -> None:
    for by_strategy in two["gpt2"]:
        (plain, once, _), (again, twice, still) = by_strategy.values()
        assert same(plain, again)
        assert twice == 2 * once
        assert not still


def test_gradients_are_summed_in_the_dtype_asked_for(two: Answers) -> None:
    def bf16(run: dict[str, Any]) -> bool:
        return all(torch.equal(g, g.bfloat16().float()) for step in run["gradients"] for g in step.values())

    for run, plain in zip(two["bf16 reduce"], two["fsdp"], strict=True):
        assert bf16(run)
        assert not bf16(plain)
        assert_near(run, two.alone, 0.05)


def test_parameters_are_gathered_in_the_dtype_that_the_precision_computes_in(two: Answers) -> None:
    for run, named, plain in zip(two["bf16"], two["bf16, named"], two["bf16, as they are"], strict=True):
        assert plain["dtypes"] == {"torch.float32"}
        assert run["dtypes"] == named["dtypes"] == {"torch.bfloat16"}
        assert same(run["weights"], named["weights"])
        assert all(value.dtype == np.float32 for value in run["weights"].values())
        assert all(g.dtype == torch.float32 for g in run["gradients"][0].values())
        assert_near(run, plain, 0.02)
        memory, of_plain = (each["plan"]["memory_per_rank"]["value"] for each in (run, plain))
        assert 2 * memory["gathered"] == of_plain["gathered"]
        assert "half-precision copies" not in memory
        assert of_plain["half-precision copies"] == 2 * sum(w.size for w in run["weights"].values() if w.ndim > 1)


def test_backward_keeps_no_copy_of_what_was_gathered_in_half_precision(two: Answers) -> None:
    for run, plain in zip(two["bf16"], two["bf16, as they are"], strict=True):
        assert run["copies"] == 0
        assert plain["copies"] == 2 * plain["runs"], "autocast's, of both layers"


def test_the_update_in_half_precision_is_that_of_rounded_weights_and_whole_masters(two: Answers) -> None:
    wanted = rounded_by_hand(two.alone["start"])
    for run in two["bf16"]:
        assert_near(run, wanted, TOLERANCE)


def test_layers_that_need_float32_parameters_keep_them_in_half_precision(two: Answers) -> None:
    for run in two["normalised"]:
        assert run["dtypes"] == {"torch.bfloat16"}
        assert run["losses"][-1] < run["losses"][0]


def test_shards_in_groups_are_averaged_over_the_copies(four: Answers) -> None:
    for rank, run in enumerate(four["hybrid"]):
        assert_near(run, four.alone, TOLERANCE)
        assert set(run["placements"].values()) == {"(Replicate(), Shard(dim=0))"}
        assert run["sizes"]["first.weight"] == four.alone["weights"]["first.weight"].size // 2
        assert run["plan"]["shards"]["value"].endswith("over 2 ranks, in 2 copies"), rank


@pytest.mark.parametrize("name", ["turns", "turns, whole"])
def test_a_unit_that_the_last_micro_batch_leaves_out_is_averaged_over_the_copies(four: Answers, name: str) -> None:
    """FSDP can put off what copies exchange to the last micro-batch (`set_requires_all_reduce`). It then forgets a unit that does not
    run in that one, so `accumulate="shards"` lets the copies exchange in each of them."""
    wanted = train("single", 1, module=Turns())
    for run in four[name]:
        assert_near(run, wanted, TOLERANCE)


def test_a_checkpoint_of_shards_in_copies_holds_each_element_once(four: Answers) -> None:
    run = four["hybrid"][0]
    module = Tower.load_from_checkpoint(run["checkpoint"])
    assert same(whole(module), run["weights"])
    exported = load_file(Path(run["checkpoint"]).parents[1] / "model" / "model.safetensors")
    assert same({name: value.numpy() for name, value in exported.items()}, run["weights"])


def test_a_module_that_was_sharded_goes_on_with_the_options_of_its_shards(two: Answers) -> None:
    assert two["again"] == [4 * STEPS] * 2
    for message in two["again, otherwise"]:
        assert message.startswith("fsdp: wrap='none': an earlier fit sharded this Tower with wrap='auto'")
    for message in two["again, in bf16"]:
        assert message.endswith(
            "sharded this Tower with param_dtype=None; use the same precision, or build a new module"
        )


# ------------------------------------------------------------------------------------------------- DDP


def test_the_options_of_ddp_reach_torchs_ddp(two: Answers) -> None:
    logging_data = {name: two[name][0]["logging"] for name in ("ddp", "static graph", "looked for", "bucket view")}
    assert {name: bool(each["find_unused_parameters"]) for name, each in logging_data.items()} == {
        "ddp": False,
        "static graph": False,
        "looked for": True,
        "bucket view": False,
    }
    assert [name for name, each in logging_data.items() if each.get("static_graph")] == ["static graph"]
    assert not two["ddp"][0]["shared storage"]
    assert two["bucket view"][0]["shared storage"], "gradients lie in their bucket"
    assert two["bucket view"][0]["shared after"] == [False, True] * STEPS, "once the window's last backward has run"


def test_a_gradient_that_a_hook_keeps_stays_unless_gradients_live_in_buckets(two: Answers) -> None:
    """As in one process, which is why `gradient_as_bucket_view` is not the default."""
    assert two.alone["kept"]
    assert [two[name][0]["kept"] for name in ("ddp", "bucket view")] == [True, False]


def test_gradients_in_buckets_take_no_more_memory_where_nothing_accumulates() -> None:
    for accumulation, kinds in ((1, set()), (2, {"gradient buckets"})):
        strategy = DDP(gradient_as_bucket_view=True)
        arguments: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 1, "progress": False}
        plan = Trainer(strategy=strategy, **arguments).plan(Tower(), rows(), batch_size=1)
        assert {kind for kind in plan["memory_per_rank"] if "bucket" in kind} == kinds


def test_a_run_on_three_ranks_resumes_exactly(tmp_path: Path) -> None:
    """How a sum over three ranks is rounded depends on where in its bucket an element lies."""
    for run in run_ranks(resumed, 3, tmp_path, "ddp"):
        assert same(run["straight"], run["halves"])


def test_a_small_bucket_holds_less(two: Answers) -> None:
    few, many = (
        [int(size) for size in two[name][0]["logging"]["rebuilt_bucket_sizes"].split(",")]
        for name in ("wide", "wide, small buckets")
    )
    assert sum(few) == sum(many)
    assert len(many) > len(few)


@pytest.mark.parametrize(("name", "dtype"), [("bf16 hook", torch.bfloat16), ("fp16 hook", torch.float16)])
def test_gradients_travel_in_half_precision(two: Answers, name: str, dtype: torch.dtype) -> None:
    for run, plain in zip(two[name], two["ddp"], strict=True):
        every = [g for step in run["gradients"] for g in step.values()]
        assert all(torch.equal(g, g.to(dtype).float()) for g in every)
        assert not all(torch.equal(g, g.to(dtype).float()) for g in plain["gradients"][0].values())
        assert_near(run, two.alone, 0.02)


# ------------------------------------------------------------------------------------------------- refusals


def test_options_that_cannot_work_are_refused_before_anything_is_built(two: Answers) -> None:
    (errors, _) = two["refused"]
    wanted = {
        "fsdp:param_dtype=bf16": "use precision='bf16', or leave param_dtype out",
        "fsdp:wrap=Missing": "the module has no Missing; it has Block, Linear",
        "fsdp:wrap=size:big": "give a number of parameters, for instance size:100M",
        "fsdp:shard=3": "shard=3: 3 is not a divisor of 2 processes",
        "fsdp:shard=rack": "give a number of ranks, 'node', or leave it out",
        "fsdp:accumulate=none": "give 'shards' or 'whole'",
        "fsdp:shard=1": "two ranks or more share a copy of the model",
        "fsdp:wrap=none,activation_checkpointing=true": "choose units with wrap=",
        "fsdp:reduce_dtype=int8": "give fp32, bf16, fp16 or leave it out",
        "ddp:static_graph=true,find_unused_parameters=true": "choose one",
        "ddp:communication_hook=zip": "give bf16, fp16 or leave it out",
        "ddp:communication_hook=powersgd": "PowerSGD is strategy='powersgd' of the package fabricate-powersgd",
        "ddp:find_unused_parameters=auto": "is not bool",
    }
    assert {text: message for text, message in errors.items() if wanted[text] not in message} == {}


def test_options_are_the_same_as_arguments_of_the_classes() -> None:
    assert FSDP(wrap="size:1.5K", shard=4, param_dtype="bf16").shard == 4
    assert DDP(communication_hook="bf16").communication_hook == "bf16"


def test_an_optimizer_that_takes_no_shards_is_refused_under_fsdp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it with the first optimizer
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(
        ConfigurationError, match=r"torch.optim.Adafactor \(optimizer 'main'\): this optimizer does not sup"
    ):
        FSDP().prepare_optimizers(layer, {"main": torch.optim.Adafactor(layer.parameters())})
    with pytest.raises(
        ConfigurationError, match=r"transformers.Adafactor \(optimizer 'main'\): this optimizer does not sup"
    ):
        FSDP().prepare_optimizers(layer, {"main": transformers.Adafactor(layer.parameters())})
    assert FSDP().prepare_optimizers(layer, {"main": torch.optim.AdamW(layer.parameters())}) is layer
