"""A DeepSpeed configuration: the settings that the user's file gives to the Trainer, the refusal of keys, and values for every "auto".

A value that the file sets is kept; if fabricate determines another value, the error names both. Must not
know: the engine, how anything is trained.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate import ConfigurationError
from fabricate_deepspeed import keys

if TYPE_CHECKING:
    from fabricate import Strategy

AUTO = "auto"
_BUCKET = 500_000_000
"""DeepSpeed's own default, in elements."""
NO_NVME = "offload to NVMe is supported for the optimizer of stage 3 only; otherwise offload to host memory ('cpu') or use more ranks"
_SWAP_BUFFERS = 5
"""Tensors of a group that are in memory at once: weights, gradient, and up to three of the optimizer's state."""
_SUB_GROUP = 1_000_000_000
"""DeepSpeed's own default, in elements of a rank's part."""
_OFFLOAD = ("offload_optimizer", "offload_param")
_TRAINERS = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", int),
    "gradient_clipping": ("max_grad_norm", float),
    "train_batch_size": ("global_batch_size", int),
    "train_micro_batch_size_per_gpu": ("batch_size", int),
}


class Configuration:
    """One configuration for one stage. `source`: the path of a JSON file, a mapping like its content, or None."""

    def __init__(self, stage: int, source: str | Mapping[str, Any] | None) -> None:
        self.stage = stage
        self.where = "config" if isinstance(source, Mapping) else str(source or "fabricate's own configuration")
        self.filled: dict[str, Any] = {}
        """Every value that the user left open, by its path, for the plan."""
        self._given_by_user = _read(source)
        keys.check(self._given_by_user, self.where)
        self._given = copy.deepcopy(self._given_by_user)
        if "bfloat16" in self._given:
            self._given["bf16"] = self._given.pop("bfloat16")
        for section in ("zero_optimization", "fp16", "bf16"):
            if not isinstance(self._given.setdefault(section, {}), dict):
                raise ConfigurationError(
                    f"{self.where}: {section}={self._given[section]!r} is not a section; write a mapping of options, as in "
                    "DeepSpeed's documentation"
                )
        self.content: dict[str, Any] = {}
        """The configuration for DeepSpeed, made by `fill`."""

    def asks(self) -> Iterator[tuple[str, tuple[Any, str]]]:
        """The settings of the Trainer in the file: name, value, and the place in the file."""
        half = [name for name in ("fp16", "bf16") if self._given[name].get("enabled") is True]
        if len(half) == 2:
            raise ConfigurationError(f"{self.where}: fp16.enabled and bf16.enabled are both true; remove one")
        for name in half:
            yield "precision", (name, f"{name}.enabled in {self.where}")
        for key, (name, kind) in _TRAINERS.items():
            value = self._given.get(key, AUTO)
            if value in (AUTO, None) or (key == "gradient_clipping" and value == 0):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0 or kind(value) != value:
                raise ConfigurationError(
                    f"{self.where}: {key}={value!r} is not a positive number; correct it, or write 'auto'"
                )
            yield name, (kind(value), f"{key} in {self.where}")

    def fill(self, settled: Strategy.Settled, offload: Mapping[str, str | None]) -> None:
        """Make `content` from the user's configuration and the settled settings. Raises `ConfigurationError` for two values that differ."""
        self.content, self.filled = copy.deepcopy(self._given), {}
        zero = self._section("zero_optimization")
        self._set(zero, "stage", self.stage, f"strategy='zero{self.stage}'")
        for section, device in offload.items():
            if zero.get(section, {}).get("device") == "nvme":
                if section != "offload_optimizer" or self.stage < 3:
                    raise ConfigurationError(
                        f"{self.where}: zero_optimization.{section}.device is 'nvme'; {NO_NVME}: write 'cpu'"
                    )
                self._check_swapping(zero[section])
            if device is not None:
                inner = zero.setdefault(section, {})
                self._set(inner, "device", device, f"the option {section}={device}")
        for name in ("fp16", "bf16"):
            if self.content[name] or settled.precision.mixed_precision == name:
                enabled = settled.precision.mixed_precision == name
                self._set(self._section(name), "enabled", enabled, f"precision={settled.precision.name!r}")
        if settled.precision.mixed_precision == "fp16":
            self._fill_loss_scale(settled)
        self._fill_batch(settled)
        self._set(
            self.content, "gradient_clipping", settled.max_grad_norm or 0.0, f"max_grad_norm={settled.max_grad_norm}"
        )
        # fabricate checks the optimizer itself and uses the module's, also if its state is on the CPU.
        self.content |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}

    def _check_swapping(self, section: dict[str, Any]) -> None:
        for key in ("pipeline_read", "pipeline_write", "pipeline", "fast_init"):
            if section.get(key):
                raise ConfigurationError(
                    f"{self.where}: zero_optimization.offload_optimizer.{key} is refused: with asynchronous transfers, a "
                    "checkpoint could be read while a transfer is still running; remove it"
                )
        if section.get("nvme_path", AUTO) in (AUTO, None):
            raise ConfigurationError(
                f"{self.where}: zero_optimization.offload_optimizer.device is 'nvme' without nvme_path; give a folder on a local disk"
            )

    def swaps_to(self) -> str | None:
        """The folder for the files of an optimizer that is offloaded to files, else None."""
        section = self.content["zero_optimization"].get("offload_optimizer") or {}
        return str(section["nvme_path"]) if section.get("device") == "nvme" else None

    def ask_to_swap(self, path: str) -> None:
        """Set `path`, the option nvme_path. Raises `ConfigurationError` if the file has another."""
        section = self.content["zero_optimization"]["offload_optimizer"]
        self._set(section, "nvme_path", path, f"the option nvme_path={path}")

    def swap_to(self, folder: str) -> None:
        """Put the files of the optimizer into `folder`."""
        section = self.content["zero_optimization"]["offload_optimizer"]
        section |= {"nvme_path": folder, "buffer_count": max(_SWAP_BUFFERS, section.get("buffer_count", 0))}

    def swap_buffers(self, num_elements: float) -> int:
        """Bytes of the buffers through which a rank's `num_elements` are swapped."""
        size = (self.content or self._given)["zero_optimization"].get("sub_group_size", _SUB_GROUP)
        return int(_SWAP_BUFFERS * 4 * min(num_elements, _SUB_GROUP if size == AUTO else size))

    def fill_sizes(self, num_elements: int, hidden_size: int | None) -> None:
        """Fill the sizes that depend on the model, of which `num_elements` are trained: with transformers' values if the model has a hidden
        size, else DeepSpeed's defaults. A bucket is never larger than the trained parameters, because the rest of it would waste memory."""
        zero = self.content["zero_optimization"]
        square = hidden_size**2 if hidden_size else None
        sizes = {"reduce_bucket_size": square or _BUCKET, "allgather_bucket_size": _BUCKET}
        if self.stage == 3:
            sizes["stage3_prefetch_bucket_size"] = int(0.9 * square) if square else 50_000_000
            sizes["stage3_param_persistence_threshold"] = 10 * hidden_size if hidden_size else 100_000
        for key, size in sizes.items():
            if zero.get(key, AUTO) == AUTO:
                even = num_elements + num_elements % 2  # stages 1 and 2 need an even number
                zero[key] = size if "threshold" in key else min(size, max(even, 2))
                self.filled[f"zero_optimization.{key}"] = zero[key]
        compared = ("optimizer.", "scheduler.")  # `check_optimizer` compares them with the module's
        left = [p for p, value in _leaves(self.content) if value == AUTO and not p.startswith(compared)]
        if left:
            raise ConfigurationError(
                f"{self.where}: 'auto' has no meaning for {', '.join(left)}; give a value, or leave it out"
            )

    def describe(self, settled: Strategy.Settled) -> dict[str, str]:
        """Lines for the plan: the values filled in, the keys without effect, and how the loss is scaled."""
        lines = {}
        filled = ", ".join(f"{path}={value}" for path, value in self.filled.items())
        if self._given_by_user:
            lines["configuration"] = f"{self.where}; filled in: {filled or 'nothing'}"
        if idle := keys.without_effect(self._given_by_user):
            lines["without effect"] = "; ".join(f"{key}: {why}" for key, why in idle.items())
        if settled.scales_loss:
            half = self.content["fp16"]
            fixed = half.get("loss_scale", 0)
            window, power = half["loss_scale_window"], half["initial_scale_power"]
            lines["loss scaling"] = (
                f"fixed at {fixed:g}"
                if fixed
                else f"dynamic from {2**power:g}, grows after {window} updates without overflow"
            ) + "; by DeepSpeed"
        offload = {name: self.content["zero_optimization"].get(name, {}).get("device") for name in _OFFLOAD}
        if any(offload.values()):
            lines["offload"] = ", ".join(f"{name} {device}" for name, device in offload.items() if device)
        lines["looks at the gradient"] = (
            "one wait for the device per update; an update whose gradient is not finite is not applied"
        )
        return lines

    def bucket(self, num_elements: int) -> int:
        """Elements of the bucket in which gradients of a model of `num_elements` are averaged."""
        size = (self.content or self._given)["zero_optimization"].get("reduce_bucket_size", AUTO)
        return min(_BUCKET, num_elements) if size == AUTO else int(size)

    def check_optimizer(self, optimizer: Any) -> None:
        """Compare the sections `optimizer` and `scheduler` with those of the module, which are used, and remove them from `content`."""
        section = self.content.pop("optimizer", None)
        if section:
            self._compare_optimizer(optimizer, section)
        scheduler = self.content.pop("scheduler", None)
        if scheduler and any(value != AUTO for value in scheduler.get("params", {}).values()):
            raise ConfigurationError(
                f"{self.where}: scheduler {scheduler.get('type')!r} sets values, but the scheduler comes from the module: return "
                "(optimizer, scheduler) from configure_optimizers and remove the section"
            )
        if scheduler:
            self.filled["scheduler"] = "the module's"

    def _compare_optimizer(self, optimizer: Any, section: Mapping[str, Any]) -> None:
        own = type(optimizer).__name__
        kind = section.get("type", AUTO)
        if kind != AUTO and own.lower() not in keys.same_optimizer(kind, section.get("params", {})):
            raise ConfigurationError(
                f"{self.where}: optimizer.type is {kind!r}, but configure_optimizers returns {own}; remove the section, or return "
                f"{kind!r}"
            )
        group = optimizer.param_groups[0]
        for key, value in section.get("params", {}).items():
            if value == AUTO:
                self.filled[f"optimizer.params.{key}"] = group.get(key)
            elif key in group and _plain(group[key]) != _plain(value):
                raise ConfigurationError(
                    f"{self.where}: optimizer.params.{key} is {value}, but {own} of configure_optimizers has {group[key]}; remove "
                    "one, or make them equal"
                )
            elif key not in group and key not in keys.OPTIMIZER_SWITCHES:
                raise ConfigurationError(f"{self.where}: optimizer.params.{key} is unknown to {own}; remove it")

    def _fill_batch(self, settled: Strategy.Settled) -> None:
        micro, number = settled.micro_batch_size, settled.gradient_accumulation_steps
        self._set(self.content, "gradient_accumulation_steps", number, f"gradient_accumulation_steps={number}")
        if micro is None:  # size unknown, or an evaluation: DeepSpeed only needs consistent numbers
            given = self._given.get("train_micro_batch_size_per_gpu", AUTO)
            micro = given if isinstance(given, int) else 1
            self.content["train_micro_batch_size_per_gpu"] = micro
            self.content["train_batch_size"] = micro * number * settled.world_size
            return
        self._set(self.content, "train_micro_batch_size_per_gpu", micro, f"batches of {micro} rows per rank")
        product = f"{micro} rows x {number} micro-batches x {settled.world_size} ranks"
        self._set(self.content, "train_batch_size", micro * number * settled.world_size, product)

    def _fill_loss_scale(self, settled: Strategy.Settled) -> None:
        scaler = settled.precision.loss_scaler(settled.device)
        usual = type(settled.precision)().loss_scaler(settled.device)
        assert scaler is not None
        assert usual is not None
        power = math.log2(scaler.get_scale())
        if not power.is_integer():
            raise ConfigurationError(
                f"precision='fp16': init_scale={scaler.get_scale():g}: under DeepSpeed it has to be a power of two"
            )
        wanted = {"initial_scale_power": int(power), "loss_scale_window": scaler.get_growth_interval()}
        defaults = {
            "initial_scale_power": int(math.log2(usual.get_scale())),
            "loss_scale_window": usual.get_growth_interval(),
        }
        section = self.content["fp16"]
        for key, value in wanted.items():
            if value != defaults[key] or section.get(key, AUTO) == AUTO:
                self._set(section, key, value, "the options of precision='fp16'")

    def _section(self, name: str) -> dict[str, Any]:
        section: dict[str, Any] = self.content.setdefault(name, {})
        return section

    def _set(self, section: dict[str, Any], key: str, value: Any, known_from: str) -> None:
        """Set `key` to `value`, or raise `ConfigurationError` if it has another value."""
        path = next((f"{name}.{key}" for name, inner in self.content.items() if inner is section), key)
        if section.get(key, AUTO) in (AUTO, None):
            section[key] = value
            self.filled[path] = value
        elif section[key] != value:
            raise ConfigurationError(
                f"{self.where}: {path} is {section[key]!r}, but {known_from} means {value!r}; remove one, or make them equal"
            )


def _read(source: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if source is None or isinstance(source, Mapping):
        return copy.deepcopy(dict(source or {}))
    try:
        content = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigurationError(f"config={source!r} cannot be read: {exc.strerror}; give the path of a file") from exc
    except ValueError as exc:
        raise ConfigurationError(f"config={source!r} is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigurationError(f"config={source!r} holds no settings; give a DeepSpeed configuration")
    return content


def _leaves(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value
