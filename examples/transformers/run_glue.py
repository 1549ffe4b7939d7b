"""transformers' run_glue.py: texts or pairs are classified; the best epoch is kept. The command line is that of transformers' script.

python examples/transformers/run_glue.py --do_train --do_eval --output_dir runs/glue --eval_strategy epoch --save_strategy epoch \\
    --load_best_model_at_end --metric_for_best_model accuracy
fabricate run examples/transformers/run_glue.py --nproc 2 -- --model_name_or_path google-bert/bert-base-cased --task_name mrpc \\
    --learning_rate 2e-5 --do_train --do_eval --output_dir runs/mrpc
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tiny import Source, open_source
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    TrainingArguments,  # fmt: skip
)

from fabricate import Trainer, TrainModule, from_training_arguments

COLUMNS = {"mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"), "qqp": ("question1", "question2")}
"""The columns of tasks that do not name them sentence1 and sentence2, or sentence."""


@dataclass
class Options(Source):
    task_name: str | None = None
    max_seq_length: int = 128
    pad_to_max_length: bool = True

    def __post_init__(self) -> None:
        if self.task_name is not None:
            self.dataset_name, self.dataset_config_name = "nyu-mll/glue", self.task_name


class Classifier(TrainModule):
    def __init__(self, name: str, labels: int, tokenizer: Any, settings: Any) -> None:
        super().__init__()
        self.name, self.labels, self.tokenizer, self.settings = name, labels, tokenizer, settings

    def configure_model(self) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(self.name, num_labels=self.labels)

    def configure_optimizers(self) -> Any:
        return self.settings.optimizers(self)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> dict[str, Any]:
        output = self.model(**batch)
        return {"loss": output.loss, "outputs": (output.logits.argmax(-1), batch["labels"])}

    def compute_metrics(self, outputs: list[Any]) -> dict[str, float]:
        predicted, labels = map(torch.stack, zip(*outputs, strict=True))
        hits = ((predicted == 1) & (labels == 1)).sum()
        f1 = 2 * hits / ((predicted == 1).sum() + (labels == 1).sum()).clamp(min=1)
        return {"accuracy": (predicted == labels).double().mean().item(), "f1": f1.item()}


def to_rows(raw: datasets.DatasetDict, tokenizer: Any, options: Options) -> datasets.DatasetDict:
    """Rows with the tokens of the sentence or the pair, and the label."""
    names = raw["train"].column_names
    columns = COLUMNS.get(options.task_name or "", [name for name in names if name.startswith("sentence")])

    padding = "max_length" if options.pad_to_max_length else False

    def tokens(rows: dict[str, list[Any]]) -> Any:
        texts = [rows[column] for column in columns]
        encoding = tokenizer(*texts, truncation=True, max_length=options.max_seq_length, padding=padding)
        return {**encoding, "labels": rows["label"]}

    return raw.map(tokens, batched=True, remove_columns=names)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses(argv)
    name, raw = open_source(options, args, "BertForSequenceClassification", "pairs")
    tokenizer = AutoTokenizer.from_pretrained(name)
    with args.main_process_first():
        rows = to_rows(raw, tokenizer, options)

    settings = from_training_arguments(args)
    trainer = Trainer(**settings.trainer)
    module = Classifier(name, len(set(raw["train"]["label"])), tokenizer, settings)
    val = rows["validation_matched" if options.task_name == "mnli" else "validation"]
    train, val = settings.loaders(rows["train"], val, DataCollatorWithPadding(tokenizer))
    metrics = {}
    if args.do_train:
        metrics = trainer.fit(module, train, val, resume=settings.resume).metrics
    if args.do_eval:
        metrics = trainer.validate(module, val)  # with --load_best_model_at_end, those of the best weights
        module.print(f"accuracy {metrics['val_accuracy']:.4f}, F1 {metrics['val_f1']:.4f}")
    return metrics


if __name__ == "__main__":
    main()
