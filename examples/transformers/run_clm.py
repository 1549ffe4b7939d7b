"""transformers' run_clm.py: a causal language model is fine-tuned on a text. The command line is that of transformers' script.

python examples/transformers/run_clm.py --do_train --do_eval --output_dir runs/clm
fabricate run examples/transformers/run_clm.py --nproc 4 -- --model_name_or_path gpt2 --dataset_name Salesforce/wikitext \\
    --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --output_dir runs/gpt2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import datasets
import torch
from tiny import Source, open_source
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments, default_data_collator

from fabricate import Trainer, TrainModule, from_training_arguments


@dataclass
class Options(Source):
    block_size: int | None = None


class LanguageModel(TrainModule):
    def __init__(self, name: str, tokenizer: Any, settings: Any) -> None:
        super().__init__()
        self.name, self.tokenizer, self.settings = name, tokenizer, settings

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.name)

    def configure_optimizers(self) -> Any:
        return self.settings.optimizers(self)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        output = self.model(**batch)
        right = output.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        return {"loss": output.loss, "accuracy": right.float().mean()}


def to_blocks(raw: datasets.DatasetDict, tokenizer: Any, block_size: int | None) -> datasets.DatasetDict:
    """Rows of `block_size` tokens, cut from all texts one after the other; the last, incomplete block of each thousand texts is left
    out."""
    size = min(block_size or 1024, tokenizer.model_max_length)

    def cut(tokens: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*values)) for name, values in tokens.items()}
        whole = len(joined["input_ids"]) // size * size
        rows = {name: [ids[at : at + size] for at in range(0, whole, size)] for name, ids in joined.items()}
        return {**rows, "labels": rows["input_ids"]}

    names = raw["train"].column_names
    column = "text" if "text" in names else names[0]
    tokens = raw.map(lambda rows: tokenizer(rows[column]), batched=True, remove_columns=names)
    return tokens.map(cut, batched=True, remove_columns=tokens["train"].column_names)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses(argv)
    name, raw = open_source(options, args, "LlamaForCausalLM", "text")
    tokenizer = AutoTokenizer.from_pretrained(name)
    with args.main_process_first():
        blocks = to_blocks(raw, tokenizer, options.block_size)

    settings = from_training_arguments(args)
    trainer, module = Trainer(**settings.trainer), LanguageModel(name, tokenizer, settings)
    train, val = settings.loaders(blocks["train"], blocks["validation"], default_data_collator)
    metrics = {}
    if args.do_train:
        metrics = trainer.fit(module, train, val, resume=settings.resume).metrics
    if args.do_eval:
        metrics = trainer.validate(module, val)
        module.print(f"perplexity {math.exp(metrics['val_loss']):.4f}, accuracy {metrics['val_accuracy']:.4f}")
    return metrics


if __name__ == "__main__":
    main()
