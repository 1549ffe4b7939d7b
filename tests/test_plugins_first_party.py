"""The distributions in plugins/, installed: their arithmetic, their refusals, and a resume on two ranks."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, ConfigurationError, SaveOnException, StochasticWeightAveraging, Trainer, TrainModule
from fabricate.checkpoint.convert.exporting import export
from fabricate.testing import run_ranks

ROOT = Path(__file__).parent.parent
ROWS = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


class Net(TrainModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, width)
        self.drop = torch.nn.Dropout(0.1)
        self.second = torch.nn.Linear(width, 16)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.second(self.drop(torch.tanh(self.first(batch)))) - batch[:, :16]).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"bias": self.second(torch.zeros_like(batch)).sum(1).mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Recorded(Callback):
    """The whole weights after each update, and at the end."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.final: dict[str, torch.Tensor] = {}

    def on_step(self, trainer: Trainer, module: TrainModule) -> None:
        self.weights.append(_gathered(trainer, module))

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.final = _gathered(trainer, module)


def _gathered(trainer: Trainer, module: TrainModule) -> dict[str, torch.Tensor]:
    return {name: trainer.strategy.gather(p).clone() for name, p in module.named_parameters()}


def _weights(module: TrainModule) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _fit(
    run_dir: Path | None, steps: int, resume: str = "auto", plugins: tuple[object, ...] = (), **arguments: Any
) -> Any:
    torch.manual_seed(0)
    module, recorded = Net(), Recorded()
    trainer = Trainer(
        run_dir=run_dir,
        max_steps=steps,
        seed=3,
        save_every="3 steps",
        keep="all",
        validate_every="3 steps",
        progress=False,
        print_plan="full",
        plugins=[*plugins, recorded],
        **arguments,
    )
    result = trainer.fit(module, ROWS, ROWS[:16], batch_size=4, resume=resume)
    return result.metrics, recorded.weights, recorded.final


def _interrupted(root: Path, **arguments: Any) -> Any:
    """A whole run of seven updates, and one that resumes after the third."""
    whole = _fit(root / "whole", 7, **arguments)
    checkpoint = str(root / "whole" / "checkpoints" / "step-00000003")
    return whole, _fit(root / "resumed", 7, checkpoint, **arguments)


def _exported(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "model" / "model.safetensors")


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_an_average_is_validated_exported_and_resumed_bit_for_bit(tmp_path: Path, strategy: str) -> None:
    ranks = run_ranks(_interrupted, 2, tmp_path, strategy=strategy, plugins=("ema:decay=0.5,start=1",))
    for (metrics, steps, final), (resumed_metrics, resumed_steps, resumed_final) in ranks:
        average, at_validation = steps[0], steps[0]
        for step, weights in enumerate(steps[1:], 2):
            average = {name: value.lerp(weights[name], 0.5) for name, value in average.items()}
            at_validation = average if step == 6 else at_validation
        exported = _exported(tmp_path / "whole")
        for name, value in average.items():
            torch.testing.assert_close(exported[name], value)
        assert metrics["val_bias"] == pytest.approx(float(at_validation["second.bias"].sum()), rel=1e-4)
        assert _equal(final, steps[-1])
        assert _equal(final, resumed_final)
        assert all(map(_equal, steps[3:], resumed_steps))
        assert metrics == resumed_metrics
        assert _equal(exported, _exported(tmp_path / "resumed"))
    assert "stores another value" not in (tmp_path / "whole" / "events.jsonl").read_text()


def test_the_best_checkpoint_is_loaded_with_its_average(tmp_path: Path) -> None:
    measured: dict[int, dict[str, torch.Tensor]] = {}

    class Best(Net):
        def validation_step(self, batch: torch.Tensor) -> dict[str, Any]:
            measured[self.trainer.step] = _weights(self)
            return {"loss": abs(self.trainer.step - 4)}

    keep = {"last": 1, "best": 1, "metric": "val_loss"}
    options: dict[str, Any] = {"run_dir": tmp_path, "keep": keep, "plugins": ["ema:decay=0.9"], "progress": False}
    module = Best()
    trainer = Trainer(max_steps=8, validate_every=2, save_every=2, load_best=True, sanity_batches=0, **options)
    result = trainer.fit(module, ROWS, ROWS[:16], batch_size=4)
    assert result.best_checkpoint is not None
    assert _equal(_exported(tmp_path), measured[4])
    assert _equal(_weights(module), _weights(Best.load_from_checkpoint(result.best_checkpoint)))
    in_fit = measured.pop(4)
    Trainer(**options).validate(Best(), ROWS[:16], checkpoint="best", batch_size=4)
    assert _equal(measured[4], in_fit)


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_without_their_average_get_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights_only: bool
) -> None:
    def trainer(*plugins: str, **options: Any) -> Trainer:
        return Trainer(run_dir=tmp_path, progress=False, print_plan="none", seed=1, plugins=plugins, **options)

    keep = {"last": 1, "best": 1, "metric": "val_bias", "mode": "max"}
    fits = trainer("ema:decay=0.9", max_steps=8, validate_every=2, keep=keep, save_weights_only=weights_only)
    result = fits.fit(Net(), ROWS, ROWS[:16], batch_size=4)
    capsys.readouterr()
    with_it = trainer("ema:decay=0.9").validate(Net(), ROWS[:16], "best", batch_size=4)
    assert with_it["val_bias"] == pytest.approx(result.best_score)
    assert "beside the weights" not in capsys.readouterr().err
    trainer().validate(Net(), ROWS[:16], "best", batch_size=4)
    Net.load_from_checkpoint(tmp_path)
    output = capsys.readouterr()
    for text in (output.err, output.out):
        assert "also holds the state of the plugin ema" in text
    assert "the plugin ema" in "".join(export(tmp_path, tmp_path / "weights", "safetensors"))


