"""The five scripts, each with its command line and the known differences."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = """
--do_train --do_eval --eval_strategy epoch --save_strategy epoch --logging_steps 1 --num_train_epochs 2 --learning_rate 5e-3
--warmup_steps 4 --weight_decay 0.1 --per_device_train_batch_size 4 --train_sampling_strategy sequential --disable_tqdm True
--dataloader_pin_memory False
"""
"""The arguments of all scripts. Rows are in the order of the data, because a seed gives different orders on the two sides."""
TOLERANCE = 1e-5
"""The largest allowed relative difference of a loss."""
_WEIGHTS = (
    "the evaluation loss: transformers averages the batch means without weights, fabricate weights each batch by its number "
    "of labels"
)


@dataclass(frozen=True)
class Case:
    """A script, the model and data that are built for it, and its command line after `COMMON`.

    others: further files of transformers' script. metrics: metrics of the evaluation that are compared; unequal: those that are known to
    differ. reason: why numbers differ, if they do. factor: the ratio of transformers' loss to fabricate's.
    """

    script: str
    folder: str
    kind: str
    task: str
    arguments: str
    metrics: tuple[str, ...]
    unequal: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    reason: str = ""
    factor: float = 1.0


_GLUE = ("run_glue", "text-classification", "BertForSequenceClassification", "pairs")
_BEST = "--max_seq_length 32 --num_train_epochs 4 --load_best_model_at_end --metric_for_best_model accuracy"
CASES = {
    "run_clm": Case(
        *("run_clm", "language-modeling", "LlamaForCausalLM", "text"),
        "--block_size 32 --gradient_accumulation_steps 2",
        metrics=("loss", "accuracy"),
    ),
    "run_mlm": Case(
        *("run_mlm", "language-modeling", "BertForMaskedLM", "text"),
        "--max_seq_length 32",
        metrics=("loss", "accuracy"),
        unequal=("loss",),
        reason=_WEIGHTS,
    ),
    "run_glue": Case(*_GLUE, _BEST, metrics=("loss", "accuracy")),
    "run_qa": Case(
        *("run_qa", "question-answering", "BertForQuestionAnswering", "questions"),
        "--max_seq_length 64 --doc_stride 16",
        metrics=("exact_match", "f1"),
        others=("trainer_qa.py", "utils_qa.py"),
    ),
    "run_summarization": Case(
        *("run_summarization", "summarization", "T5ForConditionalGeneration", "summaries"),
        "--max_source_length 64 --max_target_length 20 --predict_with_generate",
        metrics=("loss", "rougeL"),
        unequal=("loss",),
        reason=_WEIGHTS,
    ),
    "run_clm, GPT-2": Case(
        *("run_clm", "language-modeling", "GPT2LMHeadModel", "text"),
        "--block_size 32 --gradient_accumulation_steps 2",
        metrics=("loss", "accuracy"),
        unequal=("loss",),
        reason="transformers divides by all 32 labels of a row, but the loss sums only 31, because GPT2LMHeadModel has no "
        "`loss_type`, which transformers reads",
        factor=31 / 32,
    ),
    "run_glue, 2 accumulation steps": Case(
        *_GLUE,
        f"{_BEST} --gradient_accumulation_steps 2",
        metrics=("loss", "accuracy"),
        unequal=("loss",),
        reason="transformers adds up the micro-batches of an update instead of taking their mean, because BERT's forward accepts "
        "any keyword argument",
        factor=2.0,
    ),
}
