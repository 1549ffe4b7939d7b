"""Training state in checkpoints: tensors as flat ranges (`logical`), the content of one checkpoint and the check that its weights are
finite (`contents`), its durable writing by all ranks (`commit`), and the bytes of tensors on the host (`staging`).

`fabricate.training.saves.saved_state` decides which state of a run is saved. Must not know the bytes of the format
(`fabricate.checkpoint.format`).
"""
