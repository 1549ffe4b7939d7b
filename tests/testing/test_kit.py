"""The conformance kit on fabricate's own strategies and plugins, and the guarantees of the kit."""

from __future__ import annotations

import optimi
import pytest
import torch

from fabricate import FSDP, ConfigurationError, EarlyStopping
from fabricate.registry.registry import Registry
from fabricate.testing import KitFailure, check_plugin, check_precision, check_strategy, run_ranks
from fabricate.testing.reference import Case, Fit, Subject, by_hand, rows, run_fits


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_built_in_strategies_pass(strategy: str) -> None:
    check_strategy(strategy)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_built_in_precisions_pass(precision: str) -> None:
    check_precision(precision)


def test_a_precision_is_checked_beside_the_strategies_asked_for() -> None:
    check_precision("bf16", strategies=["single", "ddp", "fsdp:wrap=Linear"])


def test_built_in_plugins_pass() -> None:
    check_plugin(EarlyStopping, strategies=["single", "ddp", "fsdp"])


def kahan(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = optimi.AdamW(parameters, lr=0.01)
    return optimizer


def test_pure_bfloat16_passes_with_an_optimizer_that_it_takes() -> None:
    check_precision("bf16-true", rtol=0.1, strategies=["single", "ddp", "fsdp"], optimizer=kahan)


def test_a_model_larger_than_its_device_passes() -> None:
    check_strategy("device_map")


def test_every_built_in_name_is_checked() -> None:
    """Here or above; TF32 needs an NVIDIA GPU."""
    registry = Registry()
    assert registry.names("strategy") == ["ddp", "device_map", "fsdp", "single"]
    assert registry.names("precision") == ["bf16", "bf16-true", "fp16", "fp32", "no", "tf32"]


def test_a_name_that_nobody_offers_is_a_failure_that_names_it() -> None:
    with pytest.raises(KitFailure, match=r"check_precision\('bf61'\).*failed") as caught:
        check_precision("bf61")
    assert "did you mean 'bf16'?" in str(caught.value)


@pytest.mark.parametrize("subject", [FSDP(), lambda: FSDP()], ids=["object", "lambda"])
def test_an_object_or_lambda_is_refused_because_every_rank_makes_its_own(subject: object) -> None:
    with pytest.raises(ConfigurationError, match="at the top level of a file"):
        check_strategy(subject)


def test_the_loop_by_hand_leaves_the_random_generator_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    by_hand(Case(4))
    assert torch.equal(before, torch.get_rng_state())


def test_the_kits_data_holds_what_the_checks_need() -> None:
    tokens = rows(33).tensors[2].sum(1)
    assert 0 in tokens, "rows without a token"
    assert len(set(tokens.tolist())) == 5, "unequal weights"
    assert tokens[::4].min() > 0, "a ragged end of one row that counts"
    hand = by_hand(Case(8, accumulation=2, max_grad_norm=0.1))
    assert max(norm for norm in hand.norms if norm is not None) > 0.1, "clipping is at work"


def test_ranks_record_what_one_process_records() -> None:
    case = Case(8)
    hand, traces = by_hand(case), run_ranks(run_fits, 2, [Fit("plain", case, Subject("ddp"))])
    assert [trace.losses for (trace,) in traces] == [pytest.approx(hand.losses, rel=1e-5)] * 2
