"""A training that is killed and resumed; campaigns.gpu.resume starts it repeatedly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from campaigns.gpu.gpt import SIZES, Module, Recipe, precision_of
from campaigns.gpu.measuring import arguments, device
from fabricate import Trainer


class Stream(IterableDataset[Any]):
    """Rows in order, with a position that is saved."""

    def __init__(self, rows: Any) -> None:
        self._rows, self._at = rows, 0

    def __iter__(self) -> Iterator[Any]:
        while self._at < len(self._rows):
            self._at += 1
            yield self._rows[self._at - 1]
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of `state`."""
        self._at = state["at"]


def main() -> None:
    """Train, or continue from the newest checkpoint."""
    parser = arguments(__doc__, 60)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--loose", action="store_true", help="without deterministic algorithms")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--recipe", type=json.loads, default={}, help="JSON: fields of a Recipe, and dropout")
    parser.add_argument("--save", default="sync")
    options = parser.parse_args()
    place, fields = device(options), dict(options.recipe)
    size = dataclasses.replace(SIZES["tiny"], dropout=fields.pop("dropout", 0.0))
    recipe = Recipe(size, options.steps, **fields)
    rows = size.data(0, rows=12 * size.rows * recipe.accumulation)
    trainer = Trainer(
        max_steps=options.steps, seed=1, deterministic=not options.loose, run_dir=options.run_dir, save=options.save,
        save_every=options.save_every, keep=2, log_every=5, progress=False, precision=precision_of(recipe.precision),
        gradient_accumulation_steps=recipe.accumulation, max_grad_norm=recipe.clip,
        compile=dict(recipe.compile) if recipe.compile is not None else False,
    )  # fmt: skip
    trainer.fit(Module(recipe, place.device), Stream(rows) if options.stream else rows, batch_size=size.rows)


if __name__ == "__main__":
    main()
