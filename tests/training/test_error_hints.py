"""Errors raised by torch: each is caused, and the added note names what to change."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, TensorDataset

from fabricate import FSDP, Callback, Trainer, TrainModule
from fabricate.testing import run_ranks


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.last(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows(width: int = 4) -> TensorDataset:
    return TensorDataset(torch.ones(8, width))


def failure(module: TrainModule, **arguments: Any) -> tuple[str, str]:
    """The type of what a fit raised, and all of its text, notes included."""
    try:
        Trainer(**{"max_steps": 4, "seed": 1, "progress": False, **arguments}).fit(module, rows(), batch_size=2)
    except Exception as exc:
        return type(exc).__name__, "".join(traceback.format_exception_only(exc))
    return "", ""


def test_a_batch_norm_over_one_row_is_explained_and_the_remedy_works() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))  # type: ignore[assignment]

    def fit(drop_last: bool) -> int:
        loader = DataLoader(TensorDataset(torch.rand(7, 4)), batch_size=3, drop_last=drop_last)
        return Trainer(max_epochs=1, progress=False).fit(Normed(), loader).steps

    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        fit(drop_last=False)
    assert "Pass train as a DataLoader with drop_last=True" in "".join(caught.value.__notes__)
    assert fit(drop_last=True) == 2


# ------------------------------------------------------------------------------------------------- devices


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4, device="meta")  # another device than the CPU, on every machine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.zeros(4, device="meta")
        return x * self.scale + shift


class Apart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.last(self.scaled(self.first(batch[0]).relu())).square().mean()


class TargetApart(Net):
    def training_step(self, batch: Any) -> torch.Tensor:
        target = torch.zeros(2, 4, device="meta")
        return torch.nn.functional.mse_loss(self.first(batch[0]), target)


def test_tensors_on_two_devices_are_named_with_their_layer() -> None:
    kind, text = failure(Apart())
    assert kind in ("RuntimeError", "NotImplementedError")
    assert (
        "computes on cpu, in forward of scaled, but these are on another device: scaled.scale (meta), shift (meta)."
        in text
    )
    assert "register_buffer" in text
    assert "device=self.device" in text


def test_a_tensor_made_in_the_step_is_named() -> None:
    _, text = failure(TargetApart())
    assert "in training_step of TargetApart, but these are on another device: target (meta)" in text


class Unregistered(Net):
    def configure_model(self) -> None:
        self.middle = torch.nn.Linear(4, 4)
        self.middle.mask = torch.ones(4)


def test_a_tensor_that_configure_model_did_not_register_is_refused() -> None:
    kind, text = failure(Unregistered())
    assert kind == "ConfigurationError"
    assert "middle.mask is a tensor that configure_model made and did not register" in text


# ------------------------------------------------------------------------------------------------- gradients


class Missing(Net):
    """`spare` is used by no step, `late` from the third update on, `frozen` on purpose by none."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.late, self.frozen = (torch.nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = self.first(batch[0])
        if self.trainer.step >= 2:
            x = self.late(x)
        with torch.no_grad():
            shift = self.spare(x)
        return self.last(x + shift).square().mean()


class Leaving(Net):
    """`early` is used by the first two updates only."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = self.first(batch[0])
        return self.last(self.early(x) if self.trainer.step < 2 else x).square().mean()


class LeavesOutTheLast(Leaving):
    """`early` is not used by the last micro-batch of the last of two updates of two micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.first(batch[0])
        leaves_out = self.trainer.step == 1 and batch_idx % 2 == 1
        return self.last(x if leaves_out else self.early(x)).square().mean()


def test_a_parameter_that_was_trained_before_a_resume_is_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Adam(Leaving):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    for steps in (3, 4):
        Trainer(max_steps=steps, progress=False, run_dir=tmp_path).fit(Adam(), rows(), batch_size=2)
    assert "no gradient reached" not in capsys.readouterr().err


def test_an_average_of_the_weights_gets_no_gradient_and_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Averaged(Net):
        def __init__(self) -> None:
            super().__init__()
            self.average = torch.optim.swa_utils.AveragedModel(self.first)

        def on_step(self) -> None:
            self.average.update_parameters(self.first)

    Trainer(max_steps=4, progress=False).fit(Averaged(), rows(), batch_size=2)
    assert "no gradient reached" not in capsys.readouterr().err


