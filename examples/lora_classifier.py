"""A classifier with LoRA: adapters in the attention of a pretrained encoder, and a new head that is trained as a whole.

python examples/lora_classifier.py
fabricate run examples/lora_classifier.py --nproc 2 -- --model FacebookAI/roberta-base --dataset stanfordnlp/sst2 --text sentence

Without --model a tiny BERT is made here and saved, then loaded as any other; without --dataset it tells lines of the
standard library that define something from those that return or raise. Needs peft.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import datasets
import peft
import torch
import transformers
from demo_text import load_tokenizer, read_texts
from generate import hush_libraries

from fabricate import Trainer, TrainModule

LENGTH = 64


class Classifier(TrainModule):
    def __init__(self, model: str, num_labels: int, learning_rate: float) -> None:
        super().__init__()
        self.name, self.num_labels, self.learning_rate = model, num_labels, learning_rate
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def configure_model(self) -> None:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(self.name, num_labels=self.num_labels)
        # task_type also makes the head trainable, which has random initial values.
        adapter = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS")
        self.model = peft.get_peft_model(model, adapter)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, str]:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate), "linear"  # frozen parameters are left out

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        output = self.model(**batch)
        right = (output.logits.argmax(-1) == batch["labels"]).float().mean()
        return {"loss": output.loss, "accuracy": right}


def read_rows(name: str | None, text: str) -> dict[str, datasets.Dataset]:
    """Rows with the columns "text" and "label", for "train" and "validation"."""
    if name is not None:
        dataset = datasets.load_dataset(name)
        return {split: dataset[split].rename_column(text, "text") for split in ("train", "validation")}
    lines = [line.strip() for text in read_texts("stdlib")["train"] for line in text.splitlines()]
    definitions = [line for line in dict.fromkeys(lines) if line.startswith(("def ", "class ")) and len(line) < 80]
    calls = [line for line in dict.fromkeys(lines) if line.startswith(("return ", "raise ")) and len(line) < 80]
    rows = [(each, label) for pair in zip(definitions, calls, strict=False) for label, each in enumerate(pair)][:1200]
    columns = datasets.Dataset.from_dict({"text": [row for row, _ in rows], "label": [label for _, label in rows]})
    return {"train": columns.select(range(1000)), "validation": columns.select(range(1000, 1200))}


def save_tiny_model(folder: Path, texts: list[str]) -> str:
    """Save a BERT of two layers with random weights and its tokenizer in `folder`, in the layout of a download."""
    tokenizer = load_tokenizer("tiny", texts)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=LENGTH, **sizes)
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name of the hub")
    parser.add_argument("--dataset", help="a data set of the hub with splits train and validation")
    parser.add_argument("--text", default="text", help="its column of texts; labels are in the column label")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/lora-classifier"))
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="rows per rank")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="for a real model about 2e-4")
    options = parser.parse_args()

    hush_libraries()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    rows = read_rows(options.dataset, options.text)
    with tempfile.TemporaryDirectory() as folder:
        name = options.model or save_tiny_model(Path(folder), rows["train"]["text"])
        module = Classifier(name, len(set(rows["train"]["label"])), options.learning_rate)

        def encode(batch: dict[str, list[str]]) -> dict[str, list[int]]:
            padded = module.tokenizer(batch["text"], truncation=True, max_length=LENGTH, padding="max_length")
            return {
                "input_ids": padded["input_ids"],
                "attention_mask": padded["attention_mask"],
                "labels": batch["label"],
            }

        train, val = (
            rows[split].map(encode, batched=True, remove_columns=rows[split].column_names).with_format("torch")
            for split in ("train", "validation")
        )
        trainer = Trainer(max_epochs=options.max_epochs, seed=0, run_dir=options.run_dir, save_frozen=False)
        result = trainer.fit(module, train, val, batch_size=options.batch_size)
    module.print(
        f"accuracy {result.metrics['val_accuracy']:.4f}; the adapter and the head are in {options.run_dir}/model"
    )


if __name__ == "__main__":
    main()
