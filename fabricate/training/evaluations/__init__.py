"""Evaluating: the `evaluation` itself, the metrics that come out of it (`evaluated`), and the batches of it that are tried before training
(`sanity`).
"""
