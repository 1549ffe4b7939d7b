"""A vision model fine-tuned in stages: its new head first, from the second epoch on the half of the layers below it, then all of them.

python examples/vision.py
fabricate run examples/vision.py --nproc 2 --precision bf16 -- --model timm/resnet18.a1_in1k --dataset uoft-cs/cifar10 --image img

Without --model, a small ResNet is made here; without --dataset, the images are handwritten digits. Names with timm/ go to timm.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy
import torch
from generate import hush_libraries
from PIL.Image import fromarray
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

from fabricate import Trainer, TrainModule, UnfreezeAt, seed_everything

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which most pretrained models expect


class Vision(TrainModule):
    def __init__(self, model: str, num_labels: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = load_model(model, num_labels)
        self.head = [name for name, layer in self.named_modules() if isinstance(layer, torch.nn.Linear)][-1]

    def stages(self) -> dict[str, str]:
        """The time at which each parameter below the head begins to be trained. Names of layers are possible: {"model.layer4": "1
        epoch"}."""
        body = [name for name, _ in self.named_parameters() if not name.startswith(self.head)]
        return {name: "1 epoch" if place >= len(body) // 2 else "2 epochs" for place, name in enumerate(body)}

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, str]:
        # Frozen parameters get no update. The head is new, so its learning rate is larger.
        groups = self.parameter_groups({f"^{re.escape(self.head)}": {"lr": 5 * self.learning_rate}})
        return torch.optim.AdamW(groups, lr=self.learning_rate), "cosine"

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        output = self.model(images)
        return getattr(output, "logits", output)  # transformers returns an object, timm a tensor

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(self.scores(batch["images"]), batch["labels"])

    def validation_step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scores, labels = self.scores(batch["images"]), batch["labels"]
        return {"loss": cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}


def load_model(name: str, num_labels: int) -> torch.nn.Module:
    """The pretrained model with a new head."""
    if name.startswith("timm/"):
        import timm

        return timm.create_model(name.removeprefix("timm/"), pretrained=True, num_classes=num_labels)
    return AutoModelForImageClassification.from_pretrained(name, num_labels=num_labels, ignore_mismatched_sizes=True)


def read_rows(name: str | None) -> datasets.DatasetDict:
    """The images and labels, in two parts."""
    if name is not None:
        return datasets.load_dataset(name)
    digits = load_digits()
    images = [fromarray((image * 15.9).astype(numpy.uint8)) for image in digits.images]
    return datasets.Dataset.from_dict({"image": images, "label": digits.target}).train_test_split(0.2, seed=0)


def save_tiny_model(folder: Path) -> str:
    """Save a ResNet of three blocks with random weights in `folder`, in the layout of a download."""
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic")
    ResNetForImageClassification(config).save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name of the hub")
    parser.add_argument("--dataset", help="a data set of the hub; its second split is for validation")
    parser.add_argument("--image", default="image", help="its column of images; labels are in the column label")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/vision"))
    parser.add_argument("--max-epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="rows per rank")
    parser.add_argument("--learning-rate", type=float, help="below the head: 1e-4; for the tiny model 2e-3")
    options = parser.parse_args()

    hush_libraries()
    seed_everything(0)  # before the head draws its weights
    size = 224 if options.model else 32  # pixels
    rows = read_rows(options.dataset)

    def encode(batch: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
        images = [numpy.asarray(image.convert("RGB").resize((size, size))) for image in batch[options.image]]
        pixels = (numpy.stack(images).astype(numpy.float32) / 255 - MEAN) / DEVIATION
        return {"images": torch.tensor(pixels).float().permute(0, 3, 1, 2), "labels": torch.tensor(batch["label"])}

    train, val = (part.with_transform(encode) for part in list(rows.values())[:2])
    with tempfile.TemporaryDirectory() as folder:
        name = options.model or save_tiny_model(Path(folder))
        learning_rate = options.learning_rate or (1e-4 if options.model else 2e-3)
        module = Vision(name, len(set(rows["train"]["label"])), learning_rate)
        plugins = [UnfreezeAt(module.stages())]
        trainer = Trainer(max_epochs=options.max_epochs, seed=0, run_dir=options.run_dir, plugins=plugins)
        result = trainer.fit(module, train, val, batch_size=options.batch_size)
    module.print(f"accuracy {result.metrics['val_accuracy']:.4f}; the model is in {options.run_dir}/model")


if __name__ == "__main__":
    main()
