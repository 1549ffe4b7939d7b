"""Checkpoints of other tools: what a checkpoint becomes for them (`exporting`), and their weights as one (`importing`).

Called by name only. Saving and resuming never load anything from here, so that nothing they read can be a pickle.
"""
