"""Saving (`saving`: when; `saved_state`: what) and `resuming` (from which checkpoint). What may have changed since (`changes`), what no
checkpoint holds (`unsaved`, `attributes`), whether ranks hold the same (`replicas`).
"""
