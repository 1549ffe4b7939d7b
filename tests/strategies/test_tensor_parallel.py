"""fsdp:tp=2, on two ranks (layers divided, no shards) and on four (both): the numbers of one process, each row once, any strategy's
checkpoints; and refusals before the first step."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset

from campaigns.checkpoints.pairs import equal, state
from fabricate import Callback, ConfigurationError, RankError, Trainer, TrainModule
from fabricate.testing import run_ranks

ROWS, GLOBAL_BATCH, STEPS, SAVED, MAX_GRAD_NORM, TOLERANCE = 32, 8, 5, 3, 0.5, 1e-5
SHAPE = {
    "vocab_size": 54, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
TIED = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
UNEVEN = {"vocab_size": 55, "tie_word_embeddings": True, "pad_token_id": 54}
DROPOUT = {"attention_dropout": 0.3}
OPTIONS = ("offload=cpu,accumulate=whole", "activation_checkpointing=true,reshard_after_forward=false")


class Rows(Dataset[Any]):
    """Sequences of which unequal parts are labels."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 54, (9,), generator=torch.Generator().manual_seed(row))
        labels = tokens.clone()
        labels[9 - 5 * row % 7 :] = -100
        return {"input_ids": tokens, "labels": labels}


class Torn(IterableDataset[Any]):
    """Rows that are the same on every rank in the first update, and then others."""

    def __iter__(self) -> Iterator[Any]:
        for row in itertools.count():
            own = torch.distributed.get_rank() * (row >= GLOBAL_BATCH)
            generator = torch.Generator().manual_seed(1000 * own + row)
            yield {"input_ids": (tokens := torch.randint(0, 54, (9,), generator=generator)), "labels": tokens}


