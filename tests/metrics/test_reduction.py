"""Metrics: weighted means, sums, epoch averages, torchmetrics objects, over any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

from fabricate import ConfigurationError
from fabricate.metrics.reduction import Metrics, one_number
from fabricate.testing import run_ranks

CPU = torch.device("cpu")


class Alone:
    def combine_json(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        return combine([value])


def _metrics(*logged: tuple[str, Any, Any, str], weight: Any = 1) -> Metrics:
    metrics = Metrics(Alone(), CPU)
    metrics.take(list(logged), weight)
    return metrics


def test_a_mean_is_weighted_by_the_micro_batch() -> None:
    metrics = _metrics(("loss", 1.0, None, "mean"), weight=3)
    metrics.take([("loss", torch.tensor(5.0), None, "mean")], torch.tensor(1))
    assert metrics.reduce() == {"loss": 2.0}


def test_a_weight_given_to_log_overrides_that_of_the_micro_batch() -> None:
    assert _metrics(("a", 1.0, 9, "mean"), ("a", 11.0, 1, "mean"), weight=100).reduce() == {"a": 2.0}


def test_a_sum_adds_up_whatever_the_weight() -> None:
    assert _metrics(("n", 2, None, "sum"), ("n", 3, None, "sum"), weight=7).reduce() == {"n": 5.0}


def test_taking_metrics_empties_the_list_of_the_module() -> None:
    logged = [("a", 1.0, None, "mean")]
    Metrics(Alone(), CPU).take(logged, 1)
    assert logged == []


def test_a_weight_of_zero_hides_any_value() -> None:
    metrics = _metrics(("a", math.nan, 0, "mean"), ("a", 4.0, 2, "mean"))
    assert metrics.reduce() == {"a": 4.0}


def test_a_mean_over_nothing_is_left_out_between_and_not_a_number_at_the_end() -> None:
    metrics = _metrics(("a", 1.0, 0, "mean"))
    assert metrics.look() == metrics.reduce() == {}
    assert math.isnan(metrics.finish()["a"])


def test_nothing_pending_reduces_to_nothing() -> None:
    metrics = _metrics(("a", 1.0, None, "mean"))
    metrics.reduce()
    assert metrics.reduce() == {}


def test_a_mean_over_many_values_is_taken_in_double_precision() -> None:
    metrics = _metrics(*[("a", torch.tensor(0.1), None, "mean")] * 1000)
    assert metrics.reduce()["a"] == pytest.approx(float(torch.tensor(0.1)), abs=1e-15)


def test_compacting_leaves_one_entry_per_name_and_every_result_as_it_was() -> None:
    logged: list[Any] = [("a", torch.tensor(0.1 * n), n % 4, "mean") for n in range(50)]
    logged += [("a", 0.7, torch.tensor(3.0), "mean"), ("a", torch.tensor([math.nan]), 0, "mean")]
    logged += [("n", n, None, "sum") for n in range(20)] + [("nothing", 1.0, 0, "mean")]
    metrics, plain = _metrics(*logged), _metrics(*logged)
    metrics.compact()
    assert sorted(name for name, *_ in metrics.pending) == ["a", "n", "nothing"]
    metrics.take([("a", 2.0, 5, "mean"), ("n", 1, None, "sum")], 1)
    metrics.compact()
    plain.take([("a", 2.0, 5, "mean"), ("n", 1, None, "sum")], 1)
    assert metrics.reduce() == pytest.approx(plain.reduce(), rel=1e-14, nan_ok=True)


def test_finish_averages_over_everything_since_the_last_one() -> None:
    metrics = _metrics(("a", 1.0, 1, "mean"), ("n", 1, None, "sum"))
    metrics.reduce()
    metrics.take([("a", 4.0, 2, "mean"), ("n", 2, None, "sum")], 1)
    assert metrics.finish() == {"a": 3.0, "n": 3.0}
    assert metrics.finish() == {}


def test_looking_at_metrics_does_not_change_sums_or_means() -> None:
    metrics = _metrics(("a", 1.0, 1, "mean"), ("n", 2, None, "sum"))
    metrics.finish()  # the end of an epoch between two log boundaries
    metrics.take([("a", 4.0, 2, "mean")], 1)
    assert metrics.look() == metrics.look() == {"a": 3.0, "n": 2.0}
    assert metrics.reduce() == {"a": 3.0, "n": 2.0}
    assert metrics.look() == {}


def test_one_name_with_two_reductions_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"log\('a'\) is called with reduce='mean' and with reduce='sum'"):
        _metrics(("a", 1.0, None, "mean"), ("a", 1.0, None, "sum")).reduce()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_logged_is_its_value_at_that_moment(device: str) -> None:
    buffer, metrics = torch.ones(()), Metrics(Alone(), torch.device(device))
    metrics.take([("a", buffer, None, "mean")], 1)
    buffer.fill_(5)
    assert float(metrics.pending[0][1]) == 1


def test_metrics_go_on_from_a_loaded_state() -> None:
    metrics = _metrics(("a", 1.0, 1, "mean"))
    metrics.reduce()
    metrics.take([("a", torch.tensor(4.0), 2, "mean")], 1)
    state = metrics.state()
    for same_rank, average in ((True, 3.0), (False, 1.0)):
        again = Metrics(Alone(), CPU)
        again.load(state, same_rank=same_rank)
        assert again.finish() == {"a": average}


# ------------------------------------------------------------------------------------------------------------- what may be logged


@pytest.mark.parametrize(
    "value",
    [
        *(1, 0.5, True, math.inf, torch.tensor(2.0), torch.tensor([[3.0]]), torch.tensor(True)),
        *(np.float32(0.5), np.int64(3), np.array(0.5)),
    ],
)
def test_a_number_may_be_logged(value: Any) -> None:
    logged = one_number("a", value)
    assert _metrics(("a", logged, None, "mean")).reduce() == {"a": float(value)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), r"log\('a'\): a metric is one number, this tensor has shape \(2, 3\); reduce it first"),
        (torch.zeros(0), "this tensor has shape"),
        ("0.5", "give a number, a 0-dim tensor or a torchmetrics object, not str"),
        (None, "not NoneType"),
        (np.zeros(2), r"this array has shape \(2,\)"),
        (np.array("a"), "not str"),
        ([1.0], "not list"),
    ],
)
def test_what_is_no_number_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        one_number("a", value)


# -------------------------------------------------------------------------------------------------------------- torchmetrics


def test_a_torchmetrics_object_is_computed_and_reset_at_the_end() -> None:
    metric = torchmetrics.MaxMetric()
    metric.update(torch.tensor(3.0))
    metrics = _metrics(("max", metric, None, "object"), ("a", 1.0, None, "mean"))
    assert metrics.reduce() == {"a": 1.0}
    metric.update(torch.tensor(7.0))
    assert metrics.finish() == {"a": 1.0, "max": 7.0}
    assert metric.compute() == 7
    metrics.release()
    assert metric.max_value == -math.inf
    assert metrics.finish() == {}


def test_a_torchmetrics_object_has_one_result_under_all_its_names() -> None:
    metric = torchmetrics.MaxMetric()
    both = torchmetrics.MetricCollection([metric, torchmetrics.MinMetric()])
    both.update(torch.tensor([3.0, 7.0]))
    metrics = _metrics(*((name, value, None, "object") for name, value in (("a", metric), ("b", both), ("c", metric))))
    assert metrics.finish() == {"a": 7.0, "b_MaxMetric": 7.0, "b_MinMetric": 3.0, "c": 7.0}
    metrics.release()
    assert metric.max_value == -math.inf


def test_a_torchmetrics_object_that_computes_no_number_is_refused() -> None:
    metric = torchmetrics.CatMetric()
    metric.update(torch.tensor([1.0, 2.0]))
    with pytest.raises(ConfigurationError, match=r"log\('all'\): a metric is one number, this tensor has shape \(2,\)"):
        _metrics(("all", metric, None, "object")).finish()


# ---------------------------------------------------------------------------------------------------------------- several ranks


class Gloo:
    def combine_json(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        values: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(values, value)
        return combine(values)


def _reduce_on_ranks() -> list[Any]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    metrics = Metrics(Gloo(), CPU)
    # Rank 0 has three rows, rank 1 one; "rare" is logged by rank 1 only.
    logged: list[Any] = [("loss", float(rank), None, "mean"), ("n", 1, None, "sum")]
    if rank == 1:
        logged.append(("rare", 5.0, None, "mean"))
    metrics.take(logged, 3 - 2 * rank)
    first = metrics.reduce()
    if rank == 0:
        metrics.take([("loss", 10.0, None, "mean")], 4)
    return [first, metrics.reduce(), metrics.finish()]


def test_metrics_are_reduced_over_the_ranks() -> None:
    one, two = run_ranks(_reduce_on_ranks, 2)
    assert one == two
    assert one == [{"loss": 0.25, "n": 2.0, "rare": 5.0}, {"loss": 10.0}, {"loss": (1 + 40) / 8, "n": 2.0, "rare": 5.0}]
