"""Evaluating: the `evaluation` itself, the metrics that come out of it (`evaluated`), and the batches of it that are tried before training
(`sanity`). `calibration`: forwards over the training data when it is complete.
"""
