"""Direct preference optimization (arXiv 2305.18290) as a module: the reference is a frozen model, shares frozen layers, or is the model
without its adapters.

python examples/dpo.py --reference adapters
fabricate run examples/dpo.py --nproc 8 --precision bf16 -- --model Qwen/Qwen3-0.6B --dataset trl-lib/ultrafeedback_binarized
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import datasets
import torch
from chats import load_model, load_tokenizer, preferences
from fabricate_text import Pad, tokenize_completion
from generate import hush_libraries
from peft import LoraConfig, get_peft_model

from fabricate import Trainer, TrainModule


class DPO(TrainModule):
    def __init__(self, model: str = "tiny", beta: float = 0.1, reference: str = "frozen", lr: float = 1e-6) -> None:
        super().__init__()
        self.name, self.beta, self.kind, self.lr = model, beta, reference, lr
        self.tokenizer = load_tokenizer(model)

    def configure_model(self) -> None:
        self.model = load_model(self.name)
        if self.kind == "adapters":
            self.model = get_peft_model(self.model, LoraConfig(target_modules="all-linear"))
        else:
            self.reference = load_model(self.name).requires_grad_(False)
        if self.kind == "shared":  # train the last layer and the norm after it; share the others
            ours, theirs = self.model.requires_grad_(False).base_model, self.reference.base_model
            for part in (ours.layers[-1], ours.norm):
                part.requires_grad_(True)
            theirs.layers = torch.nn.ModuleList([*ours.layers[:-1], theirs.layers[-1]])
            theirs.embed_tokens, self.reference.lm_head = ours.embed_tokens, self.model.lm_head
        for layer in self.modules():
            if isinstance(layer, torch.nn.Dropout):
                layer.p = 0.0

    def training_step(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        ours = log_probabilities(self.model, batch)
        with torch.no_grad():
            if self.kind == "adapters":
                with self.model.disable_adapter():
                    theirs = log_probabilities(self.model, batch)
            else:
                theirs = log_probabilities(self.reference, batch)
        rewards = self.beta * (ours - theirs)
        margin = rewards[:, 0] - rewards[:, 1]
        self.log("margin", margin.mean())
        self.log("accuracy", (margin > 0).float().mean())
        return {"loss": -torch.nn.functional.logsigmoid(margin).mean(), "weight": len(margin)}  # pairs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr, weight_decay=0.0)

    def export(self, path: Path) -> None:  # only the trained model
        weights = {name: self.trainer.strategy.gather(tensor) for name, tensor in self.model.state_dict().items()}
        if self.trainer.is_main:
            self.model.save_pretrained(path, state_dict=weights)
            self.tokenizer.save_pretrained(path)


def log_probabilities(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log probabilities of the completions, (pairs, 2): the chosen one and the rejected one."""
    ids, mask, labels = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels"))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    each = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return each.sum(1).view(-1, 2)


class PadPairs(Pad):
    """A batch of pairs: tensors of shape (pairs, 2, tokens)."""

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        both = super().__call__([row[side] for row in rows for side in ("chosen", "rejected")])
        return {name: value.unflatten(0, (-1, 2)) for name, value in both.items()}


def to_pairs(rows: datasets.Dataset, tokenizer: Any) -> datasets.Dataset:
    sides = ("chosen", "rejected")
    return rows.map(
        lambda row: {side: tokenize_completion(tokenizer, row["prompt"], row[side]) for side in sides},
        remove_columns=rows.column_names,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a name on the hub, a folder, or tiny: made here")
    parser.add_argument("--dataset", default="made", help="of the hub, a JSON file with pairs, or made: here")
    parser.add_argument("--reference", choices=["frozen", "shared", "adapters"], default="frozen")
    parser.add_argument("--learning-rate", type=float, help="1e-6; for tiny 1e-3")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs per rank")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/dpo"))
    options = parser.parse_args()
    hush_libraries()
    datasets.disable_progress_bars()
    lr = options.learning_rate or (1e-3 if options.model == "tiny" else 1e-6)
    module = DPO(options.model, reference=options.reference, lr=lr)
    train = to_pairs(preferences(options.dataset), module.tokenizer)
    trainer = Trainer(
        max_steps=options.max_steps, max_grad_norm=1.0, seed=0, run_dir=options.run_dir, save_frozen=False
    )
    collate = PadPairs(module.tokenizer.pad_token_id)
    metrics = trainer.fit(module, train, batch_size=options.batch_size, collate_fn=collate).metrics
    module.print(f"step {options.max_steps}: loss {metrics['loss']:.4f}, margin {metrics['margin']:.3f}")


if __name__ == "__main__":
    main()
