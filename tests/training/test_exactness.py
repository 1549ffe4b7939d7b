"""The batch size has its exact meaning: models of transformers, clipping, schedulers and precision, compared with loops by hand."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optimi
import pytest
import torch
import transformers

from fabricate import Callback, ConfigurationError, Single, Trainer, TrainModule
from fabricate.testing import run_ranks

ROWS, TOKENS, GLOBAL_BATCH, STEPS = 13, 6, 8, 4
Batch = dict[str, torch.Tensor]
Weights = dict[str, np.ndarray[Any, Any]]
Case = tuple[str, str, int]
"""What is trained, the strategy, the number of ranks."""


class Recorder(Callback):
    """The losses and norms that hooks were given."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self.losses.append(float(loss))
        self.norms.append(float(grad_norm))


def whole(module: torch.nn.Module) -> Weights:
    """Every parameter as it is in one process. All ranks, because shards are gathered."""
    weights = {}
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        weights[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone().numpy()
    return weights


# ------------------------------------------------------------------------------------------- models of transformers

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> Any:
    """Shifts: the first label of a row counts for nothing."""
    config = transformers.GPT2Config(
        n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def t5() -> Any:
    """Does not shift, though its name says ForConditionalGeneration as those of models that do."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16,
            d_ff=16,
            d_kv=8,
            num_layers=1,
            num_heads=2,
            vocab_size=32,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def masked() -> Any:
    """Does not shift."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **QUIET))


def classifier() -> Any:
    """One label per row."""
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **QUIET, num_labels=3))


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "t5": t5, "masked": masked, "classifier": classifier}


def rows(model: str) -> list[Batch]:
    """Rows with 0 to 6 labels; where causal models shift, the first of them is lost. Rows 4 to 7 have none: on two ranks two
    whole micro-batches, on one rank four."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 32, (ROWS, TOKENS), generator=generator)
    if model == "classifier":
        labels = torch.randint(0, 3, (ROWS,), generator=generator)
        labels[[1, 5, 6]] = -100
    else:
        lengths = torch.randint(0, TOKENS + 1, (ROWS,), generator=generator)
        lengths[4:8] = 0
        labels = torch.where(torch.arange(TOKENS) < lengths[:, None], tokens, -100)
    return [{"input_ids": each, "labels": label} for each, label in zip(tokens, labels, strict=True)]


class Wrapped(TrainModule):
    """Nothing but the model's own loss."""

    def __init__(self, model: str) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.model = MODELS[model]()

    def training_step(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"loss": self.model(**batch).loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Not Adam: where a gradient is nothing but rounding (a key's bias under softmax) it makes steps of that.
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def windows(data: list[Batch]) -> Iterator[Batch]:
    while True:
        for start in range(0, len(data), GLOBAL_BATCH):
            yield torch.utils.data.default_collate(data[start : start + GLOBAL_BATCH])


def model_by_hand(name: str) -> tuple[list[float], Weights, float]:
    """Whole global batches in one process: the model's own mean is over the labels of all of them."""
    module = Wrapped(name)
    optimizer, losses = module.configure_optimizers(), []
    for _, batch in zip(range(STEPS), windows(rows(name)), strict=False):
        loss = module.training_step(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        final = module.eval().training_step(torch.utils.data.default_collate(rows(name)))
    return losses, whole(module), float(final)


def model_by_fabricate(name: str, strategy: str, world_size: int) -> tuple[list[float], Weights, float]:
    module, recorder = Wrapped(name), Recorder()
    trainer = Trainer(
        strategy=strategy,
        precision="fp32",
        max_steps=STEPS,
        global_batch_size=GLOBAL_BATCH if world_size < 3 else 9,
        max_grad_norm=0.5,
        progress=False,
        plugins=[recorder],
    )
    metrics = trainer.fit(module, rows(name), rows(name), batch_size=4 // world_size, shuffle=False).metrics
    return recorder.losses, whole(module), metrics["val_loss"]


MODEL_CASES = [
    (name, strategy, world_size) for name in MODELS for strategy, world_size in (("single", 1), ("ddp", 2), ("fsdp", 2))
]


# --------------------------------------------------------------------------------------------- clipping, not a number


class Steep(TrainModule):
    """Gradients of very different sizes, in several units for shards. `broken`: the update in which one row is infinite."""

    def __init__(self, broken: int = -1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)])
        self.head = torch.nn.Linear(2, 1)
        self.broken = broken

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return torch.nn.functional.mse_loss(10 * self.head(x), y)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if self.trainer.step + self.trainer.progress.skipped == self.broken:
            y = torch.where(y == STEEP_Y[1], float("inf"), y)  # the second row of a window, which one rank has
        return self.loss(x, y)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, str]:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9), "linear"


