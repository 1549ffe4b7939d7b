"""The same training on one process, on replicas and on shards, compared with loops by hand in plain PyTorch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from fabricate import Callback, ConfigurationError, RankError, Trainer, TrainModule
from fabricate.testing import run_ranks

GLOBAL_BATCH, STEPS, MAX_GRAD_NORM, TOLERANCE = 12, 8, 0.5, 1e-5
WORLD_SIZE = {"single": 1, "ddp": 2, "fsdp": 2, "ddp on 3": 3, "fsdp on 3": 3}
Weights = dict[str, np.ndarray[Any, Any]]


# ------------------------------------------------------------------------------------------------- what is trained


class Regression(TrainModule):
    """Layers in a ModuleList, so that FSDP cuts it into several units; some have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 7), torch.nn.Linear(7, 2)])
        self.head = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch: Any) -> Any:
        return mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": mse_loss(self(batch[0]), batch[1]), "error": (self(batch[0]) - batch[1]).abs().mean()}


class Tagger(Regression):
    """Classes per token; -100 is padding, so that rows and whole micro-batches differ in what they weigh."""

    def __init__(self, as_number: bool) -> None:
        super().__init__()
        self.as_number = as_number
        self.head = torch.nn.Linear(2, 3)

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, labels = batch
        count = (labels != -100).sum()
        loss = cross_entropy(self(x).flatten(0, 1), labels.flatten())
        return {"loss": loss, "weight": int(count) if self.as_number else count}


class TaggerByNumber(Tagger):
    def __init__(self) -> None:
        super().__init__(as_number=True)


class TaggerByTensor(Tagger):
    def __init__(self) -> None:
        super().__init__(as_number=False)


class Branching(Regression):
    """A branch that only flagged rows use, and a layer that nothing uses: neither may move without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = torch.nn.Linear(4, 1)
        self.unused = torch.nn.Linear(3, 3)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        flagged = x[:, :1] > 0.8
        out = self(x)
        if flagged.any():
            out = out + torch.where(flagged, self.branch(x), 0.0)
        return mse_loss(out, y)


class Adversarial(TrainModule):
    """Two networks that take turns, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.nn.Linear(4, 4)
        self.critic = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def losses(self, batch: Any, turn: str) -> torch.Tensor:
        fake = self.generator(batch[0])
        if turn == "generator":
            return -self.critic(fake).mean() + 0.1 * fake.square().mean()
        return self.critic(fake.detach()).mean() - self.critic(batch[0] + 1).tanh().mean()

    def training_step(self, batch: Any) -> dict[str, Any]:
        turn = "critic" if self.trainer.step % 3 else "generator"
        return {"loss": self.losses(batch, turn), "optimizer": turn}

    def configure_optimizers(self) -> Any:
        return {
            "generator": torch.optim.Adam(self.generator.parameters(), lr=0.02),
            "critic": torch.optim.SGD(self.critic.parameters(), lr=0.02, momentum=0.9),
        }


