"""Training state in and out of checkpoints: `logical` tensors, the `contents`, whether they are `finite`, `saving`, `committing`,
`resuming`, `exporting`.

Owns what a checkpoint of a run holds and how all ranks agree that it is durable, or which one to go on from. Must not know the
bytes of the format (`fabricate.checkpoint`) or the order of the loop.
"""
