"""Predictions written to disk, for data whose predictions do not fit into memory."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    import torch

    from fabricate.trainer import Trainer

PART_BYTES = 2**26
"""Bytes of predictions that a rank collects before it writes them."""
_COMPLETE = "complete.json"
_MOST_OPEN = 64
"""The files that `read` keeps open, beside one for each rank."""


class PredictionWriter(Callback):
    """Writes the results of `predict_step` to `folder` while `Trainer.predict` runs, instead of keeping them in memory.

    folder: new or empty; every rank writes its own files there, on a file system that all ranks see. `Trainer.predict` returns an empty
    list on rank 0; `PredictionWriter.read(folder)` yields what it would have returned, one prediction per sample in the order of the data.
    The files are safetensors; `predict_step` returns a tensor or an array whose leading dimension is the rows, a list with a value for each
    row (JSON, a tensor or an array, or a mapping of these), or a mapping or tuple of these.

        Trainer(plugins=[PredictionWriter("predictions")]).predict(module, data, batch_size=64)
        for prediction in PredictionWriter.read("predictions"): ...
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._own: Path | None = None
        """The folder of this rank. None outside of predictions, and on a rank whose rows another rank writes."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = self._batches = self._parts = 0

    def on_eval_start(self, trainer: Trainer, stage: str) -> None:
        if stage != "predict":
            return
        if trainer.is_main:
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise ConfigurationError(
                    f"PredictionWriter(folder={str(self.folder)!r}): the folder is not empty. Give a new one"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
        trainer.accelerator.wait_for_everyone()
        rank, world_size = trainer.accelerator.process_index, trainer.accelerator.num_processes
        self._start()
        if rank % trainer.strategy.ranks_per_row(world_size) == 0:
            self._own = self.folder / f"rank-{rank:05d}"
            self._own.mkdir()

    @hookimpl(wrapper=True)
    def eval_step(self, trainer: Trainer, stage: str) -> Generator[None, Any, Any]:
        output = yield
        if stage != "predict":
            return output
        if trainer.data_set:
            raise ConfigurationError(
                "PredictionWriter writes the predictions for one data set, but predict was given a mapping of several (this is "
                f"{trainer.data_set!r}). Call predict once for each data set"
            )
        if self._own is not None and len(trainer.batch_indices):
            self._add(output, trainer.batch_indices)
        return ()  # the loop keeps nothing

    def _add(self, output: Any, rows: Sequence[int]) -> None:
        import torch

        number = self._batches
        tensors: dict[str, torch.Tensor] = {}
        tree = json.dumps(_tree(output, len(rows), f"{number}", tensors)).encode()
        tensors[f"{number}.rows"] = torch.tensor(list(rows), dtype=torch.int64)
        tensors[f"{number}.tree"] = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
        self._tensors |= tensors
        self._batches += 1
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes >= PART_BYTES:
            self._write()

    def _write(self) -> None:
        from safetensors.torch import save_file

        assert self._own is not None
        if self._tensors:
            path = self._own / f"part-{self._parts:06d}.safetensors"
            save_file(self._tensors, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
            self._parts += 1
        self._tensors, self._bytes = {}, 0

    def on_eval_end(self, trainer: Trainer, stage: str) -> None:
        if stage != "predict":
            return
        if self._own is not None:
            self._write()
        trainer.accelerator.wait_for_everyone()
        if trainer.is_main:
            (self.folder / _COMPLETE).write_text(json.dumps({"format": 1, "ranks": trainer.accelerator.num_processes}))
        self._start()

    def on_teardown(self) -> None:
        self._start()

    def _start(self) -> None:
        self._own, self._tensors, self._bytes, self._batches, self._parts = None, {}, 0, 0, 0

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> Iterator[Any]:
        """The predictions in `folder`, one per sample in the order of the data, tensors on the CPU. It holds 16 bytes per sample and one
        batch of each rank in memory. Raises `ConfigurationError` if the predictions are not complete."""
        return _read(Path(folder))


def _tree(output: Any, rows: int, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The `output` for a batch, as JSON. Tensors are added to `tensors`, and the JSON contains their names."""
    import numpy
    import torch

    if isinstance(output, torch.Tensor | numpy.ndarray | list):
        lengths = (len(output),) if isinstance(output, list) else tuple(output.shape[:1])
        if lengths != (rows,):
            raise ConfigurationError(
                f"predict_step returned {_size(output)} for a batch of {rows} rows. Return one prediction per row: "
                "the length of a list, or the first dimension of a tensor, has to be the number of rows"
            )
    if isinstance(output, torch.Tensor | numpy.ndarray):
        return _stored(output, name, tensors)
    if isinstance(output, list) and any(map(_holds_numbers, output)):
        return {"rows": [_value(value, name, tensors) for value in output]}
    if isinstance(output, list):
        return {"list": [_json(value) for value in output]}
    if isinstance(output, Mapping):
        return {"mapping": [[_json(key), _tree(value, rows, name, tensors)] for key, value in output.items()]}
    if isinstance(output, tuple) and output:
        return {"tuple": [_tree(value, rows, name, tensors) for value in output]}
    raise ConfigurationError(
        f"predict_step returned {type(output).__name__}. Return a tensor, an array, a list, or a mapping or tuple of these"
    )


