"""QLoRA: adapters of a few megabytes are trained over a causal language model whose weights are frozen in 4 bits.

python examples/qlora.py
fabricate run examples/qlora.py --nproc 4 --precision bf16 -- --model meta-llama/Llama-3.2-1B --dataset wikitext --batch-size 8
fabricate ckpt merge runs/qlora merged --base NAME

Without --model a tiny Llama is made here and saved, then loaded as any other. Needs peft and bitsandbytes; other languages than English
want another --dataset, a text file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import datasets
import peft
import torch
import transformers
from demo_text import BLOCK, load_tokenizer, read_texts, to_blocks
from generate import hush_libraries

from fabricate import Trainer, TrainModule


class QLoRA(TrainModule):
    def __init__(self, model: str, learning_rate: float) -> None:
        super().__init__()
        self.name, self.learning_rate = model, learning_rate
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)  # the export has it next to the adapter

    def configure_model(self) -> None:
        four_bits = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.name, quantization_config=four_bits, device_map={"": str(self.device)}
        )
        # Makes parameters that are not in 4 bits float32. Use Trainer(activation_checkpointing=True) to save memory of
        # activations.
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        adapter = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(model, adapter)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, str]:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate), "cosine"  # frozen parameters are left out

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.model(**batch).loss}


def save_tiny_model(folder: Path, texts: list[str]) -> str:
    """Save a Llama of two layers with random weights and its tokenizer in `folder`, in the layout of a download."""
    tokenizer = load_tokenizer("tiny", texts)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=BLOCK,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name of the hub")
    parser.add_argument("--dataset", default="stdlib", help="stdlib, wikitext, or a text file")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/qlora"))
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="rows per rank")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="for a real model about 2e-4")
    options = parser.parse_args()

    hush_libraries()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    texts = read_texts(options.dataset)
    with tempfile.TemporaryDirectory() as folder:
        name = options.model or save_tiny_model(Path(folder), texts["train"][:40])
        tokenizer = load_tokenizer(name, texts["train"])
        train, val = (to_blocks(texts[split][:40], tokenizer) for split in ("train", "validation"))
        trainer = Trainer(max_steps=options.max_steps, seed=0, run_dir=options.run_dir, validate_first=True, limit_val_batches=4,
                          validate_every=f"{options.max_steps} steps", max_grad_norm=1.0)  # fmt: skip
        module = QLoRA(name, options.learning_rate)
        result = trainer.fit(module, train, val, batch_size=options.batch_size)
    module.print(f"step {result.steps}: validation loss {result.metrics['val_loss']:.4f}; {options.run_dir}/model")


if __name__ == "__main__":
    main()
