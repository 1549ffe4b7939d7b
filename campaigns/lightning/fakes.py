"""Data and pretrained models, made here from a seed, in place of those that public code downloads."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which"
)
WORDS = TEXT.split()


def seed(number: int) -> None:
    """Seed all random generators."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def in_order(loader: DataLoader[Any], **options: Any) -> DataLoader[Any]:
    """`loader` without shuffling, so that two trainers read the same rows; its iterator draws from a separate generator."""
    size = loader.batch_size
    return DataLoader(
        loader.dataset,
        batch_size=size,
        collate_fn=loader.collate_fn,
        generator=torch.Generator(),
        drop_last=loader.drop_last,
        **options,
    )


def text(path: Path, lines: int = 600) -> None:
    """Write a file with lines of words."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=20)) for _ in range(lines)))


def digits(folder: Path, number: int = 192) -> None:
    """Write the files that the MNIST class of Lightning's demos reads."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("training.pt", "test.pt"):
        images = torch.randint(0, 256, (number, 28, 28), dtype=torch.uint8, generator=generator)
        torch.save((images, torch.randint(0, 10, (number,), generator=generator)), folder / name)
    os.environ["PL_USE_MOCKED_MNIST"] = "1"


def images(kind: str, number: int = 96) -> type:
    """A class in place of `torchvision.datasets.<kind>`."""
    from PIL import Image
    from torch.utils.data import Dataset

    shape = (28, 28) if kind == "MNIST" else (32, 32, 3)

    class Fake(Dataset[Any]):
        def __init__(self, root: Any, train: bool = True, transform: Any = None, download: bool = False) -> None:
            draw = numpy.random.default_rng(int(train))
            self.images = draw.integers(0, 256, (number, *shape), dtype=numpy.uint8)
            self.labels = draw.integers(0, 10, number).tolist()
            self.transform = transform

        def __len__(self) -> int:
            return number

        def __getitem__(self, index: int) -> Any:
            image = Image.fromarray(self.images[index])
            return image if self.transform is None else self.transform(image), self.labels[index]

    return Fake


def bert(folder: Path) -> str:
    """Save a BERT of two small layers without a head, with its tokenizer, in transformers' layout."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)  # a resumed fit finds it there
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return str(folder)


def glue(task: str, rows: int = 48) -> Any:
    """Sentences and labels in the splits of a GLUE task."""
    import datasets

    fields = {"cola": ["sentence"], "mrpc": ["sentence1", "sentence2"], "mnli": ["premise", "hypothesis"]}[task]
    splits = ["validation_matched", "validation_mismatched"] if task == "mnli" else ["validation"]
    draw = random.Random(0)

    def table(number: int) -> Any:
        columns: dict[str, list[Any]] = {
            field: [" ".join(draw.choices(WORDS, k=8)) for _ in range(number)] for field in fields
        }
        return datasets.Dataset.from_dict({**columns, "label": [draw.randrange(2) for _ in range(number)]})

    return datasets.DatasetDict({"train": table(rows), **{split: table(20) for split in splits}})


class Accuracy:
    """A metric in place of those of `datasets.load_metric`, which was removed."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float((numpy.asarray(predictions) == numpy.asarray(references)).mean())}


def old_names() -> None:
    """Restore names that transformers and datasets have removed, but that public code still imports."""
    import datasets
    import transformers

    if not hasattr(transformers, "AdamW"):
        transformers.AdamW = torch.optim.AdamW  # type: ignore[attr-defined]
    datasets.load_metric = lambda *_, **__: Accuracy()  # type: ignore[attr-defined]
    datasets.load_dataset = lambda _, task: glue(task)  # type: ignore[assignment]
    base: Any = transformers.PreTrainedTokenizerBase
    if not hasattr(base, "batch_encode_plus"):

        def batch_encode_plus(self: Any, texts: Any, pad_to_max_length: bool = False, **options: Any) -> Any:
            pairs = list(zip(*texts, strict=True)) if texts and isinstance(texts[0], tuple) else [texts]
            return self(*map(list, pairs), padding="max_length" if pad_to_max_length else False, **options)

        base.batch_encode_plus = batch_encode_plus


def graph(nodes: int = 60) -> Any:
    """A graph with features and classes of its nodes, as one batch of PyG."""
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
    data = Data(x=torch.randn(nodes, 8, generator=generator), edge_index=edges, y=torch.arange(nodes) % 3)
    data.batch_size = nodes // 2  # as a neighbour loader sets it: the first nodes are the selected ones
    return data


def graphs(number: int = 48) -> list[Any]:
    """Graphs of 6 to 11 nodes, each of one of three classes."""
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    items = []
    for label in range(number):
        nodes = 6 + label % 6
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
        items.append(Data(x=torch.randn(nodes, 8, generator=generator), edge_index=edges, y=torch.tensor([label % 3])))
    return items
