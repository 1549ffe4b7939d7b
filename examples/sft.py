"""Supervised fine-tuning of a chat model: only the assistant's words are learnt, from packed rows; NEFTune and label smoothing are options.

python examples/sft.py
fabricate run examples/sft.py --nproc 8 --precision bf16 -- --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --length 2048 --learn all
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import datasets
import torch
from chats import conversations, load_model, load_tokenizer
from fabricate_text import NEFTune, Pad, next_token_loss, pack, tokenize_chats
from generate import hush_libraries

from fabricate import Trainer, TrainModule


class SFT(TrainModule):
    def __init__(self, model: str = "tiny", learning_rate: float = 2e-5, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.name, self.learning_rate, self.label_smoothing = model, learning_rate, label_smoothing
        self.tokenizer = load_tokenizer(model)  # included in RUN_DIR/model/

    def configure_model(self) -> None:
        self.model = load_model(self.name)

    def training_step(self, batch: dict[str, Any]) -> Any:
        if self.label_smoothing:
            return next_token_loss(self.model(**batch).logits, batch["labels"], self.label_smoothing)
        return self.model(**batch).loss  # the mean over the labels that count; fabricate weights it by their number

    def validation_step(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"loss": self.model(**batch).loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a name on the hub, a folder, or tiny: made here")
    parser.add_argument("--dataset", default="made", help="of the hub, a JSON file with messages, or made: here")
    parser.add_argument("--learn", choices=["assistant", "all"], default="assistant")
    parser.add_argument("--length", type=int, default=256, help="of packed rows, in tokens")
    parser.add_argument("--neftune-alpha", type=float)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, help="2e-5; for tiny 3e-3")
    parser.add_argument("--batch-size", type=int, default=4, help="packed rows per rank")
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/sft"))
    options = parser.parse_args()

    hush_libraries()
    datasets.disable_progress_bars()
    learning_rate = options.learning_rate or (3e-3 if options.model == "tiny" else 2e-5)
    module = SFT(options.model, learning_rate, options.label_smoothing)
    rows = tokenize_chats(conversations(options.dataset), module.tokenizer, learn=options.learn)
    parts = rows.train_test_split(test_size=0.05, seed=0)
    train, val = (pack(part, options.length, too_long="cut") for part in (parts["train"], parts["test"]))
    trainer = Trainer(
        max_epochs=options.max_epochs,
        max_grad_norm=1.0,
        seed=0,
        run_dir=options.run_dir,
        plugins=[NEFTune(options.neftune_alpha)] if options.neftune_alpha else [],
    )
    collate = Pad(module.tokenizer.pad_token_id)
    result = trainer.fit(module, train, val, batch_size=options.batch_size, collate_fn=collate)
    module.print(f"step {result.steps}: validation loss {result.metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
