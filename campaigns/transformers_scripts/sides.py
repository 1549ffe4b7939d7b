"""Runs of each side: fabricate's script, transformers.Trainer on the same model and data, and transformers' own script. The outcome of a
side is the loss of every update, and the metrics of the evaluation at the end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

from campaigns.transformers_scripts.cases import CASES, COMMON, Case

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "transformers"
STAND_INS = Path(__file__).parent / "stand_ins"


@dataclass(frozen=True)
class Outcome:
    """losses: of each update. metrics: of the last evaluation, without a prefix."""

    losses: list[float]
    metrics: dict[str, float]


class Captured(Exception):
    """The arguments that a script passes to `Trainer.fit`."""


class Capturing:
    """A Trainer that raises the arguments of `fit` instead of a fit."""

    def __init__(self, **arguments: Any) -> None:
        pass

    def fit(self, module: Any, train: Any, val: Any, resume: str) -> None:
        raise Captured(module, train, val)


def load(name: str) -> ModuleType:
    """A script of examples/transformers as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # HfArgumentParser looks up the types of fields there
    spec.loader.exec_module(module)
    return module


def command(case: Case, folder: Path, output: str) -> list[str]:
    """The command line of a case, with its model and data written to `folder`."""
    tiny = load("tiny")
    model = tiny.tiny_model(folder / case.kind, case.kind)
    files = [
        tiny.write_rows(folder / f"{case.task}-{split}.json", case.task, split) for split in ("train", "validation")
    ]
    paths = ["--model_name_or_path", model, "--train_file", files[0], "--validation_file", files[1]]
    return [*COMMON.split(), *case.arguments.split(), *paths, "--output_dir", str(folder / output)]


@contextlib.contextmanager
def own_state() -> Iterator[None]:
    """Restore the state of the process that TrainingArguments and Trainer change."""
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@contextlib.contextmanager
def masks_by_content() -> Iterator[None]:
    """Make `DataCollatorForLanguageModeling` draw masks from the tokens of the batch instead of the state of a generator."""
    kind = transformers.DataCollatorForLanguageModeling
    before = kind.torch_mask_tokens

    def masked(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(int((inputs * torch.arange(1, inputs.numel() + 1).view_as(inputs)).sum()))
            return before(self, inputs, *args, **kwargs)

    kind.torch_mask_tokens = masked  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.torch_mask_tokens = before  # type: ignore[method-assign]


def by_fabricate(name: str, folder: Path) -> Outcome:
    """The outcome of the script of examples/transformers."""
    case = CASES[name]
    with own_state(), masks_by_content():
        metrics = load(case.script).main(command(case, folder, "ours"))
    lines = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["metrics"]["loss"] for line in lines if line["stage"] == "train"]
    return Outcome(losses, {name.removeprefix("val_"): value for name, value in metrics.items()})


def by_trainer(name: str, folder: Path) -> Outcome:
    """The outcome of `transformers.Trainer` with the model, data and collator of the script of examples/transformers."""
    script, argv = load(CASES[name].script), command(CASES[name], folder, "trainer")
    seq2seq = CASES[name].script == "run_summarization"
    kind = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    script.Trainer = Capturing  # type: ignore[attr-defined]
    with own_state(), masks_by_content():
        try:
            script.main(argv)
        except Captured as captured:
            module, train, val = captured.args
        _, args = transformers.HfArgumentParser((script.Options, kind)).parse_args_into_dataclasses(argv)
        if seq2seq:
            args.generation_max_length = module.generate["max_length"]
        module.configure_model()
        trainer = (transformers.Seq2SeqTrainer if seq2seq else transformers.Trainer)(
            model=module.model,
            args=args,
            train_dataset=train.dataset,
            eval_dataset=val.dataset,
            data_collator=train.collate_fn,
            processing_class=module.tokenizer,
            compute_metrics=lambda prediction: _computed(CASES[name].script, module, prediction),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        metrics = trainer.evaluate()
    return _outcome(trainer.state.log_history, metrics)


def _computed(name: str, module: Any, prediction: Any) -> dict[str, float]:
    """The module's metrics, computed from the outputs that `transformers.Trainer` gathered."""
    predictions, labels = prediction.predictions, prediction.label_ids
    if name in ("run_clm", "run_mlm"):
        predictions = predictions[0] if isinstance(predictions, tuple) else predictions
        cut = (slice(None, -1), slice(1, None)) if name == "run_clm" else (slice(None), slice(None))
        guessed, wanted = predictions.argmax(-1)[:, cut[0]], labels[:, cut[1]]
        return {"accuracy": float((guessed == wanted)[wanted != -100].mean())}
    if name == "run_glue":
        outputs = zip(torch.tensor(predictions.argmax(-1)), torch.tensor(labels), strict=True)
    elif name == "run_qa":
        outputs = zip(torch.tensor(predictions[0]), torch.tensor(predictions[1]), strict=True)
    else:
        tokens = predictions[0] if isinstance(predictions, tuple) else predictions
        texts = [module.texts(torch.tensor(np.asarray(each))) for each in (tokens, labels)]
        outputs = zip(*texts, strict=True)
    computed: dict[str, float] = module.compute_metrics(list(outputs))
    return computed


def by_their_script(name: str, folder: Path, source: Path) -> Outcome:
    """The outcome of transformers' own script, unmodified, in a separate process. `evaluate` and `nltk` are replaced by modules that need
    no network."""
    script = source / "examples" / "pytorch" / CASES[name].folder / f"{CASES[name].script}.py"
    environment = os.environ | {"PYTHONPATH": f"{STAND_INS}:{script.parent}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    call = [sys.executable, "-m", "campaigns.transformers_scripts.their_script", str(script)]
    process = subprocess.run(
        [*call, *command(CASES[name], folder, "theirs")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if process.returncode != 0:
        raise RuntimeError(
            f"{script} ended with {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
        )
    state = json.loads((folder / "theirs" / "trainer_state.json").read_text())
    return _outcome(state["log_history"], json.loads((folder / "theirs" / "eval_results.json").read_text()))


def _outcome(history: list[dict[str, Any]], metrics: dict[str, float]) -> Outcome:
    losses = [line["loss"] for line in history if "loss" in line]
    return Outcome(losses, {name.removeprefix("eval_"): value for name, value in metrics.items()})
