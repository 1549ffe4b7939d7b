"""Checkpoints in the formats of other tools: `exporting` writes them from an `export_source` (`pickled`: the formats of torch), `merging`
writes a model with its adapters merged, and `importing` makes a checkpoint of their weights.

Only `import_checkpoint` and the commands of `fabricate ckpt` load these modules. Saving and resuming never do, so that nothing they read
can be a pickle.
"""