def test_a_parameter_that_no_gradient_reaches_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(max_steps=4, progress=False).fit(Missing(), rows(), batch_size=2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "no gradient reached" in line]
    assert len(lines) == 1
    assert "no gradient reached spare.weight, spare.bias in the updates up to step 4: they do not train" in lines[0]
    assert "freeze them with requires_grad_(False)" in lines[0]


class Late(Net):
    """Creates a layer in its step."""

    def training_step(self, batch: Any) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(4, 4)
        return super().training_step((self.late(batch[0]), *batch[1:]))


def test_a_layer_that_a_step_creates_and_no_optimizer_has_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(max_steps=2, progress=False).fit(Late(), rows(), batch_size=2)
    note = "late.weight, late.bias were created in the first update, and no optimizer has them: they do not train"
    assert capsys.readouterr().err.count(note) == 1


def test_nothing_is_told_where_every_parameter_trains(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(max_steps=4, progress=False).fit(Net(), rows(), batch_size=2)
    assert "no gradient" not in capsys.readouterr().err


class Backward(Net):
    def training_step(self, batch: Any) -> torch.Tensor:
        loss = super().training_step(batch)
        if self.trainer.step:  # in the first update it is refused
            loss.backward()
        return loss


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 4, sparse=True)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.table(batch[0].long()).square().mean()


def test_a_backward_of_the_users_own_is_explained() -> None:
    kind, text = failure(Backward())
    assert kind == "RuntimeError"
    assert "the loop calls backward on the loss that training_step returns; leave out a backward of your own" in text


def test_a_callback_that_logs_as_in_lightning_is_pointed_to_the_module() -> None:
    class Logs(Callback):
        def on_step(self) -> None:
            self.log("seen", 1.0)  # type: ignore[attr-defined]

    kind, text = failure(Net(), plugins=[Logs()])
    assert kind == "AttributeError"
    assert (
        "a plugin logs through the module: take module as an argument of the hook, and call module.log(name, value)"
        in text
    )


class WantsTheNorm(Callback):
    def on_step(self, grad_norm: float | None) -> None:
        pass


def test_the_norm_of_sparse_gradients_is_explained() -> None:
    kind, text = failure(Sparse(), plugins=[WantsTheNorm()])
    assert kind == "NotImplementedError"
    assert (
        "sparse gradients, those of an Embedding(sparse=True), have no norm that fabricate can compute; leave out max_grad_norm="
        in text
    )


