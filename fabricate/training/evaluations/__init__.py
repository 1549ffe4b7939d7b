"""Evaluations: the `evaluation` itself, its metrics (`evaluated`), and the check of a few validation batches before training (`sanity`).
`calibration`: forward passes over the training data at the end of a fit.
"""
