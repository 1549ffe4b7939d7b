"""Lightning's classes, recognised by name among the bases of the user's classes: `lightning.pytorch` and `pytorch_lightning` are two
packages with the same classes, and the user's code has imported the one that it needs. Nothing here imports either.
"""

from __future__ import annotations

from typing import Any

_PACKAGES = ("lightning", "pytorch_lightning")


def base(kind: type, name: str) -> type | None:
    """The class of Lightning called `name` among the bases of `kind`, or `kind` itself; None where there is none."""
    bases = (c for c in kind.__mro__ if c.__name__ == name and c.__module__.partition(".")[0] in _PACKAGES)
    return next(bases, None)


def is_a(value: object, name: str) -> bool:
    """Whether `value` is an object of Lightning's class `name`, or of one that inherits from it."""
    return base(type(value), name) is not None


def overrides(value: object, method: str) -> bool:
    """Whether the class of a module, a data module or a callback defines `method` itself, in place of Lightning's."""
    if method in vars(value):  # LambdaCallback; None removes a method
        return vars(value)[method] is not None
    own = getattr(type(value), method, None)
    for name in ("LightningModule", "LightningDataModule", "Callback"):
        if (lightnings := base(type(value), name)) is not None:
            return own is not None and own is not getattr(lightnings, method, None)
    return own is not None


def overridden(value: object, name: str) -> list[str]:
    """The public methods that the classes of `value` below Lightning's class `name` define."""
    below = [
        kind for kind in type(value).__mro__ if base(kind, name) and kind.__module__.partition(".")[0] not in _PACKAGES
    ]
    return sorted({key for kind in below for key, member in vars(kind).items() if key[0] != "_" and callable(member)})


def package(value: object) -> str:
    """The package whose classes `value` uses: "lightning.pytorch" or "pytorch_lightning"."""
    for kind in type(value).__mro__:
        if (name := kind.__module__.partition(".")[0]) in _PACKAGES:
            return "lightning.pytorch" if name == "lightning" else name
    return "lightning.pytorch"


def is_metric(value: Any) -> bool:
    """Whether `value` is a torchmetrics object, or a collection of them."""
    names = {c.__name__ for c in type(value).__mro__ if c.__module__.partition(".")[0] == "torchmetrics"}
    return bool(names & {"Metric", "MetricCollection"})