class Functional(Net):
    """Uses a weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    def training_step(self, batch: Any) -> torch.Tensor:
        x = torch.nn.functional.linear(batch[0], self.blocks[0].weight)
        return self.last(self.first(x)).square().mean()


class Full(Net):
    """Runs out of memory in the first step."""

    def training_step(self, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")


class Counted(Callback):
    """How many collectives it takes to say what a rank of sharded parameters holds."""

    collectives = -1

    def on_step(self, module: TrainModule) -> None:
        with CommDebugMode() as collectives:
            FSDP().memory_per_rank(module, {"parameters": 100}, 2)
        self.collectives = collectives.get_total_counts()


def on_two_ranks() -> dict[str, tuple[str, str]]:
    counted = Counted()
    failure(Net(), strategy="fsdp", plugins=[counted])
    return {
        "collectives": (str(counted.collectives), ""),
        "missed": failure(Missing(), strategy="ddp"),
        "missed later": failure(Leaving(), strategy="ddp"),
        "missed last": failure(LeavesOutTheLast(), strategy="ddp", max_steps=2, gradient_accumulation_steps=2),
        "looked for": failure(Missing(), strategy="ddp:find_unused_parameters=true"),
        "looked for later": failure(Leaving(), strategy="ddp:find_unused_parameters=true"),
        "functional": failure(Functional(), strategy="fsdp"),
        "full": failure(Full(), strategy="fsdp"),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, tuple[str, str]]]:
    return run_ranks(on_two_ranks, 2)


REMEDY = "use strategy='ddp:find_unused_parameters=true', use them in every training_step, or freeze them with"


def test_parameters_that_ddp_misses_in_the_first_update_are_an_error(two: list[dict[str, tuple[str, str]]]) -> None:
    """Before the update: gradients in their bucket were not averaged."""
    for errors in two:
        kind, text = errors["missed"]
        assert kind == "ConfigurationError"
        assert "no gradient reached spare.weight, spare.bias, late.weight, late.bias in the first update" in text
        assert REMEDY in text


def test_parameters_that_ddp_misses_later_are_named(two: list[dict[str, tuple[str, str]]]) -> None:
    for errors in two:
        kind, text = errors["missed later"]
        assert kind == "ConfigurationError"
        assert "no gradient reached early.weight, early.bias in an update" in text
        assert REMEDY in text


def test_parameters_that_ddp_misses_in_the_last_micro_batch_of_an_update_are_named(
    two: list[dict[str, tuple[str, str]]],
) -> None:
    """They have gradients of earlier micro-batches, and their bucket was not averaged."""
    for errors in two:
        kind, text = errors["missed last"]
        assert kind == "RuntimeError"
        assert "no gradient reached early.weight, early.bias in an update" in text
        assert REMEDY in text


def test_ddp_looks_for_parameters_without_a_gradient_on_request(two: list[dict[str, tuple[str, str]]]) -> None:
    for errors in two:
        assert errors["looked for"] == errors["looked for later"] == ("", "")


def test_a_weight_used_outside_of_its_layer_is_explained_under_fsdp(two: list[dict[str, tuple[str, str]]]) -> None:
    for errors in two:
        kind, text = errors["functional"]
        assert kind == "RuntimeError"
        assert (
            "in training_step of Functional: strategy='fsdp' gathers a unit's parameters while its forward runs" in text
        )
        assert "call that layer (in a hook: inside trainer.in_forward)" in text


# ------------------------------------------------------------------------------------------------- memory


def test_a_rank_alone_can_say_what_takes_the_memory_of_its_shards(two: list[dict[str, tuple[str, str]]]) -> None:
    for errors in two:
        kind, text = errors["full"]
        assert kind == "OutOfMemoryError"
        assert "strategy='fsdp' keeps about " in text
        assert "start more ranks, strategy='fsdp:activation_checkpointing=true' or " in text
        assert errors["collectives"] == ("0", "")


# ------------------------------------------------------------------------------------------------- errors of a device's own work


class Asserts(Net):
    """As where an index is out of range on a GPU: the error comes up in a later call."""

    evaluates = False

    def training_step(self, batch: Any) -> torch.Tensor:
        if not self.evaluates:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_an_error_that_a_device_reports_late_says_so() -> None:
    kind, text = failure(Asserts())
    assert kind == "AcceleratorError"
    assert "the batch was" in text
    assert "or one before it" in text
    assert "a device runs asynchronously and reports its errors some calls later, so the" in text
    assert "run once with CUDA_LAUNCH_BLOCKING=1 in the environment, or a few steps on a CPU" in text


def test_the_end_of_an_evaluation_does_not_touch_a_device_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fabricate.training.evaluations import evaluation

    touched: list[object] = []
    monkeypatch.setattr(evaluation, "set_rng_state", touched.append)
    module = Asserts()
    module.evaluates = True
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        Trainer(max_steps=1, progress=False).validate(module, rows(), batch_size=2)
    assert touched == []


def test_a_derivative_in_an_evaluation_is_explained() -> None:
    class Physics(Net):
        def validation_step(self, batch: Any) -> dict[str, Any]:
            x = batch[0].requires_grad_()
            (slope,) = torch.autograd.grad(self.last(self.first(x)).sum(), x)
            return {"loss": slope.square().mean()}

    with pytest.raises(RuntimeError) as caught:
        Trainer(max_steps=1, progress=False).validate(Physics(), rows(), batch_size=2)
    assert "evaluations run without gradients" in "".join(caught.value.__notes__)
    assert "with torch.enable_grad()" in "".join(caught.value.__notes__)
