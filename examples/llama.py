"""A Llama-architecture model in shards: built on the meta device, so that no rank ever holds all of it.

fabricate run examples/llama.py --nproc 2 --strategy zero3
fabricate run examples/llama.py --nproc 8 --strategy fsdp --precision bf16 -- --size 7b --dataset wikitext --batch-size 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import transformers
from demo_text import BLOCK, load_tokenizer, read_texts, to_blocks
from generate import hush_libraries

from fabricate import Trainer, TrainModule

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


class Llama(TrainModule):
    def __init__(self, size: str, vocabulary: int, learning_rate: float) -> None:
        super().__init__()
        self.size, self.vocabulary, self.learning_rate = size, vocabulary, learning_rate

    def configure_model(self) -> None:
        config = transformers.LlamaConfig(
            **SIZES[self.size],
            vocab_size=self.vocabulary,
            max_position_embeddings=BLOCK,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        total = self.trainer.total_steps
        return optimizer, transformers.get_cosine_schedule_with_warmup(optimizer, total // 10, total)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.model(**batch).loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--dataset", default="stdlib", help="stdlib, wikitext, or a text file")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/llama"))
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="rows per rank")
    parser.add_argument("--global-batch-size", type=int, help="rows per update; the rest is accumulated")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    hush_libraries()
    datasets.disable_progress_bars()
    texts = read_texts(options.dataset)
    tokenizer = load_tokenizer("tiny", texts["train"])
    train, val = (to_blocks(texts[split], tokenizer) for split in ("train", "validation"))
    trainer = Trainer(
        max_steps=options.max_steps,
        global_batch_size=options.global_batch_size,
        max_grad_norm=1.0,
        seed=0,
        run_dir=options.run_dir,
        validate_every=f"{options.max_steps} steps",
        limit_val_batches=4,
    )
    module = Llama(options.size, len(tokenizer), options.learning_rate)
    result = trainer.fit(module, train, val, batch_size=options.batch_size)
    module.print(f"step {result.steps}: validation loss {result.metrics['val_loss']:.6f}")


if __name__ == "__main__":
    main()
