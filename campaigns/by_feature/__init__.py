"""A comparison of Accelerate's examples/by_feature, unmodified, with examples/transformers/by_feature.py; see `__main__`.

`cases` has the examples, `sides` runs both sides, `recorder` records Accelerate's losses and weights.
"""
