"""A small language model of transformers, and its data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from fabricate import TrainModule


class Storyteller(TrainModule):
    """A GPT-2 with its head tied to its embedding, and with dropout."""

    def configure_model(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def predict_step(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch[0]).logits
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def stories() -> TensorDataset:
    """Eight rows of eight tokens."""
    return TensorDataset(torch.randint(1, 31, (8, 8), generator=torch.Generator().manual_seed(2)))
