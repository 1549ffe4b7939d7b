"""The examples in docs/from-accelerate.md, how each is run, and the known differences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """An example of Accelerate and its method in examples/transformers/by_feature.py.

    does: description for the page. arguments: for Accelerate's script. rows: size of the training set. ranks: on a CPU, over gloo. warmup:
    updates of warmup in fabricate's schedule. equal: number of first losses that are the same, None for all. reason: why later ones differ.
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
        reason="the last window of an epoch has one batch instead of two, and Accelerate still divides its gradient by two",
    ),
    "automatic_gradient_accumulation": Case("`find_executable_batch_size` around `fit`, `Trainer(global_batch_size=256)`"),
    "gradient_accumulation_for_autoregressive_models": Case(
        "`return self.model(**batch).loss`: the weight is the number of labels in the loss",
        "--gradient_accumulation_steps 4 --per_device_batch_size 2",
        reason="compared with a `weight` that counts labels as Accelerate's script does: the script's collator shifts the labels, and "
        "the model shifts them again, so the script counts one label too many per row",
    ),
    "checkpointing": Case("`Trainer(run_dir=..., save_every=\"1 epoch\")`: the same call resumes", "--checkpointing_steps epoch"),
    "early_stopping": Case(
        "a `Callback` with `on_step`, which calls `trainer.stop(reason)`; `EarlyStopping` by a validation metric",
        reason="Accelerate's script breaks out of the current epoch only, not out of the training, and makes one more update in each "
        "remaining epoch",
    ),
    "multi_process_metrics": Case(
        "nothing: `compute_metrics` gets every row once",
        ranks=2,
        warmup=50,
        reason="`warmup=50`: a prepared scheduler advances once per process and update, so its 100 warm-up steps are 50 updates "
        "on two ranks",
    ),
    "cross_validation": Case("a loop over `fit` and `predict`"),
    "memory": Case("`find_executable_batch_size` around `fit`"),
    "tracking": Case("`Trainer(trackers=[\"tensorboard\"])`", "--with_tracking --project_dir logs"),
    "profiler": Case("`Trainer(plugins=[Profiler()])`"),
}  # fmt: skip
