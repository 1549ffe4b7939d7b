"""fabricate: a training framework on top of Hugging Face Accelerate.

All public names can be imported from `fabricate` or `fabricate.testing`. They are resolved on first use (PEP 562), so that `import
fabricate` takes milliseconds and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricate.callbacks.device_stats import DeviceStats
    from fabricate.callbacks.early_stopping import EarlyStopping
    from fabricate.callbacks.generate_samples import GenerateSamples
    from fabricate.callbacks.gradient_norms import GradientNorms
    from fabricate.callbacks.hub_push import HubPush
    from fabricate.callbacks.learning_rate_finder import LearningRateFinder
    from fabricate.callbacks.model_summary import ModelSummary
    from fabricate.callbacks.prediction_writer import PredictionWriter
    from fabricate.callbacks.profiler import Profiler
    from fabricate.callbacks.save_on_exception import SaveOnException
    from fabricate.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from fabricate.callbacks.throughput import Throughput
    from fabricate.callbacks.unfreeze_at import UnfreezeAt
    from fabricate.checkpoint.convert.importing import import_checkpoint
    from fabricate.configuration.batch_size_finder import BatchSizeFinder
    from fabricate.configuration.plan import Plan
    from fabricate.configuration.training_arguments import from_training_arguments
    from fabricate.errors import CheckpointError, ConfigurationError, FabricateError, PluginError, RankError
    from fabricate.hooks import Callback, hookimpl
    from fabricate.module import TrainModule
    from fabricate.precisions.base import Precision
    from fabricate.seeding import seed_everything
    from fabricate.strategies.base import Strategy
    from fabricate.strategies.ddp import DDP
    from fabricate.strategies.fsdp import FSDP
    from fabricate.strategies.single import Single
    from fabricate.trainer import Trainer
    from fabricate.values import Every, FitResult, metric_mode

_HOME = {
    "BatchSizeFinder": "configuration.batch_size_finder",
    "Callback": "hooks",
    "CheckpointError": "errors",
    "ConfigurationError": "errors",
    "DDP": "strategies.ddp",
    "DeviceStats": "callbacks.device_stats",
    "EarlyStopping": "callbacks.early_stopping",
    "Every": "values",
    "FSDP": "strategies.fsdp",
    "FabricateError": "errors",
    "FitResult": "values",
    "GenerateSamples": "callbacks.generate_samples",
    "GradientNorms": "callbacks.gradient_norms",
    "HubPush": "callbacks.hub_push",
    "LearningRateFinder": "callbacks.learning_rate_finder",
    "ModelSummary": "callbacks.model_summary",
    "Plan": "configuration.plan",
    "PluginError": "errors",
    "Precision": "precisions.base",
    "PredictionWriter": "callbacks.prediction_writer",
    "Profiler": "callbacks.profiler",
    "RankError": "errors",
    "SaveOnException": "callbacks.save_on_exception",
    "Single": "strategies.single",
    "StochasticWeightAveraging": "callbacks.stochastic_weight_averaging",
    "Strategy": "strategies.base",
    "Throughput": "callbacks.throughput",
    "TrainModule": "module",
    "Trainer": "trainer",
    "UnfreezeAt": "callbacks.unfreeze_at",
    "from_training_arguments": "configuration.training_arguments",
    "hookimpl": "hooks",
    "import_checkpoint": "checkpoint.convert.importing",
    "metric_mode": "values",
    "seed_everything": "seeding",
}

__version__ = "0.1.0"
__all__ = [
    "DDP",
    "FSDP",
    "BatchSizeFinder",
    "Callback",
    "CheckpointError",
    "ConfigurationError",
    "DeviceStats",
    "EarlyStopping",
    "Every",
    "FabricateError",
    "FitResult",
    "GenerateSamples",
    "GradientNorms",
    "HubPush",
    "LearningRateFinder",
    "ModelSummary",
    "Plan",
    "PluginError",
    "Precision",
    "PredictionWriter",
    "Profiler",
    "RankError",
    "SaveOnException",
    "Single",
    "StochasticWeightAveraging",
    "Strategy",
    "Throughput",
    "TrainModule",
    "Trainer",
    "UnfreezeAt",
    "from_training_arguments",
    "hookimpl",
    "import_checkpoint",
    "metric_mode",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        foreign = importlib.import_module("fabricate.registry.foreign_names")
        if remedy := foreign.use(name, foreign.IMPORTS):
            # not AttributeError, of which `from fabricate import` would not show the text
            raise ImportError(f"fabricate has no {name}{remedy}")
        raise AttributeError(f"module 'fabricate' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fabricate.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