def test_a_fit_that_fails_while_the_average_is_validated_saves_its_weights(tmp_path: Path) -> None:
    class Fails(Net):
        def validation_step(self, batch: torch.Tensor) -> dict[str, Any]:
            raise ZeroDivisionError("the user's own")

    def trained(kind: type[Net], run_dir: Path) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module, plugins = kind(), ["ema:decay=0.9", SaveOnException()]
        trainer = Trainer(max_steps=4, seed=1, run_dir=run_dir, validate_every=2, sanity_batches=0, plugins=plugins)
        trainer.fit(module, ROWS, ROWS[:4], batch_size=4)
        return _weights(module)

    with pytest.raises(ZeroDivisionError):
        trained(Fails, tmp_path / "failed")
    assert _equal(trained(Net, tmp_path / "failed"), trained(Net, tmp_path / "straight"))
    assert _equal(_exported(tmp_path / "failed"), _exported(tmp_path / "straight"))


def test_an_average_of_half_precision_weights_is_rounded_once() -> None:
    torch.manual_seed(0)
    module, weights = Net().bfloat16(), list[torch.Tensor]()
    average: list[torch.Tensor] = [module.second.bias.detach().float()]

    class Looks(Callback):
        def on_step(self, module: TrainModule) -> None:
            average.append(average[-1].lerp(_weights(module)["second.bias"].float(), 0.001))

        def on_eval_end(self, module: TrainModule) -> None:
            weights.append(_weights(module)["second.bias"])

    trainer = Trainer(plugins=[Looks(), "ema:decay=0.999"], max_steps=100, validate_every="100 steps", progress=False)
    trainer.fit(module, ROWS.bfloat16(), ROWS.bfloat16(), batch_size=4)
    torch.testing.assert_close(weights[0].float(), average[-1], rtol=0.004, atol=1e-6)  # half of bfloat16's spacing
    assert (average[-1] - average[0]).abs().max() > 0.002
    assert module.second.bias.dtype == torch.bfloat16


def test_a_second_average_is_refused() -> None:
    refused = _refused(plugins=("ema", StochasticWeightAveraging(0.1, "1 steps")))
    assert "each of them averages the weights, but a fit ends with one average. Leave out all but one" in refused
    assert "ema" in refused
    assert "StochasticWeightAveraging" in refused


def test_an_average_that_is_validated_at_the_end_is_what_is_exported(tmp_path: Path) -> None:
    class Validates(Callback):
        def on_complete(self, trainer: Trainer) -> None:
            trainer.request_eval()

    trainer = Trainer(plugins=["ema:decay=0.5", Validates()], max_steps=4, run_dir=tmp_path, seed=1, progress=False)
    metrics = trainer.fit(Net(), ROWS, ROWS, batch_size=4).metrics
    assert metrics["val_bias"] == pytest.approx(float(_exported(tmp_path)["second.bias"].sum()), rel=1e-5)


def test_an_average_over_drifting_replicas_is_refused() -> None:
    (error, _) = run_ranks(_refused, 2, strategy="diloco", plugins=("ema",))
    assert "plugin ema: weights differ between ranks under strategy='diloco', so they cannot be averaged" in error


def test_replicas_drift_meet_and_resume_bit_for_bit(tmp_path: Path) -> None:
    ranks = run_ranks(_interrupted, 2, tmp_path, strategy="diloco:every=2")
    (_, first, final), _ = ranks[0]
    (_, second, _), _ = ranks[1]
    together = [_equal(one, other) for one, other in zip(first, second, strict=True)]
    assert together == [False, True, False, True, False, True, False]
    mean = {name: (value + second[-1][name]) / 2 for name, value in first[-1].items()}
    assert _equal(_exported(tmp_path / "whole"), final)
    for name, value in mean.items():
        torch.testing.assert_close(final[name], value)
    for (metrics, steps, end), (resumed_metrics, resumed_steps, resumed_end) in ranks:
        assert all(map(_equal, steps[3:], resumed_steps))
        assert _equal(end, resumed_end)
        assert metrics == resumed_metrics