def rows(number: int) -> TensorDataset:
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def tokens(number: int) -> TensorDataset:
    """Sentences of 0 to 4 tokens; those of rows 4 to 7 are empty, which is a whole micro-batch on one rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 4, 4, generator=generator)
    labels = torch.randint(0, 3, (number, 4), generator=generator)
    lengths = torch.randint(0, 5, (number,), generator=generator)
    lengths[4:8] = 0
    labels[torch.arange(4) >= lengths[:, None]] = -100
    return TensorDataset(x, labels)


# ------------------------------------------------------------------------------------------------- the loops by hand


def windows(data: TensorDataset) -> Iterator[list[torch.Tensor]]:
    while True:
        for start in range(0, len(data), GLOBAL_BATCH):
            yield [tensor[start : start + GLOBAL_BATCH] for tensor in data.tensors]


def by_hand(module: Any, data: TensorDataset) -> tuple[list[float], Weights]:
    """Whole global batches in one process and float32: no fabricate, no accumulation."""
    losses = []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)
    for _, batch in zip(range(STEPS), windows(data), strict=False):
        output = module.training_step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, whole(module)


def adversarial_by_hand(module: Any, data: TensorDataset) -> tuple[list[float], Weights]:
    losses = []
    networks = {"generator": module.generator, "critic": module.critic}
    optimizers = {
        "generator": torch.optim.Adam(module.generator.parameters(), lr=0.02),
        "critic": torch.optim.SGD(module.critic.parameters(), lr=0.02, momentum=0.9),
    }
    for step, batch in zip(range(STEPS), windows(data), strict=False):
        turn = "critic" if step % 3 else "generator"
        loss = module.losses(batch, turn)
        module.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(networks[turn].parameters(), MAX_GRAD_NORM)
        optimizers[turn].step()
        losses.append(loss.item())
    return losses, whole(module)


def whole(module: torch.nn.Module) -> Weights:
    """Every parameter as it is in one process. All ranks, because shards are gathered."""
    weights = {}
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        weights[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone().numpy()
    return weights


# ------------------------------------------------------------------------------------------------- the same by fabricate

MODULES: dict[str, tuple[Callable[[], TrainModule], Callable[[int], TensorDataset], Callable[..., Any], int]] = {
    # 23 rows: the second window of an epoch has 11; 25 rows: the third has 1, which two of three ranks do without.
    "regression": (Regression, rows, by_hand, 23),
    "more ranks than rows": (Regression, rows, by_hand, 25),
    "token weights as tensors": (TaggerByTensor, tokens, by_hand, 23),
    "token weights as numbers": (TaggerByNumber, tokens, by_hand, 25),
    "unused parameters": (Branching, rows, by_hand, 23),
    "two optimizers": (Adversarial, rows, adversarial_by_hand, 23),
}
CASES = {
    ("regression", strategy): WORLD_SIZE[strategy] for strategy in WORLD_SIZE
} | {
    (name, strategy): WORLD_SIZE[strategy]
    for name, strategies in {
        "more ranks than rows": ("single", "ddp", "ddp on 3", "fsdp on 3"),
        "token weights as tensors": ("single", "ddp", "fsdp", "ddp on 3"),
        "token weights as numbers": ("single", "ddp", "fsdp on 3"),
        "unused parameters": ("single", "ddp", "ddp on 3"),
        "two optimizers": ("single", "ddp", "fsdp"),
    }.items()
    for strategy in strategies
}  # fmt: skip


class Recorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))


def train(name: str, strategy: str) -> tuple[list[float], Weights]:
    build, data, _, number = MODULES[name]
    kind, world_size = strategy.split()[0], WORLD_SIZE[strategy]
    if kind == "ddp" and name in ("unused parameters", "two optimizers"):
        kind = "ddp:find_unused_parameters=true"
    torch.manual_seed(3)
    module, recorder = build(), Recorder()
    trainer = Trainer(
        strategy=kind,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        max_grad_norm=MAX_GRAD_NORM,
        progress=False,
        plugins=[recorder],
    )
    trainer.fit(module, data(number), batch_size=GLOBAL_BATCH // 2 // world_size, shuffle=False)
    return recorder.losses, whole(module)


def evaluate(strategy: str) -> dict[str, Any]:
    torch.manual_seed(3)
    trainer = Trainer(strategy=strategy, progress=False)
    module = Answering()
    results: dict[str, Any] = {"metrics": {n: trainer.validate(module, rows(n), batch_size=2) for n in (1, 5, 13)}}
    for kind in ("tensor", "mapping", "text"):
        module.kind = kind
        results[kind] = trainer.predict(module, rows(7), batch_size=2)
    return results


class Answering(Regression):
    kind = ""

    def predict_step(self, batch: Any) -> Any:
        first = batch[0][:, 0]
        if self.kind == "tensor":
            return self(batch[0]) * 0 + batch[0]
        if self.kind == "mapping":
            text = [f"{value:.3f}" for value in first.tolist()]
            return {"first": first, "positive": first > 0, "text": text, "time first": batch[0].T.contiguous().T}
        return [f"{value:.3f}" for value in first.tolist()]


class Noted(Regression):
    """Says which precision its steps really ran in."""

    autocast: bool | None = None

    def training_step(self, batch: Any) -> Any:
        self.autocast = torch.is_autocast_enabled("cpu")
        return super().training_step(batch)


def two_fits() -> list[Any]:
    """fp32 replicas, then bf16 shards, in one process."""
    fits: list[Any] = []
    for strategy, precision in (("ddp", "fp32"), ("fsdp", "bf16")):
        torch.manual_seed(3)
        module, recorder = Noted(), Recorder()
        trainer = Trainer(strategy=strategy, precision=precision, max_steps=4, progress=False, plugins=[recorder])
        trainer.fit(module, rows(24), batch_size=6, shuffle=False)
        sharded = any(hasattr(p, "full_tensor") for p in module.parameters())
        fits.append((sharded, module.autocast, recorder.losses))
    return fits


def two_fits_without_a_seed() -> list[int]:
    trainer = Trainer(max_steps=2, progress=False)
    return [trainer.fit(Regression(), rows(24), batch_size=6).steps for _ in range(2)]


class Raising(Regression):
    def training_step(self, batch: Any) -> Any:
        if self.trainer.step == 1:
            raise ValueError("wrong on every rank")
        return super().training_step(batch)


def left_behind() -> dict[str, Any]:
    """What a failed fit leaves, and whether the next one works."""
    environment = dict(os.environ)
    try:
        Trainer(strategy="ddp", max_steps=4, seed=1, progress=False).fit(Raising(), rows(24), batch_size=6)
    except ValueError as exception:
        failed = "".join(traceback.format_exception(exception))
    return {
        "failed": failed,
        "environment": os.environ == environment,
        "accelerate": [bool(PartialState._shared_state), bool(AcceleratorState._shared_state)],
        "steps": Trainer(strategy="fsdp", max_steps=4, seed=1, progress=False)
        .fit(Regression(), rows(24), batch_size=6)
        .steps,
    }


class Routing(Regression):
    """From its third update on, ranks go through different layers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)])

    def training_step(self, batch: Any) -> Any:
        chosen = self.trainer.accelerator.process_index if self.trainer.step >= 2 else 0
        return mse_loss(self.head(torch.tanh(self.blocks[chosen](batch[0]))), batch[1])


