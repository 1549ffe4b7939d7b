"""transformers' run_mlm.py: a masked language model is fine-tuned on a text. The command line is that of transformers' script.

python examples/transformers/run_mlm.py --do_train --do_eval --output_dir runs/mlm
fabricate run examples/transformers/run_mlm.py --nproc 4 -- --model_name_or_path FacebookAI/roberta-base --max_seq_length 512 \\
    --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --output_dir runs/roberta
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import datasets
import torch
from tiny import Source, open_source
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    TrainingArguments,  # fmt: skip
)

from fabricate import Trainer, TrainModule, from_training_arguments


@dataclass
class Options(Source):
    max_seq_length: int | None = None
    mlm_probability: float = 0.15


class MaskedLanguageModel(TrainModule):
    def __init__(self, name: str, tokenizer: Any, settings: Any) -> None:
        super().__init__()
        self.name, self.tokenizer, self.settings = name, tokenizer, settings

    def configure_model(self) -> None:
        self.model = AutoModelForMaskedLM.from_pretrained(self.name)

    def configure_optimizers(self) -> Any:
        return self.settings.optimizers(self)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        output, masked = self.model(**batch), batch["labels"] != -100
        right = output.logits.argmax(-1)[masked] == batch["labels"][masked]
        return {"loss": output.loss, "accuracy": right.float().mean()}  # both are weighted by the masked tokens


def to_blocks(raw: datasets.DatasetDict, tokenizer: Any, max_seq_length: int | None) -> datasets.DatasetDict:
    """Rows of `max_seq_length` tokens, cut from all texts one after the other; the last, incomplete block of each thousand texts is left
    out."""
    size = min(max_seq_length or 1024, tokenizer.model_max_length)

    def cut(tokens: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*values)) for name, values in tokens.items()}
        whole = len(joined["input_ids"]) // size * size
        return {name: [ids[at : at + size] for at in range(0, whole, size)] for name, ids in joined.items()}

    names = raw["train"].column_names
    column = "text" if "text" in names else names[0]
    options = {"return_special_tokens_mask": True}
    tokens = raw.map(lambda rows: tokenizer(rows[column], **options), batched=True, remove_columns=names)
    return tokens.map(cut, batched=True)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses(argv)
    name, raw = open_source(options, args, "BertForMaskedLM", "text")
    tokenizer = AutoTokenizer.from_pretrained(name)
    with args.main_process_first():
        blocks = to_blocks(raw, tokenizer, options.max_seq_length)
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=options.mlm_probability)

    settings = from_training_arguments(args)
    trainer, module = Trainer(**settings.trainer), MaskedLanguageModel(name, tokenizer, settings)
    train, val = settings.loaders(blocks["train"], blocks["validation"], masking)
    metrics = {}
    if args.do_train:
        metrics = trainer.fit(module, train, val, resume=settings.resume).metrics
    if args.do_eval:
        metrics = trainer.validate(module, val)
        module.print(f"perplexity {math.exp(metrics['val_loss']):.4f}, accuracy {metrics['val_accuracy']:.4f}")
    return metrics


if __name__ == "__main__":
    main()
