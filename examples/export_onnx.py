"""Exports a trained model to ONNX, and checks that onnxruntime computes the same numbers. Needs onnx, onnxscript and onnxruntime.

python examples/export_onnx.py                                  # trains a classifier of digits for a moment, and exports it
python examples/export_onnx.py --model runs/text/model          # a classifier in transformers' layout
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from digits import Digits, data
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fabricate import Trainer, seed_everything


class Scores(torch.nn.Module):
    """A transformers classifier that takes tensors and returns one, as ONNX needs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits  # type: ignore[no-any-return]


def export(model: torch.nn.Module, inputs: dict[str, torch.Tensor], dynamic: tuple[str, ...], file: Path) -> None:
    """Write `file`. inputs: example tensors by name. dynamic: names of their leading dimensions that may have other sizes later ("rows",
    ...)."""
    shapes = tuple({place: torch.export.Dim(name) for place, name in enumerate(dynamic)} for _ in inputs)
    torch.onnx.export(
        model.eval(),
        tuple(inputs.values()),
        file,
        input_names=list(inputs),
        output_names=["scores"],
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    )


def difference(model: torch.nn.Module, inputs: dict[str, torch.Tensor], file: Path) -> float:
    """The greatest difference between the outputs of onnxruntime and torch for `inputs`; an error if it is more than rounding."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    with torch.inference_mode():
        expected = model(*inputs.values())
    torch.testing.assert_close(torch.from_numpy(output), expected, rtol=1e-4, atol=1e-4)
    return float((torch.from_numpy(output) - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="RUN_DIR/model or the hub's name of a text classifier of transformers")
    parser.add_argument("--out", type=Path, default=Path("model.onnx"))
    options = parser.parse_args()
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model: torch.nn.Module = Scores(AutoModelForSequenceClassification.from_pretrained(options.model))
        # At least two rows: torch.export takes a size of 1 for a constant.
        few, other = (
            dict(tokenizer(t, padding=True, return_tensors="pt")) for t in (["a b c", "d"], ["one", "b c", "d"])
        )
        names = ("input_ids", "attention_mask")
        few, other, dynamic = {n: few[n] for n in names}, {n: other[n] for n in names}, ("rows", "tokens")
    else:
        seed_everything(0)
        train, val = data()
        module = Digits()
        Trainer(max_epochs=1, progress=False).fit(module, train, batch_size=32)
        model, dynamic = module.layers, ("rows",)
        few, other = {"images": val.tensors[0][:2]}, {"images": val.tensors[0]}  # another number of rows
    export(model, few, dynamic, options.out)
    print(f"{options.out}: differs from torch by {difference(model, other, options.out):.1e} at most")


if __name__ == "__main__":
    main()