def _outer(strategy: str) -> Any:
    return _fit(None, 4, strategy=strategy)[1]


def test_the_outer_step_is_nesterov_momentum_on_the_mean_movement() -> None:
    plain = run_ranks(_outer, 2, "diloco:every=4,outer_lr=1.0,outer_momentum=0.0")[0]
    moved = run_ranks(_outer, 2, "diloco:every=4,outer_lr=0.5,outer_momentum=0.9")[0]
    torch.manual_seed(0)
    start = _weights(Net())
    for name, value in start.items():  # the first outer step: momentum is the movement itself
        torch.testing.assert_close(moved[-1][name], value + 0.5 * 1.9 * (plain[-1][name] - value))


def _refused(**arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        _fit(None, 3, **arguments)
    return str(caught.value)


def test_replicas_refuse_a_loss_scale_of_their_own() -> None:
    (error, _) = run_ranks(_refused, 2, strategy="diloco", precision="fp16")
    assert "use precision='bf16' or 'fp32'" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"strategy": "diloco:every=0"},
            ": give every of at least 1, outer_lr above 0, and outer_momentum of at least 0",
        ),
        ({"plugins": ("ema:decay=1.5",)}, ": give decay of at least 0 and below 1, and start of at least 0"),
        ({"precision": "fp8"}, "cpu does not compute in float8"),
        ({"precision": "fp8:backend=te"}, "needs the package transformer_engine"),
        ({"precision": "fp8:backend=te,emulate=true"}, "cannot emulate"),
        ({"precision": "fp8:emulate=true,skip=."}, "no linear layer to convert: both sizes have to be multiples of 16"),
    ],
)
def test_what_cannot_run_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    assert message in _refused(**arguments)


def test_float8_is_emulated_when_asked_and_the_plan_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    _, whole, _ = _fit(None, 3)
    _, rounded, final = _fit(None, 3, precision="fp8:emulate=true,skip=second")
    assert "1 linear layers by torchao, tensorwise; emulated" in capfd.readouterr().out
    assert final.keys() == whole[-1].keys()
    assert not _equal(rounded[-1], whole[-1])
    for name, value in whole[-1].items():
        torch.testing.assert_close(rounded[-1][name], value, rtol=0.1, atol=0.05)


def _twice(strategy: str, second: str) -> Any:
    """One module trained in float8 and then in another precision; its layers in between and the error of the second fit."""
    module, error = Net(), ""
    names = list(module.state_dict())
    for precision in ("fp8:emulate=true", second):
        trainer = Trainer(strategy=strategy, precision=precision, max_steps=2, seed=3, progress=False)
        try:
            trainer.fit(module, ROWS, batch_size=4)
        except ConfigurationError as exc:
            error = str(exc)
    assert list(module.state_dict()) == names
    return type(module.first).__name__, error


def test_a_module_has_its_plain_layers_again_after_a_fit_in_float8() -> None:
    assert _twice("single", "fp32") == ("Linear", "")
    assert run_ranks(_twice, 2, "ddp", "fp32") == [("Linear", "")] * 2


def test_a_sharded_module_keeps_its_layers_and_refuses_a_precision_that_needs_others() -> None:
    ((kind, error), _) = run_ranks(_twice, 2, "fsdp", "fp32")
    assert "Float8Linear" in kind
    assert "was prepared for precision='fp8'" in error
    ((_, error), _) = run_ranks(_twice, 2, "fsdp", "fp8:emulate=true")
    assert error == ""


def test_what_was_trained_in_float8_is_in_the_plain_layers() -> None:
    torch.manual_seed(0)
    module = Net()
    before = _weights(module)
    Trainer(precision="fp8:emulate=true", max_steps=2, seed=3, progress=False).fit(module, ROWS, batch_size=4)
    assert type(module.first) is torch.nn.Linear
    assert not any(torch.equal(value, before[name]) for name, value in _weights(module).items())
    assert module.first.training


@pytest.mark.parametrize(
    "core",
    ["ema/src/fabricate_ema.py", "diloco/src/fabricate_diloco/strategy.py", "fp8/src/fabricate_fp8/precision.py"],
)
def test_the_core_of_a_plugin_is_at_most_60_lines_of_code(core: str) -> None:
    """Lines that hold code; imports, docstrings, comments and blank lines do not count."""
    text = (ROOT / "plugins" / f"fabricate-{core}").read_text(encoding="utf-8")
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        documentation = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if documentation or typing_only or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    assert len(lines) <= 60
