"""Checkpoints: the format on disk (`format`, torch-free), the training state in it (`state`), and files of other tools (`convert`)."""
