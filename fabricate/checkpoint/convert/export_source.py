"""The source of an export: an open checkpoint with the names of a state dict, without torch.

Must not know the formats that are written (`exporting`, `pickled`).
"""

from __future__ import annotations

from typing import Any

from fabricate.checkpoint.format import codec
from fabricate.checkpoint.format.directory import Chunk, Reader
from fabricate.errors import CheckpointError

__all__ = ["ExportSource"]


class ExportSource:
    """An open checkpoint with the names of a state dict.

    weights: maps state-dict names to logical names, without the buffers that a state dict leaves out; a shared tensor has only its first
    name here. aliases: maps the other names of a shared tensor to its first name.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.step = reader.manifest.step
        state: Any = reader.json("state.json")
        self.state = state
        module = state["module"]
        if frozen := module.get("frozen"):
            raise CheckpointError(
                f"checkpoint {reader.path} is not a whole model: it holds the trained weights only (save_frozen=False), and "
                f"{len(frozen)} others are left out. RUN_DIR/model/ has the trained weights in the format of their library. "
                "To merge adapters into their base model, use `fabricate ckpt merge`"
            )
        left_out = set(module.get("transient", ()))
        model = [n for n in reader.manifest.tensors if n.startswith("model/")]
        self.weights = {n.removeprefix("model/"): n for n in model if n.removeprefix("model/") not in left_out}
        self.aliases = {
            alias.removeprefix("model/"): name.removeprefix("model/")
            for alias, name in reader.manifest.aliases.items()
            if name.removeprefix("model/") in self.weights
        }
        self.pretrained: Any = self.decode(module.get("pretrained"))

    def decode(self, tree: Any) -> Any:
        """Return the value that `tree`, a part of state.json, encodes. Raises CheckpointError if it holds a tensor."""
        return codec.decode(tree, self._unexpected)

    def _unexpected(self, name: str) -> None:
        raise CheckpointError(
            f"checkpoint {self.reader.path}: the tensor {name!r} stands where a plain value is expected"
        )

    def chunk(self, name: str, logical: str) -> Chunk:
        """The whole logical tensor as a chunk called `name`. Its data is read and verified when the chunk is written."""
        record = self.reader.manifest.tensors[logical]
        return Chunk(name, 0, record.num_elements, record.dtype, record.shape, lambda: self.reader.read(logical))
