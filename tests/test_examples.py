"""The examples, each in a separate process with fewer steps, checked by their results. `tests/extras` has the language models."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(example: str, *arguments: str, directory: Path) -> str:
    """What `python examples/EXAMPLE ARGUMENTS` printed in `directory`."""
    return run_script(EXAMPLES / example, *arguments, directory=directory)


def metrics(run_dir: Path, stage: str, name: str) -> dict[int, float]:
    """A metric's values by step, from metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"][name] for line in lines if line["stage"] == stage}


def test_every_example_is_short_and_run_here() -> None:
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert scripts == [
        "chats.py",
        "demo.py",
        "demo_text.py",
        "diffusion.py",
        "digits.py",
        "dpo.py",
        "export_onnx.py",
        "gan.py",
        "generate.py",
        "llama.py",
        "lora_classifier.py",
        "qlora.py",
        "regression.py",
        "serve.py",
        "sft.py",
        "sweep.py",
        "vision.py",
    ]
    for name in scripts:
        assert len((EXAMPLES / name).read_text().splitlines()) < 120, name


def test_regression_learns_the_function_and_reports_it(tmp_path: Path) -> None:
    printed = run("regression.py", "--run-dir", "here", directory=tmp_path)
    losses = metrics(tmp_path / "here", "validate", "val_loss")
    assert list(losses) == [0, 130, 260, 390]  # 13 updates an epoch: the batch of 4 at its end is one too
    assert losses[0] > 2
    assert losses[390] < 0.1
    assert f"390 steps, validation loss {losses[390]:.4f}" in printed


def test_a_diffusion_model_learns_the_noise_and_draws_digits(tmp_path: Path) -> None:
    printed = run("diffusion.py", "--run-dir", "here", "--max-epochs", "5", directory=tmp_path).splitlines()
    losses = list(metrics(tmp_path / "here", "train", "loss").values())
    assert losses[-1] < 0.5 * losses[0]
    drawn = [line for line in printed if len(line) == 4 * 16 + 3 * 3]
    assert len(drawn) >= 8


def test_digits_are_recognised_and_training_is_shown_in_tensorboard(tmp_path: Path) -> None:
    arguments = ("--max-epochs", "4", "--run-dir", "here", "--tensorboard")
    printed = run("digits.py", *arguments, directory=tmp_path)
    accuracy = metrics(tmp_path / "here", "validate", "val_accuracy")
    assert accuracy[180] > 0.9
    match = re.search(r"accuracy (\S+), (\d+) of 360 digits right", printed)
    assert match is not None
    assert float(match[1]) == round(int(match[2]) / 360, 4) == round(accuracy[180], 4)
    assert list((tmp_path / "here").rglob("events.out.tfevents.*"))


def test_the_gan_comes_near_to_the_distribution(tmp_path: Path) -> None:
    printed = run("gan.py", "--max-steps", "1000", directory=tmp_path)
    for name, allowed in (("mean", 0.25), ("std", 0.35)):
        match = re.search(rf"{name}: generated (\S+) (\S+), wanted (\S+) (\S+)", printed)
        assert match is not None
        values, wanted = [float(match[1]), float(match[2])], [float(match[3]), float(match[4])]
        assert max(abs(a - b) for a, b in zip(values, wanted, strict=True)) < allowed, printed
