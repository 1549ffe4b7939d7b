"""Checkpoints in the formats of other tools: `exporting` writes them (`pickled` those of torch, from an `export_source`), and
`importing` makes a checkpoint of their weights.

Called by name only. Saving and resuming never load anything from here, so that nothing they read can be a pickle.
"""
