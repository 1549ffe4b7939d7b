"""LightningModules, DataModules and callbacks as they are, run by fabricate: `adapt(module)` and `Trainer`.

How a module becomes a `TrainModule` is in `adapter`; what its own methods call in `surface` (of the module) and `view` (of the trainer).
Lightning is not imported: the user's code has done so.
"""

from fabricate_lightning.adapting import adapt
from fabricate_lightning.checkpoints import load_from_checkpoint
from fabricate_lightning.trainer import Trainer

__all__ = ["Trainer", "adapt", "load_from_checkpoint"]
