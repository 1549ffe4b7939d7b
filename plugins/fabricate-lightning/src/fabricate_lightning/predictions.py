"""The outputs of `predict_step` for each batch, as Lightning's BasePredictionWriter reads them from `trainer.predict_loop`.

Must not know: when a batch is predicted (`adapter`), who returns the predictions (`trainer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from accelerate.utils import send_to_device

from fabricate_lightning.kinds import is_a


class Predictions:
    """The outputs for the data sets of one prediction, on this rank."""

    def __init__(self) -> None:
        self.current_batch_indices: Sequence[int] = []
        """The indices of the rows of the current batch in the data set."""
        self.epoch_batch_indices: list[list[list[int]]] = []
        """The indices of the rows of every batch so far, by data set."""
        self._kept: list[list[Any]] = []
        self._keeps = False

    def begin(self, data_sets: int, callbacks: Iterable[Any], returned: bool) -> None:
        """Begin a prediction for `data_sets` data sets. Outputs are kept if they are `returned`, or if a writer needs them at the end."""
        writers = [callback for callback in callbacks if is_a(callback, "BasePredictionWriter")]
        self._keeps = returned or any(writer.interval.on_epoch for writer in writers)
        self._kept = [[] for _ in range(data_sets)]
        self.epoch_batch_indices = [[] for _ in range(data_sets)]

    def batch(self, number: int, indices: Sequence[int]) -> None:
        """Store the `indices` of the next batch, of the data set `number`."""
        self.current_batch_indices = list(indices)
        self.epoch_batch_indices[number].append(list(indices))

    def keep(self, number: int, output: Any) -> None:
        """Keep `output`, the prediction for a batch of the data set `number`, on the CPU."""
        if self._keeps:
            self._kept[number].append(send_to_device(output, "cpu"))

    @property
    def predictions(self) -> list[Any]:
        """The output for each batch; for several data sets, a list for each."""
        return self._kept[0] if len(self._kept) == 1 else self._kept
