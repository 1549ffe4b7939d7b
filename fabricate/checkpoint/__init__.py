"""Checkpoints: the format on disk (`format`, torch-free), training state in it (`state`), other tools' files (`convert`)."""
