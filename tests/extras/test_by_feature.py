"""examples/transformers/by_feature.py: the losses of a loop with Accelerate alone, whatever is added to the training.

`python -m campaigns.by_feature --source CHECKOUT` compares each with Accelerate's own example.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from campaigns.by_feature.sides import Recorder, own_state
from campaigns.transformers_scripts.sides import load
from fabricate import Trainer


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    with own_state():
        yield


def by_accelerate(folder: Path, script: Any, accumulation: int = 1) -> list[float]:
    """The loss of every micro-batch, in the way of Accelerate's examples."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    name = script.tiny_model(folder / script.CLASSIFIER, script.CLASSIFIER)
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = load("tiny").tiny_rows("pairs", "train")
    texts = [[row[column] for row in rows] for column in ("sentence1", "sentence2")]
    tokens = tokenizer(*texts)
    features = [{**{key: tokens[key][at] for key in tokens}, "labels": row["label"]} for at, row in enumerate(rows)]
    loader = DataLoader(features, 16, collate_fn=lambda rows: tokenizer.pad(rows, return_tensors="pt"))  # type: ignore[arg-type, var-annotated]
    model = AutoModelForSequenceClassification.from_pretrained(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 100, 3 * len(loader))
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for batch in itertools.chain.from_iterable(batches for _ in range(3)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_fabricate(folder: Path, script: Any, feature: str) -> tuple[list[float], dict[str, float]]:
    """The same of a method of the script, and what it returns."""
    recorder = Recorder(feature)

    def recording(**arguments: Any) -> Trainer:
        return Trainer(**arguments | {"plugins": [*arguments.get("plugins", []), recorder]}, progress=False)

    script.Trainer = recording
    metrics = script.main([feature, "--run", str(folder), "--no-shuffle"])
    return recorder.losses, metrics


@pytest.mark.parametrize("feature", ["memory", "tracking", "profiler", "checkpointing", "multi_process_metrics"])
def test_what_is_added_to_a_training_leaves_it_as_it_was(feature: str, tmp_path: Path) -> None:
    script = load("by_feature")
    losses, metrics = by_fabricate(tmp_path, script, feature)
    assert losses == pytest.approx(by_accelerate(tmp_path, script), rel=1e-6)
    assert {"val_accuracy", "val_f1"} <= metrics.keys()
    if feature == "checkpointing":
        assert by_fabricate(tmp_path, script, feature)[0] == [], "the same call finds the run complete"


def test_accumulation_is_the_same_up_to_the_short_window_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    script = load("by_feature")
    losses, _ = by_fabricate(tmp_path, script, "gradient_accumulation")
    theirs = by_accelerate(tmp_path, script, accumulation=2)
    assert losses[:7] == pytest.approx(theirs[:7], rel=1e-6)
    assert len(losses) == len(theirs) == 21


def test_a_training_ends_when_its_loss_stays_where_it_is(tmp_path: Path) -> None:
    script = load("by_feature")
    losses, _ = by_fabricate(tmp_path, script, "early_stopping")
    lowest = losses.index(min(losses))
    assert len(losses) - lowest - 1 == 5
    assert losses == pytest.approx(by_accelerate(tmp_path, script)[: len(losses)], rel=1e-6)


@pytest.mark.parametrize(
    ("feature", "updates"),
    [
        ("automatic_gradient_accumulation", 3),
        ("cross_validation", 3 * 3 * 5),
        ("gradient_accumulation_for_autoregressive_models", 3 * 13),
    ],
)
def test_features_that_are_not_compared_run_to_their_end(feature: str, updates: int, tmp_path: Path) -> None:
    losses, metrics = by_fabricate(tmp_path, load("by_feature"), feature)
    assert len(losses) == (2 * updates if "autoregressive" in feature else updates)
    assert metrics
