"""State that user code reaches outside of the attributes of its objects: global variables, closures, hooks of layers, collate functions."""

from __future__ import annotations

import types
from pathlib import Path
from random import randint
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand

from fabricate import Callback, Trainer, TrainModule

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]
RNG = np.random.default_rng(0)
COUNTED = types.SimpleNamespace(steps=0)
COPY = torch.nn.Linear(3, 1)
CONSTANT, CALLS = torch.ones(3), list[int]()


def noise(rows: Any) -> torch.Tensor:
    return torch.full((), float(RNG.normal()))


class Jitter:
    """A transformation with a generator of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(0)

    def __call__(self, row: Any) -> Any:
        return row[0] + float(self.own.normal()), row[1]


class Jittered(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.transforms = {"train": [Jitter()]}

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        return self.transforms["train"][0](ROWS[index])


class Collator:
    def __init__(self) -> None:
        self.own, self.made = torch.Generator().manual_seed(0), 0

    def __call__(self, rows: list[Any]) -> Any:
        self.made += 1
        x, y = torch.utils.data.default_collate(rows)
        return x + torch.rand(1, generator=self.own), y


class Plain(TrainModule):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        RNG.normal()  # a resumed run draws it again
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0] * CONSTANT), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class DrawsGlobally(Plain):
    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step(batch) * (1 + 0 * noise(batch))


class DrawsInMethods(Plain):
    """A hook of the framework calls the first method, which calls the second."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.disturbed(batch)

    def disturbed(self, batch: Any) -> torch.Tensor:
        return super().training_step(batch) * (1 + 0 * getattr(self, "no" + "ise")())

    def noise(self) -> torch.Tensor:
        return noise(None)


class CountsGlobally(Plain):
    def on_step(self) -> None:
        COUNTED.steps += 1


class CountsInItsClass(Plain):
    def on_step(self) -> None:
        type(self).steps += 1


class Counter:
    steps = 0

    @classmethod
    def count(cls) -> None:
        cls.steps += 1


class Limits:
    """A class with a value that a method names and nothing changes."""

    steps = 3


class CountsInAnotherClass(Plain):
    def on_step(self) -> None:
        Counter.steps += Limits.steps


class CallsAnotherClass(Plain):
    def on_step(self) -> None:
        Counter.count()


class HookedBackward(Plain):
    def __init__(self) -> None:
        super().__init__()
        seen = [0]

        def count(layer: Any, before: Any, after: Any) -> None:
            seen[0] += 1

        self.layer.register_full_backward_hook(count)


class SetsALayer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.nn.GELU()

    def on_step(self) -> None:
        self.activation.approximate = "tanh"


class Optional(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.factor: float | None = 2.0

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}

    def on_step(self) -> None:
        self.factor = None


class Reads(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Any:
        self.reads += 1
        return ROWS[row]


LABELLED = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.zeros(4, 1))


class Labels(Plain):
    def on_epoch_end(self) -> None:
        LABELLED.tensors[1].add_(1)


class Follows(Plain):
    def on_step(self) -> None:
        with torch.no_grad():
            COPY.weight.lerp_(self.layer.weight, 0.1)


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        seen = [0]

        def count(layer: Any, inputs: Any, output: Any) -> None:
            seen[0] += 1

        self.layer.register_forward_hook(count)


@pytest.mark.parametrize(
    ("module", "options", "named"),
    [
        (DrawsGlobally, {}, "draws other numbers: global variable RNG (Generator). Draw"),
        (DrawsInMethods, {}, "draws other numbers: global variable RNG (Generator). Draw"),
        (
            Plain,
            {"train": Jittered()},
            "draws other numbers: Jittered (train).transforms['train'][0].own (Generator). Draw",
        ),
        (Plain, {"collate_fn": Collator()}, "draws other numbers: collate_fn.own (Generator). Draw"),
        (Plain, {"collate_fn": Collator()}, "collate_fn.made changed since the fit began"),
        (CountsGlobally, {}, "global variable COUNTED changed since the fit began"),
        (CountsInItsClass, {}, "CountsInItsClass.steps changed since the fit began"),
        (CountsInAnotherClass, {}, "Counter.steps changed since the fit began"),
        (CallsAnotherClass, {}, "Counter.steps changed since the fit began"),
        (HookedBackward, {}, "variable seen of count changed since the fit began"),
        (SetsALayer, {}, "SetsALayer.activation.approximate changed since the fit began"),
        (Optional, {"val": ROWS}, "Optional.factor changed since the fit began"),
        (
            Plain,
            {"train": torch.utils.data.ConcatDataset([Reads()])},
            "Reads (train).reads changed since the fit began",
        ),
        (
            Labels,
            {"train": torch.utils.data.Subset(LABELLED, [0, 1, 2, 3])},
            "TensorDataset (train).tensors changed since the fit began",
        ),
        (Follows, {}, "global variable COPY changed since the fit began"),
        (Hooked, {}, "variable seen of count changed since the fit began"),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the layer's input is the batch
def test_state_that_is_no_attribute_of_the_module_or_data_is_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: type[Plain], options: dict[str, Any], named: str
) -> None:
    options = {"train": ROWS, "batch_size": 2} | options
    Trainer(max_steps=2, progress=False, run_dir=tmp_path).fit(module(), **options)
    assert named in "".join(capsys.readouterr())


class Harmless(Plain):
    """Names global variables that do not change, functions of the global generators, and a generator only where a resumed run uses it
    again."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffled = RNG.permutation(4)
        self.drawn = self.draw()

    def draw(self) -> float:
        return float(RNG.normal())

    def on_fit_start(self) -> None:
        RNG.normal()

    def samples(self) -> Any:
        """For the script, after the fit."""
        COUNTED.steps += 1
        return RNG.normal(size=3)

    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step(batch) + 0 * (randint(0, 1) + rand())

    def on_step(self) -> None:
        assert CONSTANT.sum() == 3
        assert not CALLS
        assert COPY is not self.layer
        assert (
            not hasattr(self.layer, "COUNTED") or self.layer.COUNTED
        )  # an attribute with the name of a global variable
        globals()["COUNTED"].steps += 1


def test_variables_that_do_not_change_or_that_checkpoints_hold_are_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, data = Harmless(), Jittered()

    class Divided(torch.utils.data.TensorDataset):
        def divided(self) -> Any:
            """For the script, before the fit."""
            return torch.utils.data.Subset(self, RNG.permutation(len(self))[:6].tolist())

    class Watches(Callback):
        def on_step(self) -> None:
            assert module.layer is layer
            assert trainer.step
            assert len(data) == len(ROWS)

    trainer = Trainer(max_steps=2, progress=False, run_dir=tmp_path, plugins=[Watches()])
    layer = module.layer
    rows = Divided(*map(torch.stack, zip(*ROWS, strict=True)))
    assert len(rows.divided()) == 6
    trainer.fit(module, rows, batch_size=2)
    output = "".join(capsys.readouterr())
    assert "random generators" not in output
    assert "changed since" not in output
