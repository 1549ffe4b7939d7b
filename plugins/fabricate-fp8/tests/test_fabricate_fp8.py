"""The conformance kit, with float8's rounding emulated so that it runs anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fabricate_fp8.precision import FP8

from fabricate import Callback, Strategy, Trainer, TrainModule
from fabricate.testing import check_precision


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_it_keeps_what_a_precision_promises(recipe: str) -> None:
    check_precision(f"fp8:emulate=true,recipe={recipe}", rtol=0.2, strategies=["single", "ddp", "fsdp"])


class Net(TrainModule):
    """A plain layer, one that attention never calls, and a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.attention = torch.nn.MultiheadAttention(32, 2, batch_first=True)
        self.scaled = Scaled(32, 32)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = self.first(batch[0])
        return self.scaled(self.attention(x, x, x)[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_only_layers_that_are_called_as_they_are_become_float8(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    kinds: list[str] = []

    class Looks(Callback):
        def on_step(self, module: Net) -> None:
            layers = (module.first, module.attention.out_proj, module.scaled)
            kinds[:] = [type(layer).__name__ for layer in layers]

    module, rows = Net(), torch.utils.data.TensorDataset(torch.randn(7, 5, 32))
    trainer = Trainer(
        max_steps=2, precision=f"fp8:emulate=true,recipe={recipe}", print_plan="full", progress=False, plugins=[Looks()]
    )
    trainer.fit(module, rows, batch_size=4)  # the last batch has 15 rows for the layers
    assert kinds == ["Float8Linear", "NonDynamicallyQuantizableLinear", "Scaled"]
    assert f"1 linear layers by torchao, {recipe}; emulated" in (out := capsys.readouterr().out)
    assert "2 of subclasses of Linear left alone" in out


def test_the_product_over_the_rows_of_a_batch_is_padded_to_what_the_device_multiplies() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32))
    FP8(emulate=True).convert(layers)
    products: Any = layers[0].linear_mm_config
    assert products.grad_weight.pad_inner_dim, "its inner dimension is the number of rows"


@pytest.mark.parametrize(
    ("compiles", "emulate", "slow"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_plan_says_that_float8_is_slow_uncompiled(compiles: bool, emulate: bool, slow: bool) -> None:
    precision = FP8(emulate=emulate)
    precision.settle(
        Strategy.Settled(
            world_size=1,
            local_world_size=1,
            device=torch.device("cuda", 0),
            precision=precision,
            micro_batch_size=4,
            gradient_accumulation_steps=1,
            max_grad_norm=None,
            nonfinite="stop",
            compiles=compiles,
        )
    )
    assert ("bf16 is faster" in precision.describe()["float8"]) is slow
