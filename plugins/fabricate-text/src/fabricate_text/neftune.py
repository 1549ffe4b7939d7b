"""NEFTune (arXiv 2310.05914): uniform noise on the embeddings of tokens, in training only."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import torch

from fabricate import Callback, ConfigurationError


class NEFTune(Callback):
    """Adds noise to the embeddings of the transformers model in a module while it trains: uniform within alpha / sqrt(length x width),
    where the length is that of each row without its padding, or of each packed row. Where the embedding is called before the model (by a
    `training_step` that passes `inputs_embeds`, or by peft for virtual tokens), the padding is not known yet and counts.

    alpha: the size of the noise; 5 to 15 in the paper.

    The noise is drawn from torch's generator of the device, as for dropout. fabricate seeds and stores it, so a resumed run draws the same
    noise. Validation draws none. transformers' `neftune_noise_alpha` uses the padded length instead; without padding the results are equal,
    except for models such as T5 and BART, to which transformers 5 adds no noise.

    >>> Trainer(plugins=[NEFTune(alpha=5)], ...)
    """

    def __init__(self, alpha: float = 5.0) -> None:
        if not 0 < alpha < math.inf:
            raise ConfigurationError(f"NEFTune: alpha={alpha!r}: give a number above 0")
        self.alpha = alpha
        self._handles: list[Any] = []
        self._lengths: list[Any] = []
        """For each model that is running, the outer one first: the lengths of its rows, or None if it does not tell them."""

    def on_fit_start(self, module: Any) -> None:
        from transformers import PreTrainedModel

        model = _model(module)
        embedding = model.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        # T5 calls layers that share the weight of this one, and not this one itself. A wrapper of peft contains one that it calls.
        inside = set(embedding.modules())
        layers = (each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each not in inside)
        called = [embedding, *(each for each in layers if each.weight is weight)]
        self._handles = [each.register_forward_hook(self._add_noise) for each in called]
        # The models inside too: a module may call one directly, and a decoder has a mask of its own.
        for each in (child for child in model.modules() if isinstance(child, PreTrainedModel)):
            names = list(inspect.signature(each.forward).parameters)
            self._handles += [
                each.register_forward_pre_hook(partial(self._note_lengths, names), with_kwargs=True),
                each.register_forward_hook(self._forget_lengths),
            ]

    def on_teardown(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._lengths = [], []

    def _note_lengths(self, names: list[str], model: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = dict(zip(names, positional, strict=False)) | named
        mask, places = arguments.get("attention_mask"), arguments.get("position_ids")
        if not model.training:
            lengths = None
        elif mask is not None and mask.ndim == 2:
            lengths = mask.sum(1, keepdim=True)
        else:
            lengths = None if places is None else packed_lengths(places)
        self._lengths.append(lengths)

    def _forget_lengths(self, model: Any, positional: tuple[Any, ...], output: Any) -> None:
        self._lengths.pop()

    def _add_noise(self, embedding: Any, positional: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor | None:
        if not embedding.training:
            return None
        noted = self._lengths[-1] if self._lengths else None
        lengths = embedded.shape[1] if noted is None else noted[..., None].clamp(min=1)
        bound = self.alpha * torch.as_tensor(lengths * embedded.shape[2], device=embedded.device).float().rsqrt()
        noise = torch.empty_like(embedded, dtype=torch.float32).uniform_(-1, 1) * bound
        return embedded + noise.to(embedded.dtype)


def packed_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """The length of the packed row of each token, in the shape of `position_ids`: (rows, tokens), which count from 0 in each packed row.
    Does not wait for the device."""
    tokens = position_ids.shape[1]
    row = (position_ids == 0).cumsum(1)
    counts = torch.zeros(len(row), tokens + 1, dtype=torch.int64, device=row.device)
    counts.scatter_add_(1, row, torch.ones_like(row))
    return counts.gather(1, row)


def _model(module: Any) -> Any:
    """The model with token embeddings in `module`: the only one, or the only one that is trained."""
    from transformers import PreTrainedModel

    models = [child for child in module.modules() if isinstance(child, PreTrainedModel)]
    inner = {id(child) for model in models for child in model.modules() if child is not model}
    outer = [model for model in models if id(model) not in inner]
    trained = [model for model in outer if any(parameter.requires_grad for parameter in model.parameters())]
    if len(trained) == 1 or len(outer) == 1:  # with peft's virtual tokens, nothing in the model itself is trained
        return (trained or outer)[0]
    raise ConfigurationError(
        f"NEFTune: {type(module).__name__} has {len(outer)} models of transformers and trains {len(trained)} of them, but NEFTune needs "
        "exactly one, to whose embeddings it adds noise; freeze the others, or leave NEFTune out"
    )
