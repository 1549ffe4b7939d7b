"""Building on the meta device: the same initial weights under every strategy, and no rank that ever holds all of a model."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which sets an environment variable when it is first imported
from torch.utils.data import TensorDataset

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.model.building import build_model, materialise
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
            torch.nn.init.constant_(submodule.shared, 0.5)  # after the turn of the layer that holds it first
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


class Finetuned(Base):
    """A model from files; `change` is what the user does to it afterwards."""

    def __init__(self, folder: Path, kind: str, change: str = "") -> None:
        super().__init__()
        self.folder, self.kind, self.change = folder, kind, change

    def configure_model(self) -> None:
        import transformers

        model = getattr(transformers, f"AutoModel{self.kind}").from_pretrained(self.folder)
        if self.change == "write":
            model.lm_head.weight.data.zero_()
        elif self.change == "grow":
            model.resize_token_embeddings(40, mean_resizing=False)
        elif self.change == "insert":
            model.transformer.h[0].mlp.adapter = torch.nn.Linear(2, 2, dtype=model.dtype)  # fsdp gathers one dtype
        self.model = model.transformer.h[0] if self.change == "part" else model


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


MODULES: dict[str, Callable[[Path], TrainModule]] = {
    "layers": lambda folder: Layers(),
    "rules": lambda folder: Rules(),
    "gpt2": lambda folder: Transformer("gpt2"),
    "llama": lambda folder: Transformer("llama"),
    "from files": lambda folder: Finetuned(folder, "ForCausalLM"),
    "from files, a new head": lambda folder: Finetuned(folder, "ForSequenceClassification"),
    "from files, a part": lambda folder: Finetuned(folder, "ForCausalLM", "part"),
    "from files, written to": lambda folder: Finetuned(folder, "ForCausalLM", "write"),
    "from files, grown": lambda folder: Finetuned(folder, "ForCausalLM", "grow"),
    "from files, inserted": lambda folder: Finetuned(folder, "ForCausalLM", "insert"),
}
STRATEGIES = {1: ["single"], 2: ["ddp", "fsdp", "fsdp:wrap=none"], 3: ["fsdp"]}
OWN = ["layers", "rules"]  # without transformers, whose import takes longest
CASES = {
    1: [(name, "single") for name in MODULES],
    2: [(name, "fsdp") for name in MODULES] + [(name, strategy) for name in OWN for strategy in STRATEGIES[2][::2]],
    3: [(name, "fsdp") for name in OWN],
}


def data() -> TensorDataset:
    return TensorDataset(torch.zeros(6, 1))


def initial_weights(strategy: str, build: Callable[[Path], TrainModule], folder: Path) -> tuple[Weights, list[str]]:
    """Every parameter and buffer as it is before the first step, whole, and the plan's notes on building. All ranks."""
    torch.manual_seed(3)  # for what is built outside of configure_model
    module, weights, notes = build(folder), {}, []

    class Look(Base):
        def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
            notes.extend(note for note in trainer._live().notes if note.startswith("built"))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor = tensor.detach()
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                weights[name] = whole.clone()

    Trainer(strategy=strategy, max_steps=0, seed=5, progress=False, plugins=[Look()]).fit(module, data(), batch_size=1)
    return weights, notes


def refused(strategy: str, module: TrainModule) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=strategy, max_steps=1, seed=5, progress=False).fit(module, data(), batch_size=1)
    return str(caught.value)


class Tied(Base):
    def configure_model(self) -> None:
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight


def job(world_size: int, folder: Path) -> dict[Any, Any]:
    jobs: dict[Any, Callable[[], Any]] = {
        (name, strategy): (lambda name=name, strategy=strategy: initial_weights(strategy, MODULES[name], folder))
        for name, strategy in CASES[world_size]
    }
    for strategy in STRATEGIES[world_size][-1:]:
        for how in ("buffer", "child"):
            jobs["unset", how] = lambda how=how, strategy=strategy: refused(strategy, Unset(how))
    if world_size == 2:
        jobs["tied"] = lambda: refused("fsdp:wrap=Linear", Tied())
    results = {}
    for key, run in jobs.items():
        try:
            results[key] = run()
        except Exception as exception:
            results[key] = exception.__class__(traceback.format_exc())
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 in several safetensors files, in bfloat16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(
        vocab_size=33, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="2KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[int, list[dict[Any, Any]]]:
    """By world size, what each rank found."""
    return {1: [job(1, folder)], 2: run_ranks(job, 2, 2, folder), 3: run_ranks(job, 3, 3, folder)}


def answer(answers: dict[int, list[dict[Any, Any]]], world_size: int, key: Any) -> list[Any]:
    by_rank = [rank[key] for rank in answers[world_size]]
    for each in by_rank:
        if isinstance(each, Exception):
            raise each
    return by_rank


@pytest.mark.parametrize(("world_size", "name", "strategy"), [(n, *case) for n in (2, 3) for case in CASES[n]])
def test_initial_weights_are_those_of_one_process_bit_by_bit(
    answers: dict[int, list[dict[Any, Any]]], name: str, strategy: str, world_size: int
) -> None:
    ((alone, notes_alone),) = answer(answers, 1, (name, "single"))
    assert len(alone) >= 4
    for weights, notes in answer(answers, world_size, (name, strategy)):
        assert weights.keys() == alone.keys()
        assert [n for n, value in alone.items() if not torch.equal(weights[n], value)] == []
        assert notes == notes_alone


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("change", ["", "part", "write", "grow", "insert"])
def test_weights_from_files_are_those_that_transformers_loads(
    answers: dict[int, list[dict[Any, Any]]], folder: Path, change: str
) -> None:
    names = {"": "", "part": ", a part", "write": ", written to", "grow": ", grown", "insert": ", inserted"}
    wanted = Finetuned(folder, "ForCausalLM", change)
    wanted.configure_model()
    ((weights, (note,)),) = answer(answers, 1, ("from files" + names[change], "single"))
    new = {name for name in weights if "adapter" in name or (change == "grow" and "wte" in name)}
    assert {name for name, value in weights.items() if value.dtype == torch.bfloat16} >= weights.keys() - new
    for name, value in wanted.named_parameters():
        assert name in new or torch.equal(weights[name], value), name
    if change in ("", "part"):
        assert f"{len(weights)} tensors read from files, each rank its part" in note
    else:
        assert note.startswith("built whole on the CPU of every rank, because it needs real tensors ("), note


class GivesValues(Base):
    """Sets the values of its layer in `configure_model`, in one of the usual ways, and only once, as Lightning's documentation advises."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer: Any = None
        self.calls: list[str] = []

    def configure_model(self) -> None:
        if self.layer is not None:
            return
        self.calls.append(self.how)
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.LSTM(3, 2))
        if self.how == "state":
            self.layer[0].load_state_dict({"weight": torch.full((3, 4), 7.0), "bias": torch.full((3,), 7.0)})
        elif self.how == "apply":
            self.layer.apply(lambda layer: [torch.nn.init.constant_(p, 7.0) for p in layer.parameters(recurse=False)])
        elif self.how == "reads":
            for parameter in self.layer[0].parameters():
                parameter.data.fill_(7.0 if float(parameter.sum()) < 1e9 else 0.0)


@pytest.mark.parametrize("how", ["state", "apply", "reads", ""])
def test_values_given_in_configure_model_are_those_that_train(how: str) -> None:
    module = GivesValues(how)
    module.configure_optimizers = lambda: torch.optim.SGD(module.layer[0].parameters(), lr=0.0)  # type: ignore[method-assign]
    Trainer(max_steps=1, progress=False, print_plan="none").fit(module, TensorDataset(torch.ones(2, 4)), batch_size=2)
    assert module.calls == [how]
    for parameter in module.layer[0].parameters():
        assert bool((parameter == 7).all()) == bool(how)


class WithBias(torch.nn.Linear):
    """Gives its bias values that `reset_parameters`, which it inherits, does not give."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.bias = torch.nn.Parameter(torch.full((3,), 7.0))


def _linear(module: Any) -> torch.nn.Linear:
    module.layer = torch.nn.Linear(3, 3)
    return module.layer


def _twice(module: Any) -> None:
    _linear(module)
    module.copied = copy.deepcopy(module.layer)


def _shared_values(module: Any) -> None:
    _linear(module)
    module.copied = torch.nn.Linear(3, 3)
    module.copied.weight = torch.nn.Parameter(module.layer.weight.detach().clone())
    module.copied.bias = torch.nn.Parameter(module.layer.bias.detach().clone())


def _half(module: Any) -> None:
    torch.nn.init.constant_(_linear(module).bias, 7.0)
    module.layer.half()


def _for_each(module: Any) -> None:
    bias = _linear(module).bias.data
    torch._foreach_zero_([bias])
    torch._foreach_add_([bias], 7.0)


def _orthogonal(module: Any) -> None:
    torch.nn.init.orthogonal_(_linear(module).weight, gain=7.0)


LOST: dict[str, Callable[[Any], Any]] = {
    "trunc_normal_": lambda m: torch.nn.init.trunc_normal_(_linear(m).weight, mean=7.0, std=0.001, a=6, b=8),
    "orthogonal_": _orthogonal,
    "deepcopy": _twice,
    "clones": _shared_values,
    "bias": lambda m: setattr(_linear(m), "bias", torch.nn.Parameter(torch.full((3,), 7.0))),
    "product": lambda m: setattr(_linear(m), "weight", torch.nn.Parameter(torch.ones(3, 3) * 7)),
    "data": lambda m: setattr(_linear(m).bias, "data", torch.full((3,), 7.0)),
    "registered": lambda m: _linear(m).register_parameter("bias", torch.nn.Parameter(torch.ones(3) * 7)),
    "out": lambda m: torch.add(torch.zeros(3), 7.0, out=_linear(m).bias.data),
    "foreach": _for_each,
    "embedding": lambda m: setattr(
        m, "layer", torch.nn.Embedding.from_pretrained(torch.full((3, 3), 7.0), freeze=False)
    ),
    "subclass": lambda m: setattr(m, "layer", WithBias()),
    "converted": _half,
}


class Starts(Base):
    """Gives its layers their first values in one of the ways of `LOST`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        LOST[self.how](self)


@pytest.mark.parametrize("how", LOST)
def test_no_value_that_configure_model_gives_is_lost(how: str) -> None:
    module = Starts(how)
    note = build_model(module, 0)
    assert note.startswith("built whole on the CPU of every rank, because it needs real tensors ("), note
    weights = module.state_dict()
    if how in ("deepcopy", "clones"):
        assert torch.equal(weights["layer.weight"], weights["copied.weight"])
        assert torch.equal(weights["layer.bias"], weights["copied.bias"])
    elif how == "orthogonal_":
        assert torch.allclose(weights["layer.weight"] @ weights["layer.weight"].T, 49 * torch.eye(3), atol=1e-3)
    else:
        assert any(torch.allclose(value.float(), torch.tensor(7.0), atol=0.01) for value in weights.values()), weights


class BuiltInLayers(Base):
    """Layers of torch whose own rule sets all their values, converted to another dtype."""

    def configure_model(self) -> None:
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 2),
            torch.nn.BatchNorm2d(4),
            torch.nn.GroupNorm(2, 4),
            torch.nn.LayerNorm(4),
            torch.nn.PReLU(),
        )
        self.recurrent = torch.nn.GRU(4, 3)
        self.embedding = torch.nn.Embedding(5, 4, padding_idx=0)
        self.to(torch.bfloat16)


def test_layers_of_torch_in_another_dtype_are_built_without_memory() -> None:
    assert build_model(BuiltInLayers(), 0).startswith("built on the meta device")


def test_a_transformers_model_from_a_configuration_begins_as_transformers_begins_it() -> None:
    """The rule of GPT-2 for a block scales the projections in it by the number of layers."""
    from transformers import GPT2Config, GPT2Model

    class FromConfiguration(Base):
        def configure_model(self) -> None:
            config = GPT2Config(
                n_layer=8, n_embd=64, n_head=2, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0
            )
            self.net = GPT2Model(config)

    module = FromConfiguration()
    assert "GPT2Attention gives c_proj.weight its values" in build_model(module, 0)
    block = module.net.h[0]
    assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.1)
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.1)


def configurations() -> dict[str, Any]:
    import transformers

    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    return {
        "gpt2": transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8),
        "vit": transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **small),
        "t5": transformers.T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2),
    }


@pytest.mark.parametrize("kind", ["gpt2", "vit", "t5"])
@pytest.mark.parametrize("where", ["in __init__", "by hand", "by hand, with a guard"])
def test_weights_that_a_model_has_before_configure_model_are_kept(kind: str, where: str) -> None:
    from transformers import AutoModel

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net = AutoModel.from_config(configurations()[kind]) if where == "in __init__" else None

        def configure_model(self) -> None:
            if where == "by hand, with a guard" and self.net is not None:
                return
            if where != "in __init__":
                self.net = AutoModel.from_config(configurations()[kind])
            self.head = torch.nn.Linear(16, 2)

    module = Model()
    if where != "in __init__":
        module.configure_model()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    trained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    build_model(module, 0)
    assert trained
    assert [name for name, tensor in trained.items() if not torch.equal(module.state_dict()[name], tensor)] == []


VALUES = torch.full((4, 3), 7.0)
GIVE: dict[str, Any] = {
    "parameter": lambda module: setattr(module.net, "weight", torch.nn.Parameter(VALUES.clone())),
    "from_pretrained": lambda module: setattr(module, "net", torch.nn.Embedding.from_pretrained(VALUES, freeze=False)),
    "assign": lambda module: module.net.load_state_dict({"weight": VALUES.clone()}, assign=True),
    "replaced and loaded": lambda module: (
        setattr(module, "net", torch.nn.Embedding(4, 3)),
        module.net.load_state_dict({"weight": VALUES}),
    ),
    "replaced and filled": lambda module: (
        setattr(module, "net", torch.nn.Embedding(4, 3)),
        torch.nn.init.constant_(module.net.weight, 7.0),
    ),
    "replaced by a loaded one": lambda module: setattr(module, "net", copy.deepcopy(LOADED)),
    "in place": lambda module: module.net.weight.data.fill_(7.0),
}
"""How `configure_model` may give values to a layer that `__init__` made."""
LOADED = torch.nn.Embedding.from_pretrained(VALUES)


@pytest.mark.parametrize("how", GIVE)
def test_values_that_configure_model_gives_a_layer_of_init_are_those_that_train(how: str) -> None:
    class Gives(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Embedding(4, 3)

        def configure_model(self) -> None:
            GIVE[how](self)

    module = Gives()
    Trainer(max_steps=1, progress=False, print_plan="none").validate(
        module, TensorDataset(torch.ones(4, 1)), batch_size=2
    )
    assert torch.equal(module.net.weight, VALUES)


class Mixin:
    def configure_model(self: Any) -> None:
        self.net = torch.nn.Linear(3, 3)


class Mixed(Mixin, Base):
    pass


class Extends(Mixed):
    def configure_model(self) -> None:
        super().configure_model()
        self.head = torch.nn.Linear(3, 2)


class Reads(Mixed):
    def configure_model(self) -> None:
        super().configure_model()
        float(self.net.weight.detach().sum())  # which needs real tensors


@pytest.mark.parametrize("kind", [Mixed, Extends, Reads])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_model_that_a_script_built_and_loaded_by_hand_is_not_built_again(kind: type[Base], replaces: bool) -> None:
    module = kind()
    module.configure_model()
    if replaces:
        module.net = torch.nn.Linear(3, 4)
    torch.nn.init.constant_(module.net.weight, 7.0)
    data = TensorDataset(torch.ones(4, 1))
    Trainer(progress=False).validate(module, data, batch_size=2)
    assert module.net.weight.eq(7).all()
    Trainer(max_steps=1, progress=False).fit(module, data, batch_size=4)
    assert (
        module.net.weight.detach().sub(7 * 0.8).abs().max() < 1e-5
    )  # one step of SGD with the gradient 2 * 7 and the rate 0.1


def test_layers_that_reset_themselves_are_built_without_memory() -> None:
    assert build_model(GivesValues(""), 0).startswith("built on the meta device")
    assert "layer.0.weight is given values by" in build_model(GivesValues("state"), 0)


def test_values_of_python_given_to_a_tensor_stay() -> None:
    """They were lost without an operation that could be seen, and the error asked for an initialisation of a class weight."""

    class Weighted(Base):
        def configure_model(self) -> None:
            self.layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
            self.loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]))
            self.temperature = torch.nn.Parameter(torch.tensor(0.5))

    module = Weighted()
    assert "temperature is given values by torch.tensor" in build_model(module, 0)
    assert (module.loss.weight.tolist(), module.temperature.item()) == ([1.0, 2.0, 4.0], 0.5)


class TiedLayers(Base):
    """An embedding and a head of its size, joined by `tie`."""

    def __init__(self, tie: Callable[[Any], object]) -> None:
        super().__init__()
        self.tie = tie

    def configure_model(self) -> None:
        self.embedding = torch.nn.Embedding(50, 40)
        self.head = torch.nn.Linear(40, 50, bias=False)
        self.tie(self)


def _to_head(module: Any) -> None:
    module.embedding.weight = module.head.weight


def _to_another(module: Any) -> None:
    module.embedding.weight = torch.nn.Linear(40, 50).weight


def _share_memory(module: Any) -> None:
    module.head.weight = torch.nn.Parameter(module.embedding.weight.detach())


def _share_data(module: Any) -> None:
    module.head.weight.data = module.embedding.weight.data


def _assign(module: Any) -> None:
    module.head.load_state_dict(module.embedding.state_dict(), assign=True)


def _to_another_of_its_class(module: Any) -> None:
    module.embedding.weight = torch.nn.Embedding(50, 40).weight


def _to_embedding(module: Any) -> None:
    module.head.weight = module.embedding.weight


@pytest.mark.parametrize(
    ("tie", "note", "rule"),
    [
        (_to_head, "embedding.weight is the parameter of head", torch.nn.Linear),
        (_to_another, "embedding.weight is the parameter of a Linear that is not in the module", torch.nn.Linear),
        (_share_memory, "head.weight has the memory of embedding.weight", torch.nn.Embedding),
        (_share_data, "head.weight has the memory of embedding.weight", torch.nn.Embedding),
        (_assign, "head.weight has the memory of embedding.weight", torch.nn.Embedding),
        (_to_embedding, "built on the meta device", torch.nn.Embedding),
        (_to_another_of_its_class, "built on the meta device", torch.nn.Embedding),
    ],
)
def test_a_shared_weight_has_the_values_of_the_layer_that_made_it(
    tie: Callable[[Any], object], note: str, rule: type[torch.nn.Module]
) -> None:
    """An embedding that is registered before the head whose weight it gets initialised that weight by its own rule: N(0, 1), and not as a
    linear layer, so the first loss was 6.8 and not 4.6."""
    module = TiedLayers(tie)
    assert note in build_model(module, 0)
    materialise(module, 0)
    assert (
        0.9 < module.embedding.weight.std() < 1.1 if rule is torch.nn.Embedding else module.embedding.weight.std() < 0.1
    )
    assert tie in (_to_another, _to_another_of_its_class) or torch.equal(module.head.weight, module.embedding.weight)


def test_what_the_files_lack_is_initialised_by_the_rule_of_the_model(answers: dict[int, list[dict[Any, Any]]]) -> None:
    ((weights, (note,)),) = answer(answers, 1, ("from files, a new head", "single"))
    assert f"{len(weights) - 1} tensors read from files" in note
    assert 0.01 < weights["model.score.weight"].float().std() < 0.03


def test_a_shared_tensor_keeps_what_the_last_turn_of_init_weights_gives_it(
    answers: dict[int, list[dict[Any, Any]]],
) -> None:
    """As with Module.apply. The turns after the first had no effect on it."""
    ((alone, _),) = answer(answers, 1, ("rules", "single"))
    assert alone["linear.weight"].tolist() == [[0.5] * 4] * 5
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


class Token(torch.nn.Module):
    """A layer without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.full((2,), 3.0))