STEEP_X = torch.randn(8, 3, generator=torch.Generator().manual_seed(8))
STEEP_Y = STEEP_X.exp().sum(1, keepdim=True)
MAX_GRAD_VALUE = 0.5


def clipped_by_hand() -> tuple[list[float], Weights, float]:
    """By value; the norms are those before. The last answer is the share of elements that were clipped."""
    module, norms, clipped = Steep(), [], []
    optimizer, _ = module.configure_optimizers()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / STEPS)
        module.loss(STEEP_X, STEEP_Y).backward()
        every = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        norms.append(float(every.norm()))
        clipped.append((every.abs() > MAX_GRAD_VALUE).float().mean())
        torch.nn.utils.clip_grad_value_(module.parameters(), MAX_GRAD_VALUE)
        optimizer.step()
        optimizer.zero_grad()
    return norms, whole(module), float(torch.stack(clipped).mean())


def steep_by_fabricate(kind: str, strategy: str, world_size: int) -> tuple[list[float], Weights, list[tuple[int, str]]]:
    skips: list[tuple[int, str]] = []

    class Skips(Callback):
        def on_step_skipped(self, step: int, reason: str) -> None:
            skips.append((step, reason))

    module, recorder = Steep(broken=2 if kind == "not a number" else -1), Recorder()
    clip = {"max_grad_value": MAX_GRAD_VALUE} if kind == "by value" else {"nonfinite": "skip"}
    trainer = Trainer(
        strategy=strategy,
        precision="fp32",
        max_steps=STEPS,
        global_batch_size=8,
        progress=False,
        plugins=[recorder, Skips()],
        **clip,  # type: ignore[arg-type]
    )
    data = torch.utils.data.TensorDataset(STEEP_X, STEEP_Y)
    trainer.fit(module, data, batch_size=4 // world_size, shuffle=False)
    return recorder.norms, whole(module), skips


STEEP_CASES = [
    (kind, strategy, world_size)
    for kind in ("by value", "not a number")
    for strategy, world_size in (("single", 1), ("ddp", 2), ("fsdp", 2))
]


# ----------------------------------------------------------------------------------------------------------- precision


class Built(TrainModule):
    """Built on the meta device, so that shards get their first values in the dtype that the precision chose."""

    def configure_model(self) -> None:
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)])

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.blocks[1](torch.tanh(self.blocks[0](batch[0]))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimi.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)


def precision_by_fabricate(
    precision: str, strategy: str, world_size: int, directory: Path
) -> tuple[list[float], dict[str, Any]]:
    recorder = Recorder()
    trainer = Trainer(
        strategy=strategy,
        precision=precision,
        max_steps=STEPS,
        seed=9,
        run_dir=directory,
        save_every=None,
        progress=False,
        plugins=[recorder],
    )
    data = torch.utils.data.TensorDataset(STEEP_X, STEEP_Y)
    trainer.fit(Built(), data, batch_size=8 // world_size, shuffle=False)
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    observed = next(line for line in lines if line["event"] == "observed")
    settings = json.loads((directory / "plan.json").read_text())["settings"]
    return recorder.losses, observed | {"planned": settings.get("gradients", {}).get("value")}


PRECISION_CASES = [
    (precision, strategy, world_size)
    for precision in ("fp32", "bf16", "bf16-true")
    for strategy, world_size in (("single", 1), ("ddp", 2), ("fsdp", 2))
]


# --------------------------------------------------------------------------------------------------- what ranks run


def job(world_size: int, directory: Path) -> dict[Case, Any]:
    """Everything that the ranks of one pool are asked for; an exception is one of the answers."""
    results: dict[Case, Any] = {}
    every: tuple[tuple[list[Case], Callable[..., Any]], ...] = (
        (MODEL_CASES, model_by_fabricate),
        (STEEP_CASES, steep_by_fabricate),
        (PRECISION_CASES, lambda *case: precision_by_fabricate(*case, directory / "-".join(map(str, case)))),
    )
    for cases, run in every:
        for case in cases:
            if case[2] == world_size:
                try:
                    results[case] = run(*case)
                except Exception as exception:
                    results[case] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Case, Any]]]:
    """By world size, what each rank answered."""
    directory = tmp_path_factory.mktemp("runs")
    return {1: [job(1, directory)], 2: run_ranks(job, 2, 2, directory)}


def answer(answers: dict[int, list[dict[Case, Any]]], case: Case) -> list[Any]:
    """One entry per rank; what a rank raised fails the test."""
    by_rank = [rank[case] for rank in answers[case[2]]]
    for each in by_rank:
        if isinstance(each, str):
            pytest.fail(each, pytrace=False)
    return by_rank


