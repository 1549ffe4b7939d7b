"""Runs of Accelerate's example and of fabricate's, and their outcomes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file

from campaigns.by_feature.cases import CASES
from campaigns.transformers_scripts.sides import ROOT, STAND_INS, load, own_state
from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import run_ranks

LANGUAGE = "gradient_accumulation_for_autoregressive_models"
_UPDATE = re.compile(r"update step \d+:: grad norm: (\S+) ::train loss: (\S+)")


@dataclass(frozen=True)
class Outcome:
    """losses: of every micro-batch, the mean over ranks; for the language model, of every update, each followed by the gradient's norm.
    weights: at the end. metrics: of the last validation, or as returned by the script."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


# ------------------------------------------------------------------------------------------------------------- model and data


def write_hub(folder: Path, rows: int) -> None:
    """Write a tiny model and data under the hub names that the examples use, which are found relative to the working directory."""
    tiny = load("tiny")
    tiny.tiny_model(folder / "bert-base-cased", "BertForSequenceClassification")
    (folder / "HuggingFaceTB").mkdir()
    tiny.tiny_model(folder / "HuggingFaceTB" / "SmolLM-360M", "LlamaForCausalLM")
    for data, configuration, task, number in (
        ("nyu-mll/glue", "mrpc", "pairs", rows),
        ("Salesforce/wikitext", "wikitext-2-v1", "text", 510),
    ):
        place = folder / data
        files = {"train": number, "validation": 72, "test": 36}
        for split, count in files.items():
            examples = tiny.tiny_rows(task, split, count)
            numbered = [row if task == "text" else {**row, "idx": number} for number, row in enumerate(examples)]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered), encoding="utf-8")
        paths = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in files)
        page = f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{paths}---\n"
        (place / "README.md").write_text(page, encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- by Accelerate


def by_accelerate(name: str, folder: Path, source: Path, *more: str) -> Outcome:
    """The outcome of Accelerate's script, unmodified, in separate processes."""
    case, script = CASES[name], source / "examples" / "by_feature" / f"{name}.py"
    path = f"{STAND_INS}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["HF_DATASETS_CACHE"] = str(folder / "cache")
    launch = [sys.executable]
    if case.ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    call = [*launch, "-m", "campaigns.by_feature.recorder", str(folder / "theirs"), str(script), "--cpu"]
    process = subprocess.run(
        [*call, *case.arguments.split(), *more],
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
    noted = [json.loads((folder / f"theirs-{rank}.json").read_text()) for rank in range(case.ranks)]
    losses = [sum(each) / case.ranks for each in zip(*noted, strict=True)]
    if name == LANGUAGE:
        losses = [float(number) for norm, loss in _UPDATE.findall(process.stdout) for number in (loss, norm)]
    lines = re.findall(r"^(?:epoch \d+|Average test metrics from all folds): (\{.+\})$", process.stdout, re.MULTILINE)
    return Outcome(losses, load_file(folder / "theirs-0.safetensors"), ast.literal_eval(lines[-1]) if lines else {})


# ----------------------------------------------------------------------------------------------------------- by fabricate


class Recorder(Callback):
    """The losses of a rank, and the weights at the end of a fit. stop_after: epochs after which the fit stops, to be resumed."""

    def __init__(self, name: str, stop_after: int | None = None) -> None:
        self.by_update, self.stop_after = name == LANGUAGE, stop_after
        self.losses: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_accumulate(self, loss: torch.Tensor) -> None:
        if not self.by_update:
            self.losses.append(float(loss))

    def on_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        if self.by_update:
            self.losses += [float(loss), float(grad_norm)]

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        if epoch + 1 == self.stop_after:
            trainer.stop("to resume")

    def on_fit_end(self, module: TrainModule) -> None:
        self.weights = {n.removeprefix("model."): p.detach().clone() for n, p in module.named_parameters()}


def fitted(name: str, folder: str, stop_after: int | None = None) -> Outcome:
    """The outcome of the method of by_feature.py, on this rank."""
    script, recorder = load("by_feature"), Recorder(name, stop_after)

    def recording(**arguments: Any) -> Trainer:
        plugins = [*arguments.pop("plugins", []), recorder]
        return Trainer(
            **arguments, plugins=plugins, progress=False, print_plan="none", precision="fp32", sanity_batches=0
        )

    script.Trainer = recording  # type: ignore[attr-defined]
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    options = ["--model", f"{folder}/bert-base-cased", "--glue", f"{folder}/nyu-mll/glue", "--run", f"{folder}/ours"]
    options += ["--writer", f"{folder}/HuggingFaceTB/SmolLM-360M", "--wikitext", f"{folder}/Salesforce/wikitext"]
    with own_state():
        metrics = script.main([name, *options, "--no-shuffle", "--warmup", str(CASES[name].warmup)])
    return Outcome(recorder.losses, recorder.weights, {n.removeprefix("val_"): v for n, v in metrics.items()})


def by_fabricate(name: str, folder: Path, stop_after: int | None = None) -> Outcome:
    """The outcome of the method of by_feature.py on all ranks of the case."""
    case = CASES[name]
    if case.ranks == 1:
        return fitted(name, str(folder), stop_after)
    ranks = run_ranks(fitted, case.ranks, name, str(folder))
    return Outcome(_means(rank.losses for rank in ranks), ranks[0].weights, ranks[0].metrics)


def _means(losses: Iterator[list[float]]) -> list[float]:
    together = list(losses)
    return [sum(each) / len(together) for each in zip(*together, strict=True)]


def start(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The weights before training."""
    place = "HuggingFaceTB/SmolLM-360M" if name == LANGUAGE else "bert-base-cased"
    return load_file(folder / place / "model.safetensors")
