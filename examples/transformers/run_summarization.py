"""transformers' run_summarization.py: summaries are generated in the evaluation. The command line is that of transformers' script.

python examples/transformers/run_summarization.py --do_train --do_eval --predict_with_generate --output_dir runs/summaries
fabricate run examples/transformers/run_summarization.py --nproc 2 -- --model_name_or_path google-t5/t5-small \\
    --dataset_name abisee/cnn_dailymail --dataset_config_name 3.0.0 --text_column article --summary_column highlights \\
    --source_prefix "summarize: " --predict_with_generate --do_train --do_eval --output_dir runs/cnn
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tiny import Source, open_source
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainingArguments,  # fmt: skip
)

from fabricate import Trainer, TrainModule, from_training_arguments


@dataclass
class Options(Source):
    text_column: str | None = None
    summary_column: str | None = None
    source_prefix: str = ""
    max_source_length: int = 1024
    max_target_length: int = 128


class Summarizer(TrainModule):
    def __init__(self, name: str, tokenizer: Any, settings: Any, generate: dict[str, Any] | None) -> None:
        super().__init__()
        self.name, self.tokenizer, self.settings, self.generate = name, tokenizer, settings, generate

    def configure_model(self) -> None:
        self.model = AutoModelForSeq2SeqLM.from_pretrained(self.name)

    def configure_optimizers(self) -> Any:
        return self.settings.optimizers(self)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> dict[str, Any]:
        loss = self.model(**batch).loss
        if self.generate is None:
            return {"loss": loss}
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        together = self.trainer.strategy.lockstep and self.trainer.accelerator.num_processes > 1
        tokens = self.model.generate(**inputs, **self.generate, synced_gpus=together)
        return {"loss": loss, "outputs": list(zip(self.texts(tokens), self.texts(batch["labels"]), strict=True))}

    def texts(self, tokens: torch.Tensor) -> list[str]:
        """The text of each row, without -100, the padding of labels."""
        filled = torch.where(tokens < 0, self.tokenizer.pad_token_id, tokens)
        return self.tokenizer.batch_decode(filled, skip_special_tokens=True)

    def compute_metrics(self, outputs: list[Any]) -> dict[str, float]:
        scores = [rouge_l(generated, wanted) for generated, wanted in outputs]
        return {"rougeL": 100 * sum(scores) / len(scores)}


def rouge_l(generated: str, wanted: str) -> float:
    """The F1 score of the longest common subsequence of words."""
    left, right = generated.lower().split(), wanted.lower().split()
    line = [0] * (len(right) + 1)
    for word in left:
        before, line = line, [0]
        for place, other in enumerate(right):
            line.append(before[place] + 1 if word == other else max(before[place + 1], line[place]))
    return 2 * line[-1] / max(len(left) + len(right), 1)


def to_rows(raw: datasets.DatasetDict, tokenizer: Any, options: Options) -> datasets.DatasetDict:
    """Rows with the tokens of the text, and those of the summary as labels."""
    names = raw["train"].column_names
    text, summary = options.text_column or names[0], options.summary_column or names[1]

    def tokens(rows: dict[str, list[str]]) -> Any:
        texts = [options.source_prefix + each for each in rows[text]]
        encoding = tokenizer(texts, truncation=True, max_length=options.max_source_length)
        labels = tokenizer(text_target=rows[summary], truncation=True, max_length=options.max_target_length)
        return {
            "input_ids": encoding["input_ids"],
            "attention_mask": encoding["attention_mask"],
            "labels": labels["input_ids"],
        }

    return raw.map(tokens, batched=True, remove_columns=names)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options, args = HfArgumentParser((Options, Seq2SeqTrainingArguments)).parse_args_into_dataclasses(argv)
    name, raw = open_source(options, args, "T5ForConditionalGeneration", "summaries")
    tokenizer = AutoTokenizer.from_pretrained(name)
    with args.main_process_first():
        rows = to_rows(raw, tokenizer, options)

    # The module generates, not the Trainer.
    length, beams = args.generation_max_length or options.max_target_length, args.generation_num_beams or 1
    generate = {"max_length": length, "num_beams": beams} if args.predict_with_generate else None
    own = ["predict_with_generate", "generation_max_length", "generation_num_beams"]
    settings = from_training_arguments(args, handled=own)
    trainer, module = Trainer(**settings.trainer), Summarizer(name, tokenizer, settings, generate)
    train, val = settings.loaders(rows["train"], rows["validation"], DataCollatorForSeq2Seq(tokenizer))
    metrics = {}
    if args.do_train:
        metrics = trainer.fit(module, train, val, resume=settings.resume).metrics
    if args.do_eval:
        metrics = trainer.validate(module, val)
        module.print(", ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
    return metrics


if __name__ == "__main__":
    main()
