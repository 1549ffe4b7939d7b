"""Packed rows give the same losses, gradients and updates as separate rows; with tables and streams of `datasets`."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
import transformers
from fabricate_text import Pad, check_packing, pack
from fabricate_text.packing import best_fit

from fabricate import ConfigurationError, Trainer, TrainModule

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = [
    torch.randint(1, 50, (int(n),), generator=GENERATOR).tolist()
    for n in torch.randint(2, 20, (24,), generator=GENERATOR)
]
LABELS = [[-100 if place < len(ids) // 3 else token for place, token in enumerate(ids)] for ids in TOKENS]
ROWS = datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": LABELS, "text": ["dropped"] * len(TOKENS)})
PAD = Pad(pad_token_id=0)


def tiny(kind: str, attention: str = "sdpa") -> Any:
    """A model of two layers with random weights, in train mode, without dropout."""
    torch.manual_seed(0)
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        )
        kind_of_model: Any = transformers.LlamaForCausalLM
    else:
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0, **dropout
        )
        kind_of_model = transformers.GPT2LMHeadModel
    return kind_of_model._from_config(config, attn_implementation=attention).train()


def computed(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def test_one_label_per_row_is_kept_as_for_a_classifier() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": 1}, {"input_ids": [8], "labels": 0}]
    batch = PAD(rows)
    assert batch["labels"].tolist() == [1, 0]
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    with pytest.raises(ConfigurationError, match="need a label per token"):
        Pad(0, flatten=True)(rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_rows_give_the_loss_and_gradients_of_the_rows_alone(kind: str, attention: str) -> None:
    model = tiny(kind, attention)
    check_packing(model)
    packed = list(pack(ROWS, 24))
    assert len(packed) < len(TOKENS) / 1.5
    plain, gradients = computed(model, PAD([ROWS[place] for place in range(len(TOKENS))]))
    for batch in (PAD(packed), Pad(0, multiple_of=8)(packed), Pad(0, flatten=True)(packed)):
        loss, own = computed(model, batch)
        torch.testing.assert_close(loss, plain)
        for ours, theirs in zip(own, gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class Tiny(TrainModule):
    def configure_model(self) -> None:
        self.model = tiny("llama")

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trained(rows: Any, **arguments: Any) -> dict[str, torch.Tensor]:
    """The weights after two updates, each over all rows, in micro-batches of one."""
    module = Tiny()
    trainer = Trainer(max_steps=2, global_batch_size=len(rows), seed=1, progress=False, print_plan="none", **arguments)
    trainer.fit(module, rows, batch_size=1, shuffle=False, collate_fn=PAD)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_updates_weigh_the_labels_of_packed_rows_as_of_the_rows_alone() -> None:
    first, second = trained(ROWS), trained(pack(ROWS, 24))
    for name, weights in first.items():
        torch.testing.assert_close(second[name], weights, rtol=1e-4, atol=1e-6)


def alone(row: dict[str, list[int]]) -> list[list[int]]:
    """The rows that were packed into this one."""
    starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
    ends = [*starts[1:], len(row["input_ids"])]
    return [row["input_ids"][start:end] for start, end in zip(starts, ends, strict=True)]


def test_no_token_is_lost_and_none_is_predicted_from_another_row() -> None:
    packed = list(pack(ROWS, 24))
    assert sorted(ids for row in packed for ids in alone(row)) == sorted(TOKENS)
    for row in packed:
        assert len(row["input_ids"]) <= 24
        assert [row["labels"][place] for place, at in enumerate(row["position_ids"]) if at == 0] == [-100] * len(
            alone(row)
        )
    learnt = sum(label != -100 for labels in LABELS for label in labels[1:])
    assert sum(label != -100 for row in packed for label in row["labels"]) == learnt


def test_a_stream_is_packed_in_parts_and_padding_is_left_out() -> None:
    padded = {
        "input_ids": [ids + [0] * 3 for ids in TOKENS],
        "attention_mask": [[1] * len(ids) + [0] * 3 for ids in TOKENS],
    }
    rows = datasets.Dataset.from_dict(padded)
    stream = list(pack(rows.to_iterable_dataset(), 24, at_once=8))
    assert stream == list(pack(rows, 24, at_once=8))
    assert sorted(ids for row in stream for ids in alone(row)) == sorted(TOKENS)


def test_long_rows_are_refused_split_or_cut() -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [list(range(10)), [11, 12]]})
    with pytest.raises(ConfigurationError, match=r"a row has 10 tokens, more than length=4; .*too_long='split'"):
        pack(rows, 4)
    split = pack(rows, 4, too_long="split")
    assert split["input_ids"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 11, 12]]
    assert split["labels"] == [[-100, 1, 2, 3], [-100, 5, 6, 7], [-100, 9, -100, 12]]
    assert pack(rows, 4, too_long="cut")["input_ids"] == [[0, 1, 2, 3], [11, 12]]


def test_rows_go_where_they_fit_best() -> None:
    assert best_fit([3, 5, 2, 4, 6], 8) == [[0, 1], [2, 4], [3]]
    assert best_fit([], 8) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 1}, "at least 2"),
        ({"length": 8, "too_long": "drop"}, "give 'refuse', 'split' or 'cut'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pack(ROWS, **arguments)


def test_data_that_is_not_tokenized_and_labels_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"the columns \['text'\] and no 'input_ids': tokenize it first"):
        pack(datasets.Dataset.from_dict({"text": ["a"]}), 8)
    with pytest.raises(ConfigurationError, match="3 input_ids, 2 labels"):
        pack(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2]]}), 8)


def test_a_model_whose_packed_rows_see_each_other_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigurationError, match="check_packing: MambaForCausalLM"):
        check_packing(transformers.MambaForCausalLM(config))


def test_packed_and_plain_rows_of_one_batch_keep_their_positions_in_any_order() -> None:
    packed, plain = {"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, {"input_ids": [4, 5]}
    assert PAD([packed, plain])["position_ids"].tolist() == [[0, 1, 0], [0, 1, 0]]
    assert PAD([plain, packed])["position_ids"].tolist() == [[0, 1, 0], [0, 1, 0]]


def test_padding_that_rows_bring_along_is_no_target_and_is_not_attended_to() -> None:
    rows = [
        {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [0, 7, 8], "attention_mask": [0, 1, 1]},
    ]
    batch = PAD(rows)
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert batch["labels"].tolist() == [[5, 6, -100, -100], [-100, 7, 8, -100]]
    joined = Pad(pad_token_id=0, flatten=True)(rows)
    assert joined["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert joined["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert joined["labels"].tolist() == [[-100, 6, -100, 8]]


def test_a_leak_is_found_if_the_embedding_of_the_padding_is_zero() -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=50,
        hidden_size=32,
        lru_width=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_window_size=8,
        pad_token_id=0,
    )
    model = transformers.RecurrentGemmaForCausalLM(config)
    assert not model.get_input_embeddings().weight[0].any()
    with pytest.raises(ConfigurationError, match="check_packing: RecurrentGemmaForCausalLM lets a packed row attend"):
        check_packing(model)