def distance(weights: Weights, wanted: Weights) -> float:
    assert weights.keys() == wanted.keys()
    return float(np.sqrt(sum(np.square(weights[name] - wanted[name], dtype=np.float64).sum() for name in wanted)))


@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_a_transformers_model_trains_as_on_whole_batches_without_a_word_about_weights(
    answers: dict[int, list[dict[Case, Any]]], case: Case
) -> None:
    wanted_losses, wanted, wanted_final = model_by_hand(case[0])
    for losses, weights, final in answer(answers, case):
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
        assert distance(weights, wanted) < 1e-5 * distance(wanted, whole(Wrapped(case[0]))), "of the way they went"
        assert final == pytest.approx(wanted_final, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_of_the_transformers_models_have_different_numbers_of_labels(name: str) -> None:
    batches = [torch.utils.data.default_collate(rows(name)[start : start + 2]) for start in range(0, ROWS, 2)]
    counts = [int((batch["labels"][..., name == "gpt2" :] != -100).sum()) for batch in batches]
    assert len(set(counts)) > 1
    if name != "classifier":
        assert 0 in counts


@pytest.mark.parametrize("case", [case for case in STEEP_CASES if case[0] == "by value"], ids=str)
def test_clipping_by_value_clips_every_element_of_the_global_gradient_once(
    answers: dict[int, list[dict[Case, Any]]], case: Case
) -> None:
    wanted_norms, wanted, share = clipped_by_hand()
    assert 0.1 < share < 0.9, "some elements are clipped and some are not"
    for norms, weights, skips in answer(answers, case):
        np.testing.assert_allclose(norms, wanted_norms, rtol=1e-5)
        assert distance(weights, wanted) < 1e-5 * distance(wanted, whole(Steep()))
        assert not skips


def test_a_strategy_that_keeps_gradients_to_itself_refuses_clipping_by_value() -> None:
    class Closed(Single):
        name = "closed"
        exposes_gradients = False

    with pytest.raises(
        ConfigurationError,
        match=r"max_grad_value=1: strategy='closed' does not give access to gradients.*use max_grad_norm=",
    ):
        Trainer(strategy=Closed(), max_steps=1, max_grad_value=1).plan(Steep())


def test_clipping_by_value_and_a_launcher_that_clips_by_norm_are_two_requests() -> None:
    class Clips(Single):
        def asks(self) -> dict[str, tuple[float, str]]:
            return {"max_grad_norm": (1.0, "its file")}

    with pytest.raises(
        ConfigurationError, match=r"max_grad_value=2 is set in the Trainer and max_grad_norm=1.0 by its file"
    ):
        Trainer(strategy=Clips(), max_steps=1, max_grad_value=2).plan(Steep())


@pytest.mark.parametrize("case", [case for case in STEEP_CASES if case[0] == "not a number"], ids=str)
def test_an_update_that_one_rank_spoils_is_skipped_on_all(
    answers: dict[int, list[dict[Case, Any]]], case: Case
) -> None:
    (_, wanted, _), *_ = answer(answers, ("not a number", "single", 1))
    for norms, weights, skips in answer(answers, case):
        assert skips == [(2, "non-finite gradients")]
        assert len(norms) == STEPS
        assert np.isfinite(norms).all()
        assert distance(weights, wanted) < 1e-5 * distance(wanted, whole(Steep()))


@pytest.mark.parametrize("case", PRECISION_CASES, ids=str)
def test_a_precision_is_in_effect_under_every_strategy(answers: dict[int, list[dict[Case, Any]]], case: Case) -> None:
    precision, _, world_size = case
    (wanted, _), *_ = answer(answers, ("fp32", "single", 1))
    for losses, _ in answer(answers, case):
        np.testing.assert_allclose(losses, wanted, rtol=1e-5 if precision == "fp32" else 0.02)
        assert precision == "fp32" or losses != wanted
    observed = answer(answers, case)[0][1]
    dtypes = ["bfloat16" if precision == "bf16-true" else "float32"]
    assert list(observed["activations"]) == ["float32" if precision == "fp32" else "bfloat16"]
    assert [observed[topic] for topic in ("parameters", "gradients", "optimizer_state")] == [dtypes] * 3
    assert observed.get("averaged_over_ranks_in") == (dtypes if world_size > 1 else None)
    if case[1] == "fsdp":
        planned = "in float32" if precision == "bf16" else "as they are"
        assert observed["planned"] == f"averaged {planned}, per micro-batch"
