"""Accelerate's examples/by_feature, unmodified, beside examples/transformers/by_feature.py; see `__main__`.

cases: what is run. sides: how each side is run. recorder: what is noted of Accelerate's.
"""
