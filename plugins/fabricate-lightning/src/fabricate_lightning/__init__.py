"""Unchanged LightningModules, DataModules and callbacks, run by fabricate: `adapt(module)` and `Trainer`.

`adapter` makes a module a `TrainModule`. `surface` has the methods of the module that its code calls, and `view` those of the trainer. This
package does not import Lightning; the user's code does.
"""

from fabricate_lightning.adapting import adapt
from fabricate_lightning.checkpoints import load_from_checkpoint
from fabricate_lightning.trainer import Trainer

__all__ = ["Trainer", "adapt", "load_from_checkpoint"]
