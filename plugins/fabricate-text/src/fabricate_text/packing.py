"""Packing (several tokenized rows in one), and the collate function that makes batches of packed or plain rows.

transformers' models attend within each packed row only (block-diagonally) if `position_ids` start at 0 in each of them, no `attention_mask`
is given, and no cache is made. With a cache, the default in training too, they attend to the whole row. Must not know: tokenizers,
samplers, losses.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fabricate import ConfigurationError

IGNORED = -100
"""A label that does not count: torch's and transformers' default."""
Rows = list[torch.Tensor]


def pack(dataset: Any, length: int, *, too_long: str = "refuse", at_once: int = 10_000) -> Any:
    """`dataset` with several rows joined to one of at most `length` tokens, by best fit, which makes few rows.

    dataset: a `datasets.Dataset` or `IterableDataset` with the column "input_ids" and, where not every token is learnt, "labels" of
    the same lengths (-100: not learnt). Tokens with 0 in "attention_mask" (padding) are left out; other columns are dropped.
    too_long: what happens to rows of more than `length` tokens: "refuse", "split" into rows of their own, or "cut".
    at_once: the data is packed in parts of this many rows; larger parts need more memory.

    Returns a data set of the same kind with lists of whole numbers, all of one length per row: "input_ids"; "labels", where the first token
    of each packed row is -100, so that it is not predicted from the row before; and "position_ids", which count from 0 in each packed row.
    The same rows give the same result on every rank. `Pad` makes batches of it. Raises `ConfigurationError`.

    >>> rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6, 7], [8, 9]]})
    >>> pack(rows, 5)[0]
    {'input_ids': [4, 5, 6, 7], 'labels': [-100, 5, 6, 7], 'position_ids': [0, 1, 2, 3]}
    """
    if too_long not in ("refuse", "split", "cut"):
        raise ConfigurationError(f"pack: too_long={too_long!r}: give 'refuse', 'split' or 'cut'")
    if length < 2:
        raise ConfigurationError(
            f"pack: length={length!r}: give at least 2, because a row of one token predicts nothing"
        )
    columns = column_names(dataset)
    if "input_ids" not in columns:
        raise ConfigurationError(f"pack: the data has the columns {columns} and no 'input_ids': tokenize it first")
    return dataset.with_format(None).map(
        _pack_rows,
        batched=True,
        batch_size=at_once,
        remove_columns=columns,
        fn_kwargs={"length": length, "too_long": too_long},
    )


def column_names(dataset: Any) -> list[str]:
    """The column names of a `datasets.Dataset` or a stream. The first row of a stream is read if nothing else has them."""
    names = dataset.column_names
    return list(next(iter(dataset), {})) if names is None else list(names)


def _pack_rows(rows: Mapping[str, list[list[int]]], length: int, too_long: str) -> dict[str, list[list[int]]]:
    pieces = [piece for row in _whole_rows(rows) for piece in _pieces(*row, length, too_long)]
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for members in best_fit([len(ids) for ids, _ in pieces], length):
        chosen = [pieces[member] for member in members]
        packed["input_ids"].append([token for ids, _ in chosen for token in ids])
        packed["labels"].append([label for _, labels in chosen for label in [IGNORED, *labels[1:]]])
        packed["position_ids"].append([place for ids, _ in chosen for place in range(len(ids))])
    return packed


def _whole_rows(rows: Mapping[str, list[list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each row, without padding."""
    whole_rows = []
    everyone = zip(
        rows["input_ids"],
        rows.get("labels", rows["input_ids"]),
        rows.get("attention_mask", rows["input_ids"]),
        strict=True,
    )
    for ids, labels, mask in everyone:
        if not len(ids) == len(labels) == len(mask):
            raise ConfigurationError(
                f"pack: a row has {len(ids)} input_ids, {len(labels)} labels and an attention_mask of {len(mask)}; all three need "
                "the same length"
            )
        if "attention_mask" in rows:
            kept = [place for place, real in enumerate(mask) if real]
            ids, labels = [ids[place] for place in kept], [labels[place] for place in kept]
        whole_rows.append((ids, labels))
    return whole_rows