class Net(TrainModule):
    """A Llama with grouped heads. Counts what it is shown with a torchmetrics object."""

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        import torchmetrics

        self.changed = changed
        self.shown = torchmetrics.SumMetric()

    def configure_model(self) -> None:
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SHAPE | self.changed)))

    def training_step(self, batch: Any) -> torch.Tensor:
        self.log("rows", len(batch["labels"]), reduce="sum")
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Any) -> dict[str, Any]:
        self.shown.update(float(len(batch["labels"])))
        self.log("shown", self.shown)
        return {"loss": self.model(**batch).loss}

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"]).logits[:, -1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Watch(Callback):
    """Losses and norms, the weights before and after, how much of them is here; saves what was loaded once more."""

    def __init__(self, again: Path | None) -> None:
        self.again = again
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.metrics: dict[str, float] = {}
        self.before: dict[str, torch.Tensor] = {}
        self.after: dict[str, torch.Tensor] = {}
        self.share: dict[str, float] = {}
        self.counted: tuple[float, float] = (0, 0)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.before = {n: trainer.strategy.gather(p).clone() for n, p in module.named_parameters()}

    def on_epoch_start(self, trainer: Trainer) -> None:
        if self.again is not None:
            trainer.save(self.again)
            self.again = None

    def on_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self.losses.append(float(loss))
        self.norms.append(float(grad_norm))

    def on_log(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.counted = (trainer.progress.samples, trainer.progress.tokens)
        for name, parameter in module.named_parameters():
            self.after[name] = trainer.strategy.gather(parameter).clone()
            average = trainer.strategy.optimizer_state(trainer.optimizers["main"], parameter)["exp_avg"]
            here = [part.memory.numel() for part in (trainer.strategy.local_part(parameter), average)]
            self.share[name] = max(here) / self.after[name].numel()


def train(
    strategy: str,
    readers: int,
    *,
    changed: dict[str, Any] | None = None,
    again: Path | None = None,
    resume: Any = "auto",
    data: Any = None,
    **options: Any,
) -> tuple[Trainer, Net, dict[str, Any]]:
    """One fit on one of the ranks, whose rows `readers` read, and what it left."""
    watch, module = Watch(again), Net(**(changed or {}))
    chosen = {"max_steps": STEPS, "seed": 3, "max_grad_norm": MAX_GRAD_NORM, "log_every": "5 steps"} | options
    trainer = Trainer(strategy=strategy, plugins=[watch], gradient_accumulation_steps=2, progress=False, **chosen)
    shuffle = False if data is None else None
    trainer.fit(module, data or Rows(), batch_size=GLOBAL_BATCH // 2 // readers, shuffle=shuffle, resume=resume)
    answers = dict(vars(watch)) | {
        "plan": trainer.plan(Net(**(changed or {})), Rows(), batch_size=1).to_json()["settings"]
    }
    for name in ("before", "after"):
        answers[name] = {n: t.numpy() for n, t in answers[name].items()}
    return trainer, module, answers


def refused(strategy: str, readers: int, **options: Any) -> str:
    try:
        train(strategy, readers, **options)
    except (ConfigurationError, RankError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "runs"


def by_hand(before: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The same training in plain PyTorch, in one process, from the weights `before`."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SHAPE | changed)))
    model.load_state_dict({n.removeprefix("model."): torch.tensor(v) for n, v in before.items()}, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms, tokens = [], [], 0
    for step in range(STEPS):
        rows = [Rows()[(step * GLOBAL_BATCH + n) % ROWS] for n in range(GLOBAL_BATCH)]
        labels = torch.stack([row["labels"] for row in rows])[:, 1:]
        logits = model(input_ids=torch.stack([row["input_ids"] for row in rows])).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        tokens += int((labels != -100).sum())
    after = {f"model.{n}": p.detach().numpy() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "tokens": tokens, "after": after}


def beside(
    strategy: str, readers: int, changed: dict[str, Any] | None = None, **options: Any
) -> tuple[Trainer, Net, Any]:
    """A fit, and the same by hand."""
    trainer, module, answers = train(strategy, readers, changed=changed, **options)
    return trainer, module, answers | {"by hand": by_hand(answers["before"], changed or {})}


def shown(trainer: Trainer, module: Net) -> dict[str, Any]:
    """Metrics and predictions over rows that two readers do not divide evenly."""
    data = torch.utils.data.Subset(Rows(), range(13))
    metrics = trainer.validate(module, data, batch_size=2)
    predictions = trainer.predict(module, data, batch_size=2)
    return {"metrics": metrics, "predictions": None if predictions is None else torch.stack(predictions).numpy()}


def checkpoint(root: Path) -> Path:
    return root / "four" / "checkpoints" / f"step-{SAVED:08d}"


def on_four_ranks(root: Path) -> dict[str, Any]:
    saving = {"save_every": f"{SAVED} steps", "keep": "all"}
    trainer, module, fit = beside("fsdp:tp=2", 2, run_dir=root / "four", **saving)
    answers = {"fit": fit, "shown": shown(trainer, module)}
    straight = train("fsdp:tp=2", 2, changed=DROPOUT, run_dir=root / "straight", **saving)[2]
    train("fsdp:tp=2", 2, changed=DROPOUT, run_dir=root / "halves", max_steps=2, **saving)
    halves = train("fsdp:tp=2", 2, changed=DROPOUT, run_dir=root / "halves", **saving)[2]
    answers |= {"straight": straight, "halves": halves}
    for options in OPTIONS:
        answers[options] = beside(f"fsdp:tp=2,{options}", 2)[2]
    answers["tied"] = beside("fsdp:tp=2", 2, TIED)[2]
    answers["torn"] = refused("fsdp:tp=2", 2, data=Torn(), log_every="1 step")
    return answers


def on_two_ranks(root: Path) -> dict[str, Any]:
    answers = {"alone": beside("fsdp:tp=2", 1)[2]}
    for name, changed in {"tied": TIED, "uneven": UNEVEN}.items():
        answers[name] = beside("fsdp:tp=2", 1, changed, run_dir=root / name)[2]
    for strategy in ("ddp", "fsdp", "zero3"):
        answers[strategy] = train(
            strategy, 2, run_dir=root / strategy, again=root / strategy / "again", resume=checkpoint(root)
        )[2]
    return answers


def back_on_four(root: Path) -> tuple[list[float], dict[str, float]]:
    where = root / "back"
    answers = train("fsdp:tp=2", 2, run_dir=where, again=where / "again", resume=root / "zero3" / "again")[2]
    return answers["losses"], answers["metrics"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def four(root: Path) -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4, root, timeout=900)


@pytest.fixture(scope="module")
def two(four: list[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, root, timeout=900)


def compare(answers: dict[str, Any]) -> None:
    wanted = answers["by hand"]
    np.testing.assert_allclose(answers["losses"], wanted["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose(answers["norms"], wanted["norms"], rtol=TOLERANCE)
    assert answers["after"].keys() == wanted["after"].keys()
    for name, weight in wanted["after"].items():
        np.testing.assert_allclose(answers["after"][name], weight, atol=TOLERANCE, err_msg=name)
    assert answers["counted"] == (STEPS * GLOBAL_BATCH, wanted["tokens"])
    assert answers["metrics"]["rows"] == STEPS * GLOBAL_BATCH


def test_two_ranks_that_divide_layers_train_as_one_process(two: list[dict[str, Any]], root: Path) -> None:
    for name in ("alone", "tied", "uneven"):
        for rank in two:
            compare(rank[name])
    share = two[0]["alone"]["share"]
    assert {share[n] for n in share if "norm" not in n} == {0.5}
    assert {share[n] for n in share if "norm" in n} == {1.0}
    assert two[0]["uneven"]["share"]["model.model.embed_tokens.weight"] == 1.0
    layers = json.loads((root / "uneven" / "plan.json").read_text())["settings"]["layers"]["value"]
    assert "q_proj, k_proj, v_proj, gate_proj, up_proj by rows of the weight; o_proj, down_proj by columns" in layers
    assert (
        "model.model.embed_tokens whole, because it has a padding_idx; model.lm_head whole, because 2 does not divide"
        in layers
    )


def test_four_ranks_that_divide_layers_and_keep_shards_train_as_one_process(four: list[dict[str, Any]]) -> None:
    for rank in four:
        for name in ("fit", "tied", *OPTIONS):
            compare(rank[name])
    share = four[0]["fit"]["share"]
    assert max(share[n] for n in share if "norm" not in n) <= 14 / 54  # of the embedding's 54 rows, in halves of 27
    assert {share[n] for n in share if "norm" in n} == {0.5}
    assert four[0]["tied"]["share"].keys().isdisjoint({"model.lm_head.weight"})
    plan = four[0]["fit"]["plan"]
    assert (plan["global_batch_size"]["value"], plan["global_batch_size"]["source"]) == (4, "1 x 2 x 2")


def test_rows_that_several_ranks_read_count_once_in_metrics_and_predictions(four: list[dict[str, Any]]) -> None:
    trainer, module, _ = train("single", 1)
    wanted = shown(trainer, module)
    for rank in four:
        assert rank["shown"]["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4)
        assert rank["shown"]["metrics"]["val_shown"] == 13
    assert [rank["shown"]["predictions"] is None for rank in four] == [False, True, True, True]
    np.testing.assert_allclose(four[0]["shown"]["predictions"], wanted["predictions"], atol=1e-4)


def test_a_resume_on_the_same_ranks_is_exact_with_dropout(four: list[dict[str, Any]]) -> None:
    for rank in four:
        straight, halves = rank["straight"], rank["halves"]
        assert straight["losses"][2:] == halves["losses"]
        assert straight["losses"] != rank["fit"]["losses"]
        for name, weight in straight["after"].items():
            assert np.array_equal(weight, halves["after"][name]), name


def test_every_strategy_goes_on_from_its_checkpoint_and_it_from_theirs(
    four: list[dict[str, Any]], two: list[dict[str, Any]], root: Path
) -> None:
    single = train("single", 1, run_dir=root / "single", again=root / "single" / "again", resume=checkpoint(root))[2]
    back, metrics = run_ranks(back_on_four, 4, root, timeout=900)[0]
    assert metrics["rows"] == STEPS * GLOBAL_BATCH  # also the rows before the save, which other ranks read
    losses = {name: two[0][name]["losses"] for name in ("ddp", "fsdp", "zero3")} | {
        "single": single["losses"],
        "back": back,
    }
    wanted = state(checkpoint(root))
    for name, curve in losses.items():
        np.testing.assert_allclose(curve, four[0]["fit"]["losses"][SAVED:], rtol=TOLERANCE, err_msg=name)
        again = state(root / name / "again")
        assert [key for key in sorted({*wanted, *again}) if not equal(wanted.get(key), again.get(key))] == [], name


def test_transformers_reads_what_was_exported(four: list[dict[str, Any]], root: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(root / "four" / "model")
    for name, weight in model.named_parameters():
        assert np.array_equal(weight.detach().numpy(), four[0]["fit"]["after"][f"model.{name}"]), name


def test_ranks_that_share_a_model_and_read_other_rows_are_told(four: list[dict[str, Any]]) -> None:
    wanted = (
        r"RankError: ranks 0 and 1 share one copy of the model, but the mean of 'loss' since the last log boundary is .* "
        r"they read different rows"
    )
    assert [re.match(wanted, rank["torn"]) is not None for rank in four] == [True] * 4, four[0]["torn"]


class Replaced(Net):
    """With one layer exchanged, or another plan."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        super().configure_model()
        attention: Any = self.model.model.layers[1].self_attn
        if self.how == "style":
            self.model.tp_plan = {"model.layers.*.self_attn.q_proj": "packed_colwise"}
        elif self.how == "layer":
            attention.o_proj = torch.nn.Bilinear(16, 16, 16)
        elif self.how == "tied":
            attention.k_proj.weight = attention.v_proj.weight
            del self.model.tp_plan["model.layers.*.self_attn.v_proj"]
        else:
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2))


def started_on(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """As a launcher leaves the environment of rank 0."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


@pytest.mark.parametrize(
    ("module", "strategy", "ranks", "wanted"),
    [
        (Net(), "fsdp:tp=2", 3, "2 ranks form a group that reads the same rows, .* multiple of 2, but it is 3"),
        (Net(), "fsdp:tp=0", 2, "tp=0: give the number of ranks"),
        (Net(), "fsdp:tp=2,shard=3", 4, "shard=3: 3 is not a divisor of 4 processes in 2 groups of tp=2"),
        (Net(num_key_value_heads=1), "fsdp:tp=2", 2, r"model.config.num_key_value_heads is 1, .* divisor of 1"),
        (
            Net(intermediate_size=25),
            "fsdp:tp=2",
            2,
            r"layers.0.mlp.gate_proj \(style 'colwise'\) .* the 25 rows of its weight",
        ),
        (
            Replaced("style"),
            "fsdp:tp=2",
            2,
            "layers.0.self_attn.q_proj cannot be divided: its style is 'packed_colwise'",
        ),
        (Replaced("layer"), "fsdp:tp=2", 2, "layers.1.self_attn.o_proj cannot be divided: it is a Bilinear"),
        (
            Replaced("tied"),
            "fsdp:tp=2",
            2,
            "layers.1.self_attn.k_proj cannot be divided: its weight is that of .*v_proj",
        ),
        (Replaced("none"), "fsdp:tp=2", 2, "Replaced holds no model with a tp_plan"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_plan(
    monkeypatch: pytest.MonkeyPatch, module: Net, strategy: str, ranks: int, wanted: str
) -> None:
    started_on(monkeypatch, ranks)
    with pytest.raises(ConfigurationError, match=wanted):
        Trainer(strategy=strategy, max_steps=1, progress=False).plan(module, Rows(), batch_size=1)


def test_a_loss_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started_on(monkeypatch, 2)
    with pytest.raises(ConfigurationError, match=r"tp=2 and precision='fp16': .* use precision='bf16'"):
        Trainer(strategy="fsdp:tp=2", precision="fp16", max_steps=1, progress=False).plan(Net(), Rows(), batch_size=1)