class Scaled(TrainModule):
    """Builds tensors for which there is no rule: `made` returns those of the module itself."""

    def __init__(self, made: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.made = made

    def configure_model(self) -> None:
        self.layer, self.first = torch.nn.Linear(2, 1), Token()
        self.register_buffer("scale", self.made(2))

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.layer(batch[0]) * self.scale.sum() * self.first.token.sum()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_values_for_which_there_is_no_rule_are_those_that_configure_model_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Scaled(torch.ones)
    Trainer(max_steps=1, progress=False).fit(module, TensorDataset(torch.ones(4, 2)), batch_size=2)
    assert (
        "built whole on the CPU of every rank, because it needs real tensors (scale is given" in capsys.readouterr().out
    )
    assert module.scale.tolist() == [1, 1]
    assert module.first.token.tolist() == [3, 3]


def test_a_buffer_of_the_module_itself_that_has_no_value_is_named() -> None:
    class Empty(Scaled):
        def configure_model(self) -> None:
            self.layer = torch.nn.Linear(2, 1)
            self.register_buffer("scale", torch.empty(2))

    with pytest.raises(
        ConfigurationError, match=r"configure_model built scale \(Empty\), which has no reset_parameters"
    ):
        Trainer(max_steps=1, progress=False).fit(Empty(torch.empty), TensorDataset(torch.ones(4, 2)), batch_size=2)


def test_one_parameter_in_two_units_is_refused(answers: dict[int, list[dict[Any, Any]]]) -> None:
    for message in answer(answers, 2, "tied"):
        assert "first.weight and second.weight are the same parameter" in message


def test_an_error_without_a_word_in_configure_model_stays_what_it_is() -> None:
    class Bare(Base):
        def configure_model(self) -> None:
            raise NotImplementedError

    with pytest.raises(NotImplementedError):
        Trainer(max_steps=1, progress=False).fit(Bare(), TensorDataset(torch.ones(2, 1)), batch_size=1)


class Classifies(TrainModule):
    """A transformers model, and a head that is outside of it if `head` is True."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        self.body = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8))
        self.head = torch.nn.Linear(8, 2) if head else torch.nn.Identity()

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.head(self.body(batch[0]).last_hidden_state).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ExportsAll(Classifies):
    def export(self, path: Path) -> None:
        (path / "all.txt").write_text(", ".join(self.state_dict()))


@pytest.mark.parametrize(
    ("kind", "head", "notes"), [(Classifies, True, 1), (Classifies, False, 0), (ExportsAll, True, 0)]
)
def test_a_head_that_the_exported_model_leaves_out_is_named_before_the_first_step(
    kind: type[Classifies], head: bool, notes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = TensorDataset(torch.zeros(4, 3, dtype=torch.long))
    Trainer(max_steps=1, progress=False, run_dir=tmp_path).fit(kind(head), rows, batch_size=2)
    text = "RUN_DIR/model/ will hold the transformers model GPT2Model alone, without head.weight, head.bias, which are in checkpoints"
    assert capsys.readouterr().out.count(text) == notes


def test_a_helper_of_the_module_that_is_called_export_writes_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Helps(Classifies):
        def export(self, path: Path, *, opset: int) -> None:
            raise AssertionError("called by fit")

    rows = TensorDataset(torch.zeros(4, 3, dtype=torch.long))
    Trainer(max_steps=1, progress=False, run_dir=tmp_path).fit(Helps(False), rows, batch_size=2)
    assert (tmp_path / "model" / "config.json").is_file()
    assert "Helps.export takes other arguments than (path)" in capsys.readouterr().out
