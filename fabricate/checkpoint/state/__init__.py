"""Training state in checkpoints: tensors as flat ranges (`logical`), the content of one checkpoint (`contents`), its durable writing by all
ranks (`commit`), the bytes of tensors on the host (`staging`), and the check that weights are finite (`finite`).

`fabricate.training.saves.saved_state` decides which state of a run is saved. Must not know the bytes of the format
(`fabricate.checkpoint.format`).
"""