def _pieces(ids: list[int], labels: list[int], length: int, too_long: str) -> list[tuple[list[int], list[int]]]:
    """The pieces of a row to pack: the whole row, if it is not too long. A piece of one token predicts nothing and is left out."""
    if len(ids) > length and too_long == "refuse":
        raise ConfigurationError(
            f"pack: a row has {len(ids)} tokens, more than length={length}; pass a larger length, too_long='split' to continue in "
            "another row, or too_long='cut' to drop the rest"
        )
    starts = range(0, length if too_long == "cut" else len(ids), length)
    pieces = [(ids[start : start + length], labels[start : start + length]) for start in starts]
    return [piece for piece in pieces if len(piece[0]) > 1]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Groups of rows, none longer than `room` in total: the longest row first, each row into the fullest group with space for it. Groups
    are sorted lists of indices into `lengths`, in the order of their first rows."""
    groups: list[list[int]] = []
    open_groups: list[tuple[int, int]] = []  # the room that is left, and the group; sorted
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = bisect_left(open_groups, (lengths[row], 0))
        if place == len(open_groups):
            left, group = room, len(groups)
            groups.append([])
        else:
            left, group = open_groups.pop(place)
        groups[group].append(row)
        if left - lengths[row] > 1:  # no row is shorter than 2
            insort(open_groups, (left - lengths[row], group))
    return sorted(sorted(group) for group in groups)


@dataclass(frozen=True)
class Pad:
    """A `collate_fn`: a batch of rows of tokens, padded at the end to the longest of them.

    pad_token_id: of the tokenizer. multiple_of: the length of a batch is a multiple of this. flatten: one long row without padding instead,
    the form of packed rows for flash attention; other attention computes the same with a mask of length x length.

    Returns int64 tensors of shape (rows, longest row), or (1, all tokens) with `flatten`: "input_ids" and "labels" (-100 at padding; for
    rows without labels the tokens themselves, and -100 where their "attention_mask" is 0; with one label per row instead, as for a
    classifier, shape (rows,) and the dtype of the labels). For packed rows or `flatten` there are
    "position_ids", in which padding counts as a separate row, and "use_cache", False, which models need to recognise packed rows. Otherwise
    there is "attention_mask", which keeps the zeros of the rows' masks.
    """

    pad_token_id: int
    multiple_of: int = 1
    flatten: bool = False

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        """`rows`: mappings with "input_ids", and maybe "labels", "attention_mask" and "position_ids": lists or tensors of one dimension
        ("labels" may be one number per row). Raises `ConfigurationError` for such labels with `flatten`."""
        ids = [torch.as_tensor(row["input_ids"]) for row in rows]
        masks = [
            torch.as_tensor(row.get("attention_mask", torch.ones_like(i))) for row, i in zip(rows, ids, strict=True)
        ]
        own = [i.masked_fill(mask == 0, IGNORED) for i, mask in zip(ids, masks, strict=True)]
        labels = [torch.as_tensor(row.get("labels", o)).clone() for row, o in zip(rows, own, strict=True)]
        places = [torch.as_tensor(row.get("position_ids", torch.arange(len(row["input_ids"])))) for row in rows]
        if self.flatten:
            if labels[0].ndim == 0:
                raise ConfigurationError(
                    "Pad(flatten=True): rows that are joined need a label per token, but these have one per row"
                )
            starts = ["position_ids" in row for row in rows]
            ids, labels, places = self._joined(ids, labels, places, [mask != 0 for mask in masks], starts)
        longest = max(map(len, ids))
        longest += -longest % self.multiple_of
        missing = [longest - len(each) for each in ids]
        batch: dict[str, Any] = {
            "input_ids": self._filled(ids, missing),
            "labels": torch.stack(labels) if labels[0].ndim == 0 else self._filled(labels, missing, IGNORED),
        }
        if self.flatten or any("position_ids" in row for row in rows):
            padded = [torch.cat([each, torch.arange(n)]) for each, n in zip(places, missing, strict=True)]
            batch |= {"position_ids": torch.stack(padded), "use_cache": False}
        else:
            batch["attention_mask"] = self._filled(masks, missing, 0)
        return batch

    def _joined(self, ids: Rows, labels: Rows, places: Rows, real: Rows, placed: list[bool]) -> tuple[Rows, Rows, Rows]:
        """All rows joined to one, without their padding. placed: whether each row has its own positions."""
        ids, labels = ([row[kept] for row, kept in zip(each, real, strict=True)] for each in (ids, labels))
        for each in labels:
            each[:1] = IGNORED
        places = [p[kept] if own else p[: kept.sum()] for p, kept, own in zip(places, real, placed, strict=True)]
        return [torch.cat(ids)], [torch.cat(labels)], [torch.cat(places)]

    def _filled(self, rows: list[torch.Tensor], missing: list[int], value: int | None = None) -> torch.Tensor:
        value = self.pad_token_id if value is None else value
        return torch.stack(
            [torch.nn.functional.pad(row, (0, n), value=value) for row, n in zip(rows, missing, strict=True)]
        )


def check_packing(model: Any) -> None:
    """Raise `ConfigurationError` if a causal model of transformers lets packed rows see each other: not all models take the beginnings of
    rows from `position_ids`. The model computes two packed rows of three tokens, and the second must not depend on the first. For one
    process, with the weights built; changes neither weights nor their gradients."""
    embedding = model.get_input_embeddings().weight
    # Not rows of the embedding: that of the padding is often zero, and a gradient through layers that start from zero is zero too.
    values = torch.arange(6.0 * embedding.shape[1], device=embedding.device).sin().reshape(1, 6, -1)
    embedded = values.to(embedding.dtype).requires_grad_()
    places = torch.tensor([[0, 1, 2, 0, 1, 2]], device=embedding.device)
    try:
        logits = model(inputs_embeds=embedded.clone(), position_ids=places, use_cache=False).logits
    except TypeError as exc:
        raise _leaks(model, f"does not take position_ids ({exc})") from exc
    (influence,) = torch.autograd.grad(logits[:, 3:].float().logsumexp(-1).sum(), embedded)
    if influence[:, :3].any():
        raise _leaks(model, "lets a packed row attend to the row before it")


def _leaks(model: Any, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"check_packing: {type(model).__name__} {problem}; train it on rows that are not packed, with Pad and ByLength"
    )
