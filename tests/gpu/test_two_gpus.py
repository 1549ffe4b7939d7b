"""Cases that need ranks on separate GPUs, over NCCL."""

from __future__ import annotations

import pytest

from campaigns.gpu import multi
from campaigns.gpu.measuring import Cuda

pytestmark = pytest.mark.two_gpus


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("moment", multi.MOMENTS)
def test_a_rank_that_dies_is_named_by_the_others_within_a_minute(strategy: str, moment: str) -> None:
    figures = multi.killed(Cuda(), 2, strategy, moment)
    assert figures["failed"] == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_over_nccl(strategy: str) -> None:
    figures = multi.scaling(Cuda(), [2], strategy, "tiny")
    assert figures["failed"] == []
