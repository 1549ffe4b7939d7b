"""Saving and resuming: when to save (`saving`), the state that is saved (`saved_state`), the checkpoint to resume from (`choosing`),
what has changed since (settings: `changes`, data: `compared`), the order of a resume (`resuming`), values that no checkpoint holds
(`unsaved`, `attributes`), and the comparison of ranks (`replicas`).
"""
