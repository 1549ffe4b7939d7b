"""The public names: exactly those that are promised, resolved lazily."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fabricate
import fabricate.testing

# Constants-like names first, then classes, then functions: the order of ruff's RUF022.
PUBLIC = [
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
HEAVY = ["accelerate", "datasets", "numpy", "pluggy", "torch", "transformers"]


def test_the_public_names_are_the_promised_ones_in_order() -> None:
    assert fabricate.__all__ == PUBLIC
    assert fabricate.testing.__all__ == sorted(fabricate.testing.__all__)


@pytest.mark.parametrize("module", [fabricate, fabricate.testing], ids=lambda module: module.__name__)
def test_every_public_name_resolves_and_is_listed(module: object) -> None:
    for name in module.__all__:
        assert getattr(getattr(module, name), "__name__", name) == name  # a marker object has none
        assert name in dir(module)


@pytest.mark.parametrize("module", [fabricate, fabricate.testing], ids=lambda module: module.__name__)
def test_a_name_that_is_not_public_is_an_attribute_error(module: object) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("module", ["fabricate", "fabricate.testing"])
def test_importing_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("from fabricate import LightningModule", "fabricate has no LightningModule; use TrainModule"),
        ("from fabricate import ModelCheckpoint", "fabricate has no ModelCheckpoint; use run_dir=, with save_every="),
        ("from fabricate.callbacks import EarlyStopping", "write: from fabricate import EarlyStopping"),
        ("from fabricate import Nothing", "cannot import name 'Nothing' from 'fabricate'"),
        ("from fabricate.callbacks import Nothing", "cannot import name 'Nothing' from 'fabricate.callbacks'"),
    ],
)
def test_a_name_that_cannot_be_imported_is_an_error_with_the_right_name(line: str, remedy: str) -> None:
    with pytest.raises(ImportError, match=remedy):
        exec(line)
    assert not hasattr(fabricate, "nothing")
