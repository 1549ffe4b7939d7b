"""Trainer(compile=...): the same training, one graph per kind of block, also when the last batch is shorter, nothing left behind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from transformers import GPT2Config, GPT2LMHeadModel

from fabricate import ConfigurationError, Strategy, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.testing import run_ranks

# What torch's compiler warns about in its own code.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")

EAGER = {"backend": "aot_eager"}  # everything of torch.compile but generated code


class Language(TrainModule):
    """Three GPT-2 blocks; on_step counts the graphs that exist by then."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=3, n_embd=16, n_head=2, n_positions=8, vocab_size=32, bos_token_id=0, eos_token_id=0
        )
        config.use_cache = False
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.gpt = GPT2LMHeadModel(config)
        self.graphs: list[int] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(input_ids=batch).logits
        self.log("largest", logits.detach().amax())
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_step(self) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Layers(TrainModule):
    """No blocks: two layers, one without parameters, one in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.parts = torch.nn.ModuleDict({"second": torch.nn.Linear(4, 1)})
        self.loss = torch.nn.MSELoss()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.parts["second"](self.first(batch)), batch[:, :1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def tokens(rows: int) -> Any:
    return torch.randint(32, (rows, 8), generator=torch.Generator().manual_seed(0))


def fit(module: TrainModule, data: torch.Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = Trainer(**{"max_epochs": 1, "progress": False, "precision": "fp32", "seed": 0, **options})
    return trainer.fit(module, Rows(data), batch_size=4)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    gather = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    return {name: gather(p).detach().clone() for name, p in module.named_parameters()}


def _both(strategy: str, rows: int, run_dir: str) -> dict[str, Any]:
    """Weights without and with compile, the names in state_dict, the graphs at each step, and the checkpoint's tensors."""
    results: dict[str, Any] = {}
    for name, how in (("plain", False), ("compiled", EAGER)):
        torch.manual_seed(0)
        module = Language()
        result = fit(module, tokens(rows), strategy=strategy, compile=how, run_dir=f"{run_dir}/{name}")
        results[name] = weights(module)
        results[f"{name} tensors"] = _tensor_names(result.checkpoint)
    return {**results, "graphs": module.graphs, "names": list(module.state_dict())}


def _tensor_names(checkpoint: Path) -> list[str]:
    with Reader(checkpoint) as reader:
        return sorted(reader.manifest.tensors)


def _check(results: dict[str, Any], steps: int) -> None:
    assert results["graphs"] == [1] * steps  # three blocks share one graph, and the last batch is shorter
    assert results["plain tensors"] == results["compiled tensors"] != []
    assert results["plain"].keys() == results["compiled"].keys()
    for name, value in results["plain"].items():
        assert torch.equal(value, results["compiled"][name]), name


def test_blocks_share_one_graph_for_batches_of_every_size_and_train_the_same(tmp_path: Path) -> None:
    results = _both("single", 27, str(tmp_path))
    _check(results, steps=7)
    assert results["names"] == list(Language().state_dict())


@pytest.mark.parametrize(
    ("rows", "options", "dynamic"), [(8, {}, False), (10, {}, True), (10, {"dynamic": False}, False)]
)
def test_rows_are_a_dynamic_size_only_where_batches_differ_and_the_user_does_not_decide(
    rows: int, options: dict[str, Any], dynamic: bool
) -> None:
    symbolic: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        symbolic.append(any(isinstance(size, torch.SymInt) for size in inputs))
        return graph

    fit(Layers(), torch.randn(rows, 4), compile={"backend": backend, **options})
    assert set(symbolic) == {dynamic}


def test_blocks_are_compiled_under_ddp_and_fsdp(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        for results in run_ranks(_both, 2, strategy, 28, str(tmp_path / strategy)):
            _check(results, steps=4)


def test_layers_are_compiled_where_nothing_repeats() -> None:
    module = Layers()
    fit(module, torch.randn(10, 4), compile=EAGER)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_nothing_stays_compiled_after_a_fit() -> None:
    module = Layers()
    fit(module, torch.randn(8, 4), compile=EAGER)
    assert not any("forward" in child.__dict__ for child in module.modules())
    assert torch._dynamo.config.fail_on_recompile_limit_hit is False


def test_a_copy_of_a_compiled_module_runs_its_own_parameters() -> None:
    results: list[float] = []

    class Copies(Layers):
        def on_step(self, step: int) -> None:
            if step == 1:
                for other in (copy.deepcopy(self.first), pickle.loads(pickle.dumps(self.first))):
                    with torch.no_grad():
                        for parameter in other.parameters():
                            parameter.zero_()
                        results.append(float(other(torch.ones(1, 4)).abs().sum()))

    fit(Copies(), torch.randn(8, 4), compile=EAGER)
    assert results == [0.0, 0.0]


def test_the_plan_says_what_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Language(), tokens(4), compile={**EAGER, "fullgraph": True}, print_plan="full")
    out = capsys.readouterr().out
    assert "backend=aot_eager, fullgraph=True  [argument]" in out
    assert "compiled by unit: 3 (GPT2Block), aot_eager" in out


def test_blocks_are_asked_for_where_there_are_none() -> None:
    with pytest.raises(
        ConfigurationError, match="compile='blocks': Layers has no transformers model that names its blocks"
    ):
        fit(Layers(), torch.randn(8, 4), compile="blocks")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("all", r"compile='all': give True, 'blocks', or options of torch.compile"),
        ({"modus": "max-autotune"}, "compile: torch.compile has no option 'modus'; did you mean 'mode'"),
    ],
)
def test_what_compile_cannot_be_is_told_at_once(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(max_steps=1, compile=wrong)


def test_a_backend_that_torch_does_not_know_is_an_error_before_the_first_step() -> None:
    with pytest.raises(ConfigurationError, match=r"compile=\{'backend': 'inducktor'\}: "):
        fit(Layers(), torch.randn(8, 4), compile={"backend": "inducktor"})


def test_a_strategy_that_works_inside_blocks_refuses() -> None:
    class Inside(Strategy):
        name = "inside"
        compiles = False

    with pytest.raises(ConfigurationError, match="compile= is set, but strategy='inside' acts inside the"):
        fit(Layers(), torch.randn(8, 4), strategy=Inside(), compile=True)


def test_fits_of_several_models_in_one_process_are_compiled() -> None:
    """Each model has other graphs of the same `forward`, and torch counts those of the models before."""

    class Wide(Layers):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.first(batch).mean()

    torch._dynamo.reset()
    for width in range(8, 34):
        trainer = Trainer(max_epochs=1, progress=False, compile=EAGER)
        trainer.fit(Wide(width), Rows(torch.randn(8, 4)), batch_size=4)


def test_more_graphs_than_units_account_for_end_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabricate.model.compiling._graphs_before", 0)

    class Unsteady(torch.nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
            return self.layer(x) * len(kind)

    class Wavers(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.first = Unsteady()
            self.kind = ""

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            self.kind += "x"
            return self.first(batch, self.kind).mean()

    with pytest.raises(Exception, match="recompile_limit") as caught:
        fit(Wavers(), torch.randn(160, 4), compile=EAGER)
    assert any("compile=: a block was compiled for more kinds of input" in note for note in caught.value.__notes__)
