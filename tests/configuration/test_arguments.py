"""The signature of Trainer matches the checks of `Settings`; the values of checked arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, Every, Trainer
from fabricate.configuration.arguments import CHECKS, Settings

PARAMETERS = inspect.signature(Trainer).parameters


def test_the_signature_and_the_checks_have_the_same_names_in_the_same_order() -> None:
    assert list(PARAMETERS) == list(CHECKS)
    assert [*CHECKS, "given"] == [field.name for field in dataclasses.fields(Settings)]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in PARAMETERS.values())


@pytest.mark.parametrize("name", CHECKS)
def test_a_default_passes_its_own_check_and_a_checked_value_passes_again(name: str) -> None:
    default = PARAMETERS[name].default
    checked = CHECKS[name](name, default)
    assert getattr(Trainer().settings, name) == checked
    assert CHECKS[name](name, checked) == checked


def test_a_value_that_cannot_be_compared_with_a_default_is_refused_by_its_check() -> None:
    with pytest.raises(ConfigurationError, match="max_steps="):
        Trainer(max_steps=torch.tensor([1, 2]))  # type: ignore[arg-type]


def test_defaults_stand_in_the_signature_only() -> None:
    assert [field.name for field in dataclasses.fields(Settings) if field.default is not dataclasses.MISSING] == []
    with pytest.raises(TypeError):
        Settings()  # type: ignore[call-arg]


@pytest.mark.parametrize("name", CHECKS)
def test_every_argument_is_described_for_help_and_editors(name: str) -> None:
    assert re.search(rf"(^|[ ,]){name}( \(.*?\))?[,:]", inspect.getdoc(Trainer) or "", re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "argument", "checked"),
    [
        ("max_time", "11 hours", Every(hours=11)),
        ("log_every", 5, Every(steps=5)),
        ("compile", True, {}),
        ("compile", False, None),
        ("run_dir", "runs/1", Path("runs/1").absolute()),
        ("keep", {"best": 2}, {"last": 1, "metric": "val_loss", "mode": "min", "best": 2}),
        ("keep", {"last": "all", "best": 1}, {"last": None, "metric": "val_loss", "mode": "min", "best": 1}),
        ("trackers", "tensorboard", ("tensorboard",)),
        ("accept_changes", ["seed"], ("seed",)),
    ],
)
def test_a_checked_value_has_the_form_that_the_rest_of_the_package_reads(
    name: str, argument: Any, checked: Any
) -> None:
    assert getattr(Trainer(**{name: argument}).settings, name) == checked


@pytest.mark.parametrize("name", [n for n, hint in typing.get_type_hints(Settings).items() if hint is not Any])
def test_a_checked_default_has_the_type_of_its_field(name: str) -> None:
    hint = typing.get_type_hints(Settings)[name]
    union = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    assert isinstance(getattr(Trainer().settings, name), tuple(typing.get_origin(kind) or kind for kind in union))


def test_an_unknown_argument_is_refused_before_the_value_of_another() -> None:
    with pytest.raises(ConfigurationError, match=r"^Trainer has no argument 'max_step'; did you mean 'max_steps'\?"):
        Trainer(max_step=1, seed=-1)


def test_fast_dev_run_replaces_limits_and_leaves_the_rest() -> None:
    settings = Trainer(fast_dev_run=True, max_epochs=3, trackers=["tensorboard"], seed=4, validate_every=None).settings
    assert (settings.max_steps, settings.max_epochs, settings.limit_val_batches) == (1, None, 1)
    assert (settings.validate_every, settings.trackers, settings.seed) == (Every(steps=1), (), 4)
