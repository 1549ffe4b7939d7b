"""A language model: a tiny GPT-2 trained from nothing on Python's standard library, or any causal model fine-tuned.

fabricate run examples/demo.py --nproc 2 -- --stop-at 300    (twice: the second time resumes)
fabricate run examples/demo.py --nproc 4 -- --model gpt2 --dataset wikitext --learning-rate 5e-5 --max-epochs 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
import transformers
from demo_text import BLOCK, draw_losses, load_tokenizer, read_texts, to_blocks
from generate import hush_libraries, sample

from fabricate import Callback, Trainer, TrainModule


class LanguageModel(TrainModule):
    def __init__(self, model: str, tokenizer: transformers.PreTrainedTokenizerBase, learning_rate: float) -> None:
        super().__init__()
        self.name, self.learning_rate = model, learning_rate
        self.tokenizer = tokenizer  # an attribute, so that the export includes it

    def configure_model(self) -> None:
        if self.name == "tiny":
            end = self.tokenizer.eos_token_id
            sizes = {"n_positions": BLOCK, "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": len(self.tokenizer)}
            config = transformers.GPT2Config(**sizes, bos_token_id=end, eos_token_id=end, pad_token_id=end)
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.name)
        # transformers cannot derive it from the class name GPT2LMHeadModel, and warns
        self.model.loss_type = "ForCausalLM"

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, str]:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate), "linear:warmup=0.1"

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss  # a mean over the labels that count; fabricate weights it by their number

    def validation_step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.model(**batch).loss}


class StopAt(Callback):
    """Stops the fit at a step, as if the machine's time were over. The same command run again resumes it."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == self.stop_at:
            trainer.stop(f"--stop-at {step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, a hub name such as gpt2, or a folder")
    parser.add_argument("--dataset", default="stdlib", help="stdlib, wikitext, or a text file")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--max-epochs", type=int, help="instead of --max-steps")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per rank")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--every", default="50 steps", help="when to validate and save")
    parser.add_argument("--stop-at", type=int, help="stop after this step; the same command then continues from there")
    options = parser.parse_args()

    hush_libraries()
    datasets.disable_progress_bars()
    texts = read_texts(options.dataset)
    tokenizer = load_tokenizer(options.model, texts["train"])
    train, val = (to_blocks(texts[split], tokenizer) for split in ("train", "validation"))

    trainer = Trainer(
        max_steps=None if options.max_epochs else options.max_steps,
        max_epochs=options.max_epochs,
        max_grad_norm=1.0,
        seed=0,
        run_dir=options.run_dir,
        validate_first=True,
        validate_every=options.every,
        save_every=options.every,
        limit_val_batches=8,
        plugins=[StopAt(options.stop_at)],
    )
    module = LanguageModel(options.model, tokenizer, options.learning_rate)
    result = trainer.fit(module, train, val, batch_size=options.batch_size)
    if trainer.is_main:
        print(f"ended at step {result.steps} ({result.stop_reason}), loss curve: {draw_losses(options.run_dir)}")
        if (options.run_dir / "model").exists():  # an interrupted run has not written it yet
            print(f"a sample of {options.run_dir / 'model'}:", sample(options.run_dir / "model"), sep="\n")
        print(f"for a page about the run: fabricate report {options.run_dir} --html {options.run_dir / 'report.html'}")


if __name__ == "__main__":
    main()
