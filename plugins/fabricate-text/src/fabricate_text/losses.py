"""Losses of a causal language model with the weight of their mean, the number of labels that count.

fabricate knows how many labels a plain cross-entropy counts. A smoothed cross-entropy and a fused kernel do not show this number, so these
losses are returned with their weight. Must not know: data, tokenizers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from fabricate import ConfigurationError
from fabricate_text.packing import IGNORED


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The number of labels that a causal model learns: those that are not -100, without the first of each row, which is not predicted.
    labels: (rows, tokens), whole numbers. Returns a 0-dim int64 tensor on their device, without waiting for it."""
    return (labels[:, 1:] != IGNORED).sum()


def next_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0
) -> dict[str, torch.Tensor]:
    """Return {"loss": the mean cross-entropy of the next tokens, "weight": their number}, for a `training_step` or `validation_step`.

    logits: (rows, tokens, vocabulary), computed in float32. labels: (rows, tokens), not shifted, -100 where nothing is learnt.
    label_smoothing: the share of the target that is spread evenly over the vocabulary, from 0 to 1 (as in torch and transformers).

    >>> return next_token_loss(self.model(**batch).logits, batch["labels"], label_smoothing=0.1)
    """
    if not 0 <= label_smoothing <= 1:
        raise ConfigurationError(f"next_token_loss: label_smoothing={label_smoothing!r}: give a number from 0 to 1")
    targets = labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), targets, label_smoothing=label_smoothing, ignore_index=IGNORED
    )
    return {"loss": loss, "weight": next_tokens(labels)}


def use_liger(model: Any) -> Any:
    """Put Liger's kernels into `model` and return it; to be called in `configure_model`. The cross-entropy is fused with the last layer and
    does not show the weight of the loss, so return both:

    >>> def training_step(self, batch):
    ...     return {"loss": self.model(**batch).loss, "weight": next_tokens(batch["labels"])}

    Raises `ConfigurationError`, before the first step, without a GPU, which the kernels need, or without the package liger-kernel.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"use_liger: the kernels of Liger for {type(model).__name__} are written in Triton for GPUs, but this process has no "
            "GPU. On a CPU leave use_liger out: next_token_loss computes the same loss"
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigurationError("use_liger: needs the package liger-kernel: pip install 'fabricate-text[liger]'")
    integration: Any = importlib.import_module("transformers.integrations.liger")
    integration.apply_liger_kernel(model, None)
    return model
