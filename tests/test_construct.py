"""Building on the meta device: the same initial weights under every strategy, and no rank that ever holds all of a model."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.testing import run_ranks

Weights = dict[str, torch.Tensor]


class Base(TrainModule):
    """A step that uses every parameter; what differs is what `configure_model` builds."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return sum((p.float() ** 2).sum() for p in self.parameters()) + 0 * batch[0].sum()  # type: ignore[return-value]

    def validation_step(self, batch: Any) -> None:
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Position(torch.nn.Module):
    """Parameters and buffers of its own, which only the module's rule can initialise; a shared weight."""

    def __init__(self, shared: torch.nn.Parameter) -> None:
        super().__init__()
        self.shared = shared
        self.scale = torch.nn.Parameter(torch.ones(3, 2))
        self.register_buffer("order", torch.arange(5))


class Layers(Base):
    """A weight from outside, layers, running statistics, a tied weight; some tensors have fewer rows than there are ranks."""

    def __init__(self, rule: str = "") -> None:
        super().__init__()
        self.rule = rule
        self.outside = torch.nn.Linear(3, 3)

    def configure_model(self) -> None:
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)) for _ in range(2)
        )
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.narrow = torch.nn.Linear(9, 1)


class Rules(Base):
    def configure_model(self) -> None:
        self.linear = torch.nn.Linear(4, 5)
        self.position = Position(self.linear.weight)

    def init_weights(self, submodule: torch.nn.Module) -> None:
        if isinstance(submodule, Position):
            torch.nn.init.normal_(submodule.scale, mean=3.0)
            submodule.order.copy_(torch.arange(5))
            torch.nn.init.zeros_(submodule.shared)  # the turn of the layer that holds it first has come already
        else:
            submodule.reset_parameters()  # type: ignore[operator]


class Transformer(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

        config = {
            "gpt2": GPT2Config(vocab_size=33, n_positions=8, n_embd=8, n_layer=2, n_head=2),
            "llama": LlamaConfig(
                vocab_size=33,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
            ),
        }[self.kind]
        self.model = AutoModelForCausalLM.from_config(config)


class Unset(Base):
    """`init_weights` that forgets a tensor, or sets one that belongs to a layer whose own turn sets nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        self.position = Position(torch.nn.Parameter(torch.ones(2)))
        self.position.inner = torch.nn.Linear(2, 2)

    def init_weights(self, submodule: torch.nn.Module) -> None:
        if isinstance(submodule, Position):
            submodule.shared.zero_()
            submodule.scale.zero_()
            if self.how != "buffer":
                submodule.order.zero_()
            submodule.inner.weight.zero_()
            submodule.inner.bias.zero_()
        elif self.how == "buffer":
            submodule.reset_parameters()  # type: ignore[operator]


MODULES: dict[str, Callable[[], TrainModule]] = {
    "layers": Layers,
    "rules": Rules,
    "gpt2": lambda: Transformer("gpt2"),
    "llama": lambda: Transformer("llama"),
}
STRATEGIES = {1: ["single"], 2: ["ddp", "fsdp", "fsdp:wrap=none"], 3: ["fsdp"]}


def data() -> TensorDataset:
    return TensorDataset(torch.zeros(6, 1))


def initial_weights(strategy: str, build: Callable[[], TrainModule]) -> Weights:
    """Every parameter and buffer as it is before the first step, whole. All ranks."""
    torch.manual_seed(3)  # for what is built outside of configure_model
    module, found = build(), {}

    class Look(Base):
        def on_fit_start(self, module: TrainModule) -> None:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor = tensor.detach()
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[name] = whole.clone()

    Trainer(strategy=strategy, max_steps=0, seed=5, progress=False, plugins=[Look()]).fit(module, data(), batch_size=1)
    return found


def refused(strategy: str, module: TrainModule) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=strategy, max_steps=1, seed=5, progress=False).fit(module, data(), batch_size=1)
    return str(caught.value)


class Tied(Base):
    def configure_model(self) -> None:
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight


def job(world_size: int) -> dict[Any, Any]:
    jobs: dict[Any, Callable[[], Any]] = {
        (name, strategy): (lambda name=name, strategy=strategy: initial_weights(strategy, MODULES[name]))
        for name in MODULES
        for strategy in STRATEGIES[world_size]
    }
    for strategy in STRATEGIES[world_size][-1:]:
        for how in ("buffer", "child"):
            jobs["unset", how] = lambda how=how, strategy=strategy: refused(strategy, Unset(how))
    if world_size == 2:
        jobs["tied"] = lambda: refused("fsdp:wrap=Linear", Tied())
    found = {}
    for key, run in jobs.items():
        try:
            found[key] = run()
        except Exception as exception:
            found[key] = exception.__class__(traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def answers() -> dict[int, list[dict[Any, Any]]]:
    """By world size, what each rank found."""
    return {1: [job(1)], 2: run_ranks(job, 2, 2), 3: run_ranks(job, 3, 3)}


def answer(answers: dict[int, list[dict[Any, Any]]], world_size: int, key: Any) -> list[Any]:
    found = [rank[key] for rank in answers[world_size]]
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("world_size", "strategy"), [(n, s) for n in (2, 3) for s in STRATEGIES[n]])
def test_initial_weights_are_those_of_one_process_bit_by_bit(
    answers: dict[int, list[dict[Any, Any]]], name: str, strategy: str, world_size: int
) -> None:
    (alone,) = answer(answers, 1, (name, "single"))
    assert len(alone) >= 4
    for found in answer(answers, world_size, (name, strategy)):
        assert found.keys() == alone.keys()
        assert [n for n, value in alone.items() if not torch.equal(found[n], value)] == []


def test_a_shared_tensor_is_set_in_the_turn_of_the_first_that_holds_it(
    answers: dict[int, list[dict[Any, Any]]],
) -> None:
    (alone,) = answer(answers, 1, ("rules", "single"))
    assert alone["linear.weight"].abs().min() > 0
    assert alone["position.order"].tolist() == [0, 1, 2, 3, 4]
    assert alone["position.scale"].mean() > 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("how", "name"), [("buffer", "position.order"), ("child", "position.inner.weight")], ids=["a buffer", "a child"]
)
def test_a_tensor_that_nobody_sets_in_its_turn_is_an_error_under_every_strategy(
    answers: dict[int, list[dict[Any, Any]]], world_size: int, how: str, name: str
) -> None:
    for message in answer(answers, world_size, ("unset", how)):
        assert message.startswith(f"{name} was built by configure_model and has no initial value"), message


def test_one_parameter_in_two_units_is_refused(answers: dict[int, list[dict[Any, Any]]]) -> None:
    for message in answer(answers, 2, "tied"):
        assert "first.weight and second.weight, which are one parameter, into two units" in message
