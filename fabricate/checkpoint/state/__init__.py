"""Training state in checkpoints: tensors to and from flat ranges (`logical`), one checkpoint before it is written (`contents`), how all
ranks make it durable (`commit`), their bytes on the host (`staging`),
and the check that weights are finite (`finite`).

What of a run is saved is `fabricate.training.saves.saved_state`'s. Must not know the bytes of the format (`fabricate.checkpoint.format`).
"""
