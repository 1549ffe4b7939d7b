"""The modes of modules (training or evaluation), set as in a loop by hand: by `train` and `eval`, which modules may override.

Must not know: runs, when something is evaluated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch


@contextlib.contextmanager
def evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    """Run the body with all submodules in eval mode. Afterwards each has its mode from before."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
        _switch_back(module, modes)
    except BaseException:  # without code of the modules, which could hide the error
        for each, mode in modes.items():
            each.training = mode
        raise


def _switch_back(module: torch.nn.Module, modes: Mapping[torch.nn.Module, bool], parent_trains: bool = False) -> None:
    """Call `train` and `eval`, because a module may do more than to set its mode (merge weights, drop a cache). A part that the `train` of
    its parent puts into eval mode stays there."""
    mode = modes.get(module, module.training)
    if module.training != mode and not (mode and parent_trains):
        module.train(mode)
    for child in module.children():
        _switch_back(child, modes, mode)