def _stored(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A tensor, an array or a number of NumPy, added to `tensors`."""
    import numpy
    import torch

    name = f"{name}.{len(tensors)}"
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    try:
        tensors[name] = torch.from_numpy(numpy.array(value, order="C"))
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(
            f"PredictionWriter: predict_step returned an array that cannot be stored ({exc}). Return numbers, or a list"
        ) from None
    return {"array": name}


def _holds_numbers(value: Any) -> bool:
    """Whether the prediction of a row is a tensor, an array or a NumPy number, or a mapping that contains one. NumPy's float64 and str_ do
    not count, because they are also Python values, which JSON can hold."""
    import numpy
    import torch

    if isinstance(value, Mapping):
        return any(map(_holds_numbers, value.values()))
    return isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic) and not isinstance(value, float | str)


def _value(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The prediction of one row, as JSON. Its tensors and arrays are added to `tensors`."""
    if not _holds_numbers(value):
        return {"json": _json(value)}
    if isinstance(value, Mapping):
        return {"mapping": [[_json(key), _value(inner, name, tensors)] for key, inner in value.items()]}
    return _stored(value, name, tensors)


def _json(value: Any) -> Any:
    """`value` after a round trip through JSON. Raises `ConfigurationError` if that changes it, as for a tuple or a mapping with keys that
    are not strings."""
    try:
        again = json.loads(json.dumps(value))
        if not _equal(again, value):
            raise TypeError(f"{value!r} would come back as {again!r}")
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(
            f"PredictionWriter: predict_step returned a value that cannot be stored as JSON ({exc}). Return tensors, numbers, "
            "strings, lists, or mappings with strings as keys"
        ) from None
    return again


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other or one != one)


def _size(output: Any) -> str:
    kind = "array" if type(output).__module__ == "numpy" else "tensor"
    return f"a list of {len(output)}" if isinstance(output, list) else f"a {kind} of shape {tuple(output.shape)}"


def _row(tree: Any, row: int, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The prediction of one row of a batch."""
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value][row].clone()
    if kind == "array":
        return tensors[value].numpy()[row].copy()
    if kind == "list":
        return value[row]
    if kind == "rows":
        return _whole(value[row], tensors)
    if kind == "mapping":
        return {key: _row(inner, row, tensors) for key, inner in value}
    return tuple(_row(inner, row, tensors) for inner in value)


def _whole(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The prediction of one row that was stored by itself."""
    ((kind, value),) = tree.items()
    if kind == "mapping":
        return {key: _whole(inner, tensors) for key, inner in value}
    if kind == "json":
        return value
    return tensors[value].clone() if kind == "tensor" else tensors[value].numpy()[()].copy()


class _File:
    """An open file, with the names of the tensors of each of its batches."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(path, framework="pt")
        self._names: dict[int, list[str]] = {}
        for name in self._file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
            self._names.setdefault(int(name.partition(".")[0]), []).append(name)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of batch `number`."""
        return {name: self._file.get_tensor(name) for name in self._names[number]}


class _Batch:
    """The batch of a rank that is in memory: the one that was read last."""

    def __init__(self, place: tuple[Path, int], tensors: dict[str, torch.Tensor]) -> None:
        self.place = place
        self._tensors = tensors
        self._tree = json.loads(tensors[f"{place[1]}.tree"].numpy().tobytes())

    def row(self, row: int) -> Any:
        """The prediction for row `row` of this batch."""
        return _row(self._tree, row, self._tensors)


def _read(folder: Path) -> Iterator[Any]:
    import numpy

    if not (folder / _COMPLETE).is_file():
        raise ConfigurationError(
            f"{folder} holds incomplete predictions, because the predict that wrote them did not finish. Run predict again, "
            "with a new folder"
        )
    places: list[tuple[int, Path, int]] = []
    rows, of_place, in_batch = [], [], []
    of_rank = sorted(folder.glob("rank-*"))
    for rank, own in enumerate(of_rank):
        for path, number, indices in _batches(own):
            rows.append(indices)
            of_place.append(numpy.full(len(indices), len(places), dtype=numpy.int32))
            in_batch.append(numpy.arange(len(indices), dtype=numpy.int32))
            places.append((rank, path, number))
    order = numpy.argsort(numpy.concatenate(rows), kind="stable")
    where, inside = numpy.concatenate(of_place), numpy.concatenate(in_batch)
    open_batches: dict[int, _Batch] = {}
    opened = functools.lru_cache(_MOST_OPEN + len(of_rank))(_File)  # at least one for each rank
    for each in order:
        rank, path, number = places[where[each]]
        if rank not in open_batches or open_batches[rank].place != (path, number):
            open_batches[rank] = _Batch((path, number), opened(path).batch(number))
        yield open_batches[rank].row(int(inside[each]))


def _batches(own: Path) -> Iterator[tuple[Path, int, Any]]:
    """(file, number of the batch, indices of its rows in the data) of each batch of a rank."""
    from safetensors import safe_open

    for path in sorted(own.glob("part-*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            numbers = sorted(int(name.partition(".")[0]) for name in names if name.endswith(".rows"))
            for number in numbers:
                yield path, number, file.get_tensor(f"{number}.rows")