class RoutingWhereEvaluated(Regression):
    """In the last batch of an evaluation, ranks go through different layers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = self.trainer.accelerator.process_index if batch_idx == 3 else 0
        return {"loss": mse_loss(self.head(torch.tanh(self.blocks[chosen](batch[0]))), batch[1])}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step(batch, batch_idx)["loss"].expand(len(batch[0]))


def routed() -> list[str]:
    messages = []
    for module, stage in (
        (Routing(), "fit"),
        (RoutingWhereEvaluated(), "validate"),
        (RoutingWhereEvaluated(), "predict"),
    ):
        trainer = Trainer(strategy="fsdp", max_steps=4, seed=1, progress=False)
        with pytest.raises(RankError) as caught:
            getattr(trainer, stage)(module, rows(24), batch_size=3)
        messages.append(str(caught.value))
    return messages


def job(world_size: int) -> dict[Any, Any]:
    """Everything that ranks of one pool are asked for; an exception is one of the answers."""
    jobs: dict[Any, Callable[[], Any]] = {
        case: (lambda case=case: train(*case)) for case, needed in CASES.items() if needed == world_size
    }
    for strategy in ("single",) if world_size == 1 else ("ddp", "fsdp"):
        jobs["evaluation", strategy] = lambda strategy=strategy: evaluate(strategy)
    if world_size == 2:
        jobs |= {
            "failure": left_behind,
            "routed": routed,
            "two fits": two_fits,
            "two fits without a seed": two_fits_without_a_seed,
        }
    results = {}
    for key, run in jobs.items():
        try:
            results[key] = run()
        except Exception as exception:
            results[key] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def answers() -> dict[int, list[dict[Any, Any]]]:
    """By world size, what each rank answered."""
    return {1: [job(1)], 2: run_ranks(job, 2, 2), 3: run_ranks(job, 3, 3)}


def answer(answers: dict[int, list[dict[Any, Any]]], world_size: int, key: Any) -> list[Any]:
    """One entry per rank; what a rank raised fails the test."""
    by_rank = [rank[key] for rank in answers[world_size]]
    for each in by_rank:
        if isinstance(each, str):
            pytest.fail(each, pytrace=False)
    return by_rank


# ------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=[f"{name}, {strategy}" for name, strategy in CASES])
def test_losses_and_weights_are_those_of_a_loop_written_by_hand(
    answers: dict[int, list[dict[Any, Any]]], name: str, strategy: str
) -> None:
    build, data, loop, number = MODULES[name]
    torch.manual_seed(3)
    wanted_losses, wanted = loop(build(), data(number))
    for losses, weights in answer(answers, WORLD_SIZE[strategy], (name, strategy)):
        np.testing.assert_allclose(losses, wanted_losses, rtol=TOLERANCE)
        assert weights.keys() == wanted.keys()
        for parameter, value in wanted.items():
            difference = np.linalg.norm(weights[parameter] - value) / np.linalg.norm(value)
            assert difference < TOLERANCE, parameter


def test_the_loop_by_hand_sees_what_the_tests_are_about() -> None:
    torch.manual_seed(3)
    module = Branching()
    _, after = by_hand(module, rows(23))
    torch.manual_seed(3)
    before = whole(Branching())
    assert np.array_equal(after["unused.weight"], before["unused.weight"])
    assert not np.array_equal(after["branch.weight"], before["branch.weight"])
    flagged = [bool((batch[0][:, 0] > 0.8).any()) for _, batch in zip(range(2), windows(rows(23)), strict=False)]
    micro = [bool((rows(23).tensors[0][i : i + 3, 0] > 0.8).any()) for i in range(0, 23, 3)]
    assert any(flagged)
    assert len(set(micro)) == 2, "some micro-batches use the branch and others do not"
    counts = (tokens(23).tensors[1] != -100).sum(1)
    assert len(set(counts.tolist())) > 3
    assert counts[4:6].sum() == 0, "a micro-batch without tokens"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_evaluation_is_over_exactly_the_data_set(
    answers: dict[int, list[dict[Any, Any]]], strategy: str, world_size: int
) -> None:
    (alone,) = answer(answers, 1, ("evaluation", "single"))
    torch.manual_seed(3)
    module = Regression()
    with torch.no_grad():
        by_hand = {n: float(mse_loss(module(rows(n).tensors[0]), rows(n).tensors[1])) for n in (1, 5, 13)}
    for evaluation in answer(answers, world_size, ("evaluation", strategy)):
        for number, metrics in evaluation["metrics"].items():
            assert metrics.keys() == {"val_loss", "val_error"}
            assert alone["metrics"][number] == pytest.approx(metrics, rel=1e-6)
    assert {n: alone["metrics"][n]["val_loss"] for n in by_hand} == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3)])
def test_predictions_come_once_per_sample_in_order_on_rank_0(
    answers: dict[int, list[dict[Any, Any]]], strategy: str, world_size: int
) -> None:
    x = rows(7).tensors[0]
    texts = [f"{value:.3f}" for value in x[:, 0].tolist()]
    first, *others = answer(answers, world_size, ("evaluation", strategy))
    assert torch.equal(torch.stack(first["tensor"]), x)
    assert first["text"] == texts
    assert [row["text"] for row in first["mapping"]] == texts
    assert torch.equal(torch.stack([row["first"] for row in first["mapping"]]), x[:, 0])
    assert torch.equal(torch.stack([row["time first"] for row in first["mapping"]]), x)
    assert [bool(row["positive"]) for row in first["mapping"]] == (x[:, 0] > 0).tolist()
    assert first["mapping"][0]["positive"].dtype == torch.bool
    for predictions in others:
        assert [predictions[kind] for kind in ("tensor", "mapping", "text")] == [None] * 3


def test_two_fits_of_one_process_have_their_own_strategy_and_precision(
    answers: dict[int, list[dict[Any, Any]]],
) -> None:
    for first, second in answer(answers, 2, "two fits"):
        assert first[:2] == (False, False)
        assert second[:2] == (True, True)
        assert second[2] == pytest.approx(first[2], rel=0.05), "bf16 is near"
        assert second[2] != first[2], "and not the same"


def test_ranks_agree_on_a_seed_that_nobody_gave_in_every_fit(answers: dict[int, list[dict[Any, Any]]]) -> None:
    assert answer(answers, 2, "two fits without a seed") == [[2, 2], [2, 2]]


def test_a_failed_fit_on_two_ranks_leaves_nothing_and_the_next_one_works(
    answers: dict[int, list[dict[Any, Any]]],
) -> None:
    for outcome in answer(answers, 2, "failure"):
        assert "ValueError: wrong on every rank" in outcome.pop("failed")
        assert outcome == {"environment": True, "accelerate": [False, False], "steps": 4}


def test_shards_that_went_different_ways_are_an_error_on_every_rank(
    answers: dict[int, list[dict[Any, Any]]],
) -> None:
    for in_fit, *in_evaluations in answer(answers, 2, "routed"):
        assert in_fit.startswith("ranks ran different layers in the update to step 3")
        assert "or use strategy='ddp'" in in_fit
        assert [message.partition(",")[0] for message in in_evaluations] == [
            "ranks ran different layers in this evaluation (validate)",
            "ranks ran different layers in this evaluation (predict)",
        ]


class Asked(TrainModule):
    """A hook runs the model once more after an evaluation, and then changes a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.scale

    def training_step(self, batch: Any) -> Any:
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def on_eval_end(self, trainer: Trainer) -> None:
        answer = trainer.in_forward(lambda: self(torch.ones(1, 4)))
        self.answers = [*getattr(self, "answers", []), answer.item()]
        with torch.no_grad():
            self.scale.mul_(0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ask(strategy: str, run_dir: str) -> list[float]:
    torch.manual_seed(0)
    module, data = Asked(), rows(8)
    trainer = Trainer(
        strategy=strategy, max_steps=3, validate_every=1, save_every=1, run_dir=run_dir, seed=0, progress=False
    )
    trainer.fit(module, data, data, batch_size=4)
    return module.answers


def test_a_hook_that_runs_the_model_leaves_shards_that_are_saved_and_changed(tmp_path: Path) -> None:
    wanted, sharded = (run_ranks(ask, 2, name, str(tmp_path / name))[0] for name in ("ddp", "fsdp"))
    assert len(sharded) == 3
    assert sharded == pytest.approx(wanted)


class Measured(Regression):
    """Logs norms of weights and gradients, in hooks and in a step, where FSDP has shards."""

    logged: dict[str, float]

    def training_step(self, batch: Any) -> Any:
        self.log("in_step", self.head.weight.norm())
        return super().training_step(batch)

    def on_before_step(self) -> None:
        self.log("gradient", self.blocks[0].weight.grad.norm())
        self.log("largest", self.blocks[0].weight.grad.abs().max())

    def on_step(self) -> None:
        self.log("weight", self.blocks[0].weight.norm())
        self.log("squares", sum(p.square().sum() for p in self.parameters()))

    def on_log(self, metrics: dict[str, float]) -> None:
        self.logged = dict(metrics)


class ReadsNumbers(Regression):
    def __init__(self, read: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.read = read

    def on_step(self) -> None:
        self.read(self.blocks[0].weight.norm())


def measure(strategy: str) -> dict[str, float]:
    torch.manual_seed(0)
    module = Measured()
    Trainer(strategy=strategy, precision="fp32", max_steps=2, log_every=1, progress=False, seed=3).fit(
        module, rows(24), batch_size=6
    )
    return module.logged


def measured() -> tuple[list[dict[str, float]], list[str]]:
    logged, errors = [measure(strategy) for strategy in ("ddp", "fsdp")], []
    for read in (float, torch.Tensor.item, "{:.3f}".format, torch.Tensor.tolist):
        with pytest.raises(ConfigurationError) as caught:
            Trainer(strategy="fsdp", max_steps=1, progress=False).fit(ReadsNumbers(read), rows(24), batch_size=6)
        errors.append(str(caught.value))
    Trainer(strategy="fsdp", max_steps=1, progress=False).fit(
        ReadsNumbers(lambda norm: float(norm.full_tensor())), rows(24), batch_size=6
    )
    return logged, errors


def test_norms_of_shards_are_logged_as_those_of_whole_tensors_and_not_read_in_part() -> None:
    for (replicas, shards), errors in run_ranks(measured, 2):
        assert {"in_step", "gradient", "largest", "weight", "squares"} <= set(shards)
        assert shards == pytest.approx(replicas, rel=1e-5)
        assert len(errors) == 4
        for text in errors:
            assert "this rank has only its part of the value. Call .full_tensor() first, on all ranks" in text
