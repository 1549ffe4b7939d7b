"""The examples that docs/from-accelerate.md names, how each is run, and what is known to differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """An example of Accelerate and its method in examples/transformers/by_feature.py.

    does: for the page. arguments: of Accelerate's script. rows: of the training set. ranks: on a CPU, over gloo. warmup: of fabricate's
    schedule, in updates. equal: up to which loss the two are the same, None for all. reason: why they differ then.
    """

    does: str
    arguments: str = ""
    rows: int = 800
    ranks: int = 1
    warmup: int = 100
    equal: int | None = None
    reason: str = ""


CASES = {
    "gradient_accumulation": Case(
        "`Trainer(gradient_accumulation_steps=2)`",
        "--gradient_accumulation_steps 2",
        rows=808,  # 51 batches: the last window of an epoch has one
        equal=51,
        reason="the last window of an epoch has one batch of two: Accelerate divides its gradient by two all the same",
    ),
    "automatic_gradient_accumulation": Case("`find_executable_batch_size` around `fit`, `Trainer(global_batch_size=256)`"),
    "gradient_accumulation_for_autoregressive_models": Case(
        "`return self.model(**batch).loss`: the loss weighs the labels that it counts",
        "--gradient_accumulation_steps 4 --per_device_batch_size 2",
        reason="compared with a `weight` that counts as theirs does: its collator shifts the labels, the model shifts them again, and one "
        "label per row too many is counted",
    ),
    "checkpointing": Case("`Trainer(run_dir=..., save_every=\"1 epoch\")`: the same call resumes", "--checkpointing_steps epoch"),
    "early_stopping": Case(
        "a `Callback` with `on_step`, which calls `trainer.stop(reason)`; `EarlyStopping` by a validation metric",
        reason="theirs leaves the epoch only, and makes one update more in each epoch that is left",
    ),
    "multi_process_metrics": Case(
        "nothing: `compute_metrics` gets every row once",
        ranks=2,
        warmup=50,
        reason="`warmup=50`: a prepared scheduler advances once per process and update, so that its 100 are 50 updates on two ranks",
    ),
    "cross_validation": Case("a loop over `fit` and `predict`"),
    "memory": Case("`find_executable_batch_size` around `fit`"),
    "tracking": Case("`Trainer(trackers=[\"tensorboard\"])`", "--with_tracking --project_dir logs"),
    "profiler": Case("`Trainer(plugins=[Profiler()])`"),
}  # fmt: skip
