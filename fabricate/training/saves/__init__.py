"""Saving and resuming: when to save (`saving`), the state that is saved (`saved_state`), the checkpoint to resume from (`resuming`),
settings that have changed since (`changes`), values that no checkpoint holds (`unsaved`, `attributes`), and the comparison of ranks
(`replicas`).
"""
