"""zero1, zero2 and zero3 with optimizer state, or parameters too, in host memory or in files: the same numbers, and the requirements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, Trainer
from fabricate.testing import run_ranks
from tests.support.by_hand import ROWS, Net, assert_as_by_hand, assert_idle_layers_as_by_hand, fit


@pytest.mark.parametrize("strategy", ["zero2:offload_optimizer=cpu", "zero3:offload_optimizer=cpu,offload_param=cpu"])
def test_losses_norms_and_weights_are_those_of_a_loop_by_hand(strategy: str) -> None:
    assert_as_by_hand(strategy, 2)


@pytest.mark.parametrize("strategy", ["zero1:offload_optimizer=cpu", "zero3:offload_optimizer=cpu"])
def test_a_layer_that_a_window_does_not_use_has_a_gradient_of_zero_there(strategy: str) -> None:
    assert_idle_layers_as_by_hand(strategy)


def _without_files(path: str) -> list[str]:
    """What is said where the folder is not there, and where nothing can be compiled against libaio."""
    errors = []
    for folder, compiler in ((f"{path}/nowhere", ""), (path, "false")):
        trainer = Trainer(
            strategy=f"zero3:offload_optimizer=nvme,nvme_path={folder}", max_steps=1, precision="fp32", progress=False
        )
        with pytest.MonkeyPatch.context() as patch:
            if compiler:
                patch.setenv("CC", compiler)
            with pytest.raises(ConfigurationError) as caught:
                trainer.fit(Net(), ROWS, batch_size=4)
        errors.append(str(caught.value))
    return errors


def test_offload_to_files_says_what_the_machine_lacks_and_leaves_nothing(tmp_path: Path) -> None:
    """That it trains is shown by `python -m campaigns.swapping`: what it needs takes minutes to compile."""
    for nowhere, no_library in run_ranks(_without_files, 2, str(tmp_path)):
        assert "nowhere' cannot be written to: No such file or directory; give a folder on a local disk" in nowhere
        assert "needs libaio with its headers: apt install libaio-dev" in no_library
    assert list(tmp_path.iterdir()) == []


class FirstOnly(Net):
    """A layer that only the first micro-batch of an update uses."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        loss = (self.second(self.first(batch)).square()).mean()
        return {"loss": loss + self(batch).mean() if batch_idx % 2 == 0 else loss, "weight": len(batch)}


def _lost() -> list[str]:
    errors = []
    for strategy in ("zero2", "zero3"):
        try:
            fit(f"{strategy}:offload_optimizer=cpu", steps=1, net=FirstOnly)
        except ConfigurationError as exc:
            errors.append(str(exc))
    return errors


def test_a_gradient_that_deepspeed_would_leave_out_is_an_error() -> None:
    for errors in run_ranks(_lost, 2):
        assert [text.partition(": ")[0] for text in errors] == [
            f"strategy='zero{n}' with offload_optimizer" for n in (2, 3)
        ]
        assert all("in an earlier micro-batch of this update but none in the last" in text for text in errors)
